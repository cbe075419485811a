"""norm="static": BatchNorm statistics that nobody trains, measured when they are needed.

    μ = Σ_b n_b μ_b / Σ_b n_b,   σ² = Σ_b n_b (σ²_b + μ_b²) / Σ_b n_b − μ²     over batches b of n_b samples

In training every batch is normalized by its own mean and variance, and nothing is tracked (Diao et al. 2021).
Before an evaluation all clients pass their training samples through the server's model once, and the server
keeps the result; where devices hold narrow models, each class has statistics of its own. A client whose model
has something of its own measures that on its own samples. Training never reads any of these statistics, so
that it does not depend on how often one evaluates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from partita.core import tree
from partita.core.parts import LocalRule, Personalize, Phase, Problem
from partita.core.types import Batch, ClientState, Download, RoundContext, Tensors, Upload, Work

BATCH = 256  # samples that are normalized together: what the next layer gets to see depends on it


class Sums(NamedTuple):
    """A model, and over the batches it has seen Σ n μ and Σ n (σ² + μ²) by name, and Σ n."""

    model: Tensors
    sums: Tensors
    samples: Tensor


def _zeros(problem: Problem, model: Tensors) -> tuple[Tensors, Tensor]:
    names = [name for pair in problem.tracked for name in pair if name in model]
    sums = tree.zeros_like(tree.pick(model, names))
    return sums, torch.zeros((), device=next(iter(model.values())).device)


def _added(problem: Problem, sums: Tensors, found: Tensors, batch: Batch) -> tuple[Tensors, Tensor]:
    """Add one more batch to the sums; also return how many samples it has."""
    if batch.mask is None:
        n = torch.tensor(float(len(batch.y)), device=batch.y.device)
    else:
        n = batch.mask.sum()
    new: Tensors = {}
    for mean, var in problem.tracked:
        new[mean] = sums[mean] + n * found[mean]
        new[var] = sums[var] + n * (found[var] + found[mean] ** 2)
    return new, n


def settled(sums: Tensors, samples: Tensor, pairs: Sequence[tuple[str, str]], before: Tensors) -> Tensors:
    """Return μ and σ²; without samples, what they were before."""
    found: Tensors = {}
    for mean, var in pairs:
        if mean not in sums or mean not in before:
            continue
        n = samples.clamp(min=1)
        mu = sums[mean] / n
        sigma = (sums[var] / n - mu**2).clamp(min=0)
        for name, value in ((mean, mu), (var, sigma)):
            old = before[name][tuple(slice(0, k) for k in value.shape)]  # a narrow model has the first ones
            found[name] = torch.where(samples > 0, value.to(old.dtype), old)
    return found


def statistics_of(personalize: Callable[[Problem], Personalize]) -> Callable[[Problem], LocalRule]:
    """Return the rule that sums up statistics in one pass over the client's training samples."""

    def build(problem: Problem) -> LocalRule:
        own = personalize(problem)

        def start(download: Download, state: ClientState) -> Sums:
            model = own.model(own.start(download, state), download, state)
            return Sums(model, *_zeros(problem, model))

        def step(c: Sums, batch: Batch, lr: tuple[Tensor, ...]) -> Sums:  # noqa: ARG001
            sums, n = _added(problem, c.sums, problem.statistics(c.model, batch), batch)
            return c._replace(sums=sums, samples=c.samples + n)

        def finish(c: Sums, download: Download, state: ClientState) -> tuple[Upload, ClientState]:  # noqa: ARG001
            return Upload(c.sums, metrics={"samples": c.samples}), ClientState({}, {})

        return LocalRule(start, (Phase(step, work=_once),), finish)

    return build


class Own(NamedTuple):
    """A client's model in the making, what it is made from, and the sums of its statistics."""

    inner: Any
    received: tuple[Tensors, Tensors]
    state: ClientState
    sums: Tensors
    samples: Tensor


def with_own_statistics(personalize: Callable[[Problem], Personalize]) -> Callable[[Problem], Personalize]:
    """Give the model statistics of its own: those of the client's training samples, if it has any."""

    def build(problem: Problem) -> Personalize:
        own = personalize(problem)

        def start(download: Download, state: ClientState) -> Own:
            inner = own.start(download, state)
            none = _zeros(problem, own.model(inner, download, state))
            return Own(inner, (download.shared, download.extra), state, *none)

        def step(c: Own, batch: Batch, lr: tuple[Tensor, ...]) -> Own:  # noqa: ARG001
            now = own.model(c.inner, Download(*c.received, 0), c.state)
            sums, n = _added(problem, c.sums, problem.statistics(now, batch), batch)
            return c._replace(sums=sums, samples=c.samples + n)

        def model(c: Own, download: Download, state: ClientState) -> Tensors:
            found = own.model(c.inner, download, state)
            return found | settled(c.sums, c.samples, problem.tracked, found)

        before = tuple(phase.within("inner") for phase in own.phases)
        return Personalize(start, (*before, Phase(step, work=_once)), model)

    return build


def _once(now: RoundContext) -> Work:  # noqa: ARG001
    """Return one pass over the training samples, in batches of a fixed size."""
    return Work(epochs=1, batch=BATCH, split="train", shuffle=False)
