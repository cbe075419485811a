"""Every client's score under a model, as a local rule: so it runs stacked like training does.

score_i = Σ_j w_ij metric(model_i(x_ij), y_ij) / Σ_j w_ij      over the client's test samples

with w_ij = 1, except where the metric is a loss that weights its classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from partita.core.parts import LocalRule, Personalize, Phase, Problem
from partita.core.types import Batch, ClientState, Download, Tensors, Upload, Work

BATCH = 256


class Sums(NamedTuple):
    """The metric so far and what it is divided by, beside what is needed to rebuild the model."""

    inner: Any
    shared: tuple[Tensors, Tensors]
    state: ClientState
    metric: Tensor
    weight: Tensor


def evaluation(personalize: Callable[[Problem], Personalize], split: str) -> Callable[[Problem], LocalRule]:
    """Personalize, then one pass over a split of the client's data."""

    def build(problem: Problem) -> LocalRule:
        own = personalize(problem)

        def start(download: Download, state: ClientState) -> Sums:
            zero = torch.zeros((), device=_device(download, state))
            return Sums(own.start(download, state), (download.shared, download.extra), state, zero, zero)

        def step(sums: Sums, batch: Batch, lr: tuple[Tensor, ...]) -> Sums:  # noqa: ARG001
            params = own.model(sums.inner, Download(sums.shared[0], sums.shared[1], 0), sums.state)
            scores = problem.score(params, batch)
            metric, weight = sums.metric + scores.metric, sums.weight + scores.metric_weight
            return sums._replace(metric=metric, weight=weight)

        def finish(sums: Sums, download: Download, state: ClientState) -> tuple[Upload, ClientState]:  # noqa: ARG001
            return Upload({}, metrics={"metric": sums.metric, "weight": sums.weight}), ClientState({}, {})

        adapt = tuple(phase.within("inner") for phase in own.phases)
        return LocalRule(start, (*adapt, Phase(step, work=lambda now: _pass(split))), finish)  # noqa: ARG005

    return build


def deployment(personalize: Callable[[Problem], Personalize]) -> Callable[[Problem], LocalRule]:
    """The model itself, as what would be uploaded."""

    def build(problem: Problem) -> LocalRule:
        own = personalize(problem)
        return LocalRule(own.start, own.phases, lambda c, d, s: (Upload(own.model(c, d, s)), s))

    return build


def global_model(problem: Problem) -> Personalize:
    """The server's model, the same for everyone."""
    del problem
    return Personalize(lambda download, state: download.shared, (), lambda params, d, s: params)  # noqa: ARG005


def _pass(split: str) -> Work:
    return Work(epochs=1, batch=BATCH, split=split, shuffle=False)


def _device(download: Download, state: ClientState) -> torch.device:
    return next(iter({**download.shared, **state.personal}.values())).device
