"""The training pipeline of Pillutla et al. (2022), appendix B.2, or any other sequence of methods.

    (a) a global model, e.g. fedavg
    (b) shared and personal parts from there, e.g. fedalt: u and v_i start from (a)'s model
    (c) fine-tuning of the personal parts, u fixed

A stage starts from what the one before left: the server's model, and each client's personal part where it
has one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from partita import check
from partita.algorithms.base import METHODS
from partita.types import Algorithm, Stage


def stage(
    algorithm: Algorithm,
    *,
    rounds: int | None = None,
    cohort: int | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    state: str | None = None,
) -> Stage:
    """One part of a pipeline: a method with its own length, cohort and work (None: as the run says).

    Given `epochs` and no `rounds`, a stage is one round of all clients, as in fine-tuning.
    """
    if not isinstance(algorithm, Algorithm) or algorithm.stages:
        raise check.fail("algorithm", algorithm, "a method such as partita.fedavg(lr=0.1)")
    for field, value in {"rounds": rounds, "cohort": cohort, "epochs": epochs, "batch": batch}.items():
        if value is not None:
            check.integer(field, value, low=1)
    if steps is not None and not isinstance(steps, tuple):
        check.integer("steps", steps, low=1)
    if state is not None:
        check.choice("state", state, ("keep", "reset"))
    if steps is not None and epochs is not None:
        raise check.fail("steps", steps, "steps or epochs, not both")
    return Stage(algorithm, rounds, cohort, steps, epochs, batch, state)


def pipeline(*stages: Stage | Algorithm) -> Algorithm:
    """Methods one after another, each from what the one before left."""
    if not stages:
        raise check.fail("stages", stages, "at least one stage")
    parts = tuple(s if isinstance(s, Stage) else stage(s) for s in stages)
    options: dict[str, Any] = {"stages": parts}
    return replace(parts[-1].algorithm, name="pipeline", options=options, stages=parts)


METHODS["pipeline"] = pipeline
