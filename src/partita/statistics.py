"""norm="static": BatchNorm statistics that nobody trains, measured when they are needed.

    μ_i, σ²_i      of client i's own model: means over the batches of its training samples
    μ = Σ_i n_i μ_i / Σ_i n_i,   likewise σ²      of the server's model

In training every batch is normalized by its own mean and variance, and nothing is tracked (Diao et al. 2021).
Before an evaluation all clients pass their training samples through the server's model once, and the server
keeps what they found; a client whose model is another one measures that on its own samples. Training never
looks at them, so that it does not depend on how often one evaluates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from partita import tree
from partita.measure.evaluate import BATCH
from partita.types import (
    Batch,
    ClientState,
    Download,
    Group,
    LocalRule,
    Moment,
    Personalize,
    Phase,
    Problem,
    Tensors,
    Upload,
    Work,
)

if TYPE_CHECKING:
    from partita.federation import Federation

ROLE = "measure statistics"


class Sums(NamedTuple):
    """A model, and the statistics of what it has seen so far."""

    model: Tensors
    buffers: Tensors


def refresh(run: Federation) -> None:
    """Measure, unless the server has the statistics of its model already."""
    if run.settings.norm != "static" or run.measured == run.server.version or not run.problem.buffers:
        return
    run.measured = run.server.version
    clients = np.flatnonzero(run.honest & (run.data.train[:, 1] > 0))
    there = {k: v for k, v in _of(run, clients).items() if k in run.server.shared}
    run.server = run.server._replace(shared={**run.server.shared, **there})


def _of(run: Federation, clients: np.ndarray) -> Tensors:
    """The mean over these clients, by their samples; counters are none of it."""
    download = Download(run.server.shared, run.server.extra, run.server.version)
    total: Tensors = {}
    samples = run.data.train[clients, 1]
    for i in range(0, len(clients), run.block):
        some = clients[i : i + run.block]
        group = Group(tuple(range(len(some))), download)
        states, moment = run.load(some.tolist()), run.moment(ROLE)
        upload, _ = run.execute_group(run.statistics_rule, some, group, states, moment)
        weight = torch.as_tensor(run.data.train[some, 1] / samples.sum(), device=run.settings.device)
        floats = {k: v for k, v in upload.delta.items() if v.is_floating_point()}
        sums = {k: torch.tensordot(weight.to(v), v, 1) for k, v in floats.items()}
        total = {k: total[k] + v for k, v in sums.items()} if total else sums
    return total


def rule(personalize: Callable[[Problem], Personalize]) -> Callable[[Problem], LocalRule]:
    """One pass over the client's training samples, in batches of the evaluation's size."""

    def build(problem: Problem) -> LocalRule:
        own = personalize(problem)

        def start(download: Download, state: ClientState) -> Sums:
            model = own.model(own.start(download, state), download, state)
            return Sums(model, tree.zeros_like(tree.pick(model, problem.buffers)))

        def step(sums: Sums, batch: Batch, lr: tuple[Tensor, ...]) -> Sums:  # noqa: ARG001
            return sums._replace(buffers=problem.statistics({**sums.model, **sums.buffers}, batch))

        def finish(sums: Sums, download: Download, state: ClientState) -> tuple[Upload, ClientState]:  # noqa: ARG001
            return Upload(sums.buffers), ClientState({}, {})

        return LocalRule(start, (Phase(step, work=_once),), finish)

    return build


class Own(NamedTuple):
    """A client's model in the making, what it was made of, and the statistics that were measured of it."""

    inner: Any
    received: tuple[Tensors, Tensors]
    state: ClientState
    buffers: Tensors
    batches: Tensor


def measured(personalize: Callable[[Problem], Personalize]) -> Callable[[Problem], Personalize]:
    """The same model with statistics of its own: of the client's training samples, if it has any."""

    def build(problem: Problem) -> Personalize:
        own = personalize(problem)

        def made(own_: Own) -> Tensors:
            return own.model(own_.inner, Download(*own_.received, 0), own_.state)

        def start(download: Download, state: ClientState) -> Own:
            inner = own.start(download, state)
            model = own.model(inner, download, state)
            none = tree.zeros_like(tree.pick(model, problem.buffers))
            count = torch.zeros((), device=next(iter(model.values())).device)
            return Own(inner, (download.shared, download.extra), state, none, count)

        def step(c: Own, batch: Batch, lr: tuple[Tensor, ...]) -> Own:  # noqa: ARG001
            buffers = problem.statistics({**made(c), **c.buffers}, batch)
            return c._replace(buffers=buffers, batches=c.batches + 1)

        def model(c: Own, download: Download, state: ClientState) -> Tensors:
            found = own.model(c.inner, download, state)
            floats = [k for k, v in c.buffers.items() if v.is_floating_point()]
            return found | {k: torch.where(c.batches > 0, c.buffers[k], found[k]) for k in floats}

        before = tuple(p._replace(step=_inside(p.step)) for p in own.phases)
        return Personalize(start, (*before, Phase(step, work=_once)), model)

    return build


def _inside(step: Callable[[Any, Any, Any], Any]) -> Callable[[Own, Any, Any], Own]:
    return lambda c, batch, lr: c._replace(inner=step(c.inner, batch, lr))


def _once(now: Moment) -> Work:  # noqa: ARG001
    """One pass over the training samples, in batches of the evaluation's size."""
    return Work(epochs=1, batch=BATCH, split="train", shuffle=False)
