"""norm="static": BatchNorm statistics that nobody trains, measured when they are needed.

    μ = Σ_b n_b μ_b / Σ_b n_b,   σ² = Σ_b n_b (σ²_b + μ_b²) / Σ_b n_b − μ²     over batches b of n_b samples

In training every batch is normalized by its own mean and variance, and nothing is tracked (Diao et al. 2021).
Before an evaluation all clients pass their training samples through the server's model once, and the server
keeps what they found; where devices hold narrow models, each class has statistics of its own. A client whose
model has something of its own measures that on its own samples. Training never looks at any of them, so that
it does not depend on how often one evaluates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from partita.algorithms.local.evaluation import BATCH
from partita.core import tree
from partita.core.parts import LocalRule, Personalize, Phase, Problem
from partita.core.types import Batch, ClientState, Download, Group, RoundContext, Tensors, Upload, Work
from partita.engine.devices.classes import Classes, Part

if TYPE_CHECKING:
    from partita.engine.execute import Executor
    from partita.engine.federation import Federation

ROLE = "measure statistics"


class Sums(NamedTuple):
    """A model, and of what it has seen: Σ n μ and Σ n (σ² + μ²) by name, Σ n."""

    model: Tensors
    sums: Tensors
    samples: Tensor


def refresh(run: Federation) -> None:
    """Measure, unless the server has the statistics of its model already."""
    if run.settings.norm != "static" or run.measured == run.server.version or not run.problem.tracked:
        return
    run.measured = run.server.version
    clients = np.flatnonzero(run.honest & (run.data.train[:, 1] > 0))
    classes = run.execute_group if isinstance(run.execute_group, Classes) else None
    found = _of(run, classes.whole if classes else run.execute_group, clients)
    there = {k: v for k, v in found.items() if k in run.server.shared}
    run.server = run.server._replace(shared={**run.server.shared, **there})
    if classes and run.devices.narrow:
        for kind, part in classes.parts.items():
            part.statistics.update(_of(run, part, clients[run.devices.kinds[clients] == kind]))


def _of(run: Federation, executor: Executor | Part, clients: np.ndarray) -> Tensors:
    """Over all samples of these clients."""
    download = Download(run.server.shared, run.server.extra, run.server.version)
    total: Tensors = {}
    samples = torch.zeros((), dtype=torch.float64, device=run.settings.device)
    for i in range(0, len(clients), run.block):
        some = clients[i : i + run.block]
        group = Group(tuple(range(len(some))), download)
        states, context = run.load(some.tolist()), run.context(ROLE)
        upload, _ = executor(run.statistics_rule, some, group, states, context)
        sums = {k: v.sum(0, dtype=torch.float64) for k, v in upload.delta.items()}
        total = {k: total[k] + v for k, v in sums.items()} if total else sums
        samples = samples + upload.metrics["samples"].sum(dtype=torch.float64)
    return _settled(total, samples, run.problem.tracked, run.server.shared) if len(clients) else {}


def _none(problem: Problem, model: Tensors) -> tuple[Tensors, Tensor]:
    names = [name for pair in problem.tracked for name in pair if name in model]
    sums = tree.zeros_like(tree.pick(model, names))
    return sums, torch.zeros((), device=next(iter(model.values())).device)


def _added(problem: Problem, sums: Tensors, found: Tensors, batch: Batch) -> tuple[Tensors, Tensor]:
    """The sums with one more batch, and its samples."""
    n = (
        batch.mask.sum()
        if batch.mask is not None
        else torch.tensor(float(len(batch.x)), device=batch.x.device)
    )
    new: Tensors = {}
    for mean, var in problem.tracked:
        new[mean] = sums[mean] + n * found[mean]
        new[var] = sums[var] + n * (found[var] + found[mean] ** 2)
    return new, n


def _settled(sums: Tensors, samples: Tensor, pairs: Sequence[tuple[str, str]], before: Tensors) -> Tensors:
    """μ and σ²; what they were before, of no samples."""
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


def rule(personalize: Callable[[Problem], Personalize]) -> Callable[[Problem], LocalRule]:
    """One pass over the client's training samples, in batches of the evaluation's size."""

    def build(problem: Problem) -> LocalRule:
        own = personalize(problem)

        def start(download: Download, state: ClientState) -> Sums:
            model = own.model(own.start(download, state), download, state)
            return Sums(model, *_none(problem, model))

        def step(c: Sums, batch: Batch, lr: tuple[Tensor, ...]) -> Sums:  # noqa: ARG001
            sums, n = _added(problem, c.sums, problem.statistics(c.model, batch), batch)
            return c._replace(sums=sums, samples=c.samples + n)

        def finish(c: Sums, download: Download, state: ClientState) -> tuple[Upload, ClientState]:  # noqa: ARG001
            return Upload(c.sums, metrics={"samples": c.samples}), ClientState({}, {})

        return LocalRule(start, (Phase(step, work=_once),), finish)

    return build


class Own(NamedTuple):
    """A client's model in the making, what it was made of, and what was measured of it."""

    inner: Any
    received: tuple[Tensors, Tensors]
    state: ClientState
    sums: Tensors
    samples: Tensor


def measured(personalize: Callable[[Problem], Personalize]) -> Callable[[Problem], Personalize]:
    """The same model with statistics of its own: of the client's training samples, if it has any."""

    def build(problem: Problem) -> Personalize:
        own = personalize(problem)

        def start(download: Download, state: ClientState) -> Own:
            inner = own.start(download, state)
            none = _none(problem, own.model(inner, download, state))
            return Own(inner, (download.shared, download.extra), state, *none)

        def step(c: Own, batch: Batch, lr: tuple[Tensor, ...]) -> Own:  # noqa: ARG001
            now = own.model(c.inner, Download(*c.received, 0), c.state)
            sums, n = _added(problem, c.sums, problem.statistics(now, batch), batch)
            return c._replace(sums=sums, samples=c.samples + n)

        def model(c: Own, download: Download, state: ClientState) -> Tensors:
            found = own.model(c.inner, download, state)
            return found | _settled(c.sums, c.samples, problem.tracked, found)

        before = tuple(phase.within("inner") for phase in own.phases)
        return Personalize(start, (*before, Phase(step, work=_once)), model)

    return build


def _once(now: RoundContext) -> Work:  # noqa: ARG001
    """One pass over the training samples, in batches of the evaluation's size."""
    return Work(epochs=1, batch=BATCH, split="train", shuffle=False)
