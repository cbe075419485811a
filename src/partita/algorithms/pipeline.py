"""Pipeline: the training of Pillutla et al. (2022), appendix B.2, or any other sequence of methods.

    (a) a global model, e.g. fedavg
    (b) shared and personal parts from there, e.g. fedalt: u and v_i start from (a)'s model
    (c) fine-tuning of the personal parts, u fixed

A stage starts from what the one before left: the server's model, and each client's personal part where it
has one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from partita.algorithms.base import METHODS
from partita.core import check
from partita.core.options import Option, checked
from partita.core.parts import Algorithm, StagePlan


def _method(field: str, value: Any) -> Algorithm:
    if not isinstance(value, Algorithm) or value.stages:
        raise check.fail(field, value, "a method such as partita.fedavg(lr=0.1)")
    return value


@checked()
def stage(
    algorithm: Annotated[
        Algorithm,
        Option("the method of this stage", allowed="a method such as partita.fedavg(lr=0.1)", check=_method),
    ],
    *,
    rounds: Annotated[int | None, Option("how many rounds it has", low=1)] = None,
    cohort: Annotated[int | None, Option("how many clients take part in a round", low=1)] = None,
    steps: Annotated[
        int | tuple[int, ...] | None,
        Option("minibatch steps of a client in a round", low=1, allowed="one for each client"),
    ] = None,
    epochs: Annotated[int | None, Option("passes over a client's data in a round", low=1)] = None,
    batch: Annotated[int | None, Option("samples in a step", low=1)] = None,
    state: Annotated[str | None, Option("whether clients keep their part", choices=("keep", "reset"))] = None,
    schedule: Annotated[
        object,
        Option(
            "who reports when",
            allowed="a schedule such as partita.schedule.synchronous()",
            check=check.schedule,
        ),
    ] = None,
) -> StagePlan:
    """One part of a pipeline: a method with its own length, cohort and work (None: as the run says).

    Given `epochs` and no `rounds`, a stage is one round of all clients, as in fine-tuning.

    Use it where a part of a pipeline differs from what the run says.
    """
    if steps is not None and epochs is not None:
        raise check.fail("steps", steps, "steps or epochs, not both")
    return StagePlan(algorithm, rounds, cohort, steps, epochs, batch, state, schedule)


def pipeline(
    *stages: Annotated[StagePlan | Algorithm, Option("the stages in their order, or methods")],
) -> Algorithm:
    """Methods one after another, each from what the one before left.

    Use it to personalize a model that all clients have trained together: fedavg → fedalt → finetune.
    """
    if not stages:
        raise check.fail("stages", stages, "at least one stage")
    parts = tuple(s if isinstance(s, StagePlan) else stage(s) for s in stages)
    options: dict[str, Any] = {"stages": parts}
    return replace(parts[-1].algorithm, name="pipeline", options=options, stages=parts)


METHODS["pipeline"] = pipeline
