"""norm="static": BatchNorm statistics that nobody trains, measured when they are needed.

    μ = Σ_i n_i μ_i / Σ_i n_i,   likewise σ²     μ_i, σ²_i: means over the batches of client i

In training every batch is normalized by its own mean and variance, and nothing is tracked (Diao et al. 2021).
Before an evaluation all clients pass their training samples through the model once, and the server keeps what
they found; where devices hold narrow models, each class has statistics of its own. Training never looks at
them, so that it does not depend on how often one evaluates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from partita import tree
from partita.execute.classes import Classes
from partita.measure.evaluate import BATCH
from partita.types import (
    Batch,
    ClientState,
    Download,
    Group,
    LocalRule,
    Personalize,
    Phase,
    Problem,
    Tensors,
    Upload,
    Work,
)

if TYPE_CHECKING:
    from partita.execute import Executor
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
    classes = run.execute_group if isinstance(run.execute_group, Classes) else None
    found = _of(run, classes.whole if classes else run.execute_group, clients)
    there = {k: v for k, v in found.items() if k in run.server.shared}
    run.server = run.server._replace(shared={**run.server.shared, **there})
    if classes and run.devices.narrow:
        for kind, part in classes.parts.items():
            part.statistics.update(_of(run, part, clients[run.devices.kinds[clients] == kind]))


def _of(run: Federation, executor: Executor, clients: np.ndarray) -> Tensors:
    """The mean over these clients, by their samples; counters are none of it."""
    download = Download(run.server.shared, run.server.extra, run.server.version)
    total: Tensors = {}
    samples = run.data.train[clients, 1]
    for i in range(0, len(clients), run.block):
        some = clients[i : i + run.block]
        group = Group(tuple(range(len(some))), download)
        upload, _ = executor(run.statistics_rule, some, group, run.load(some.tolist()), run.moment(ROLE))
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

        work = Work(epochs=1, batch=BATCH, split="train", shuffle=False)
        return LocalRule(start, (Phase(step, work=lambda now: work),), finish)  # noqa: ARG005

    return build
