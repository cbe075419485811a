"""The same budget of fine-tuning for all methods, as in Toghani, Lee & Uribe (2022), section 5.

    client's model:  w_i ← w_i − η ∇f_i(w_i)      so many steps, when it is evaluated
                     from w_i = (u, v_i), what the client received with its own part in place

Training is the method's own; nothing of these steps is kept or sent.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Annotated, Any

from partita.algorithms.local.meta import adapted
from partita.algorithms.pipeline import pipeline
from partita.core import check
from partita.core.options import Option, checked
from partita.core.parts import Algorithm

METHOD = "a method such as partita.fedavg(lr=0.1)"


def _method(field: str, value: Any) -> Algorithm:
    if not isinstance(value, Algorithm):
        raise check.fail(field, value, METHOD)
    return value


@checked()
def tuned(
    algorithm: Annotated[Algorithm, Option("the method that trains", allowed=METHOD, check=_method)],
    lr: Annotated[float, Option("η, the size of a step", low=0, example=0.05)],
    steps: Annotated[int, Option("how many steps", low=1)] = 10,
    batch: Annotated[int | None, Option("samples in a step (None: all of the client's)", low=1)] = None,
) -> Algorithm:
    """The same method, whose clients are evaluated after a few plain SGD steps on their own training data.

    It replaces the method's own way to a client's model, such as the one step of perfedavg. Of a pipeline,
    the last stage is tuned. The method keeps its name; `tuned` in its options says what was added.

    Use it to compare methods with the same budget of fine-tuning, as global models with personal ones.
    """
    if algorithm.stages:
        *before, last = algorithm.stages
        return pipeline(*before, replace(last, algorithm=tuned(last.algorithm, lr, steps, batch)))
    return replace(
        algorithm,
        personalize=functools.partial(adapted, alpha=lr, steps=steps, batch=batch),
        options={**algorithm.options, "tuned": {"lr": lr, "steps": steps, "batch": batch}},
    )
