"""How a local rule, written for one client, runs for many: one after another, or stacked."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from torch import nn

from partita.core import check, tree
from partita.core.device import arithmetic
from partita.core.types import Moment, Partition, Tensors
from partita.data import FederatedData
from partita.engine.execute.auto import Auto
from partita.engine.execute.base import Bound, Build, Executor, Runner
from partita.engine.execute.graph import Graph
from partita.engine.execute.loop import Loop
from partita.engine.execute.pool import Pool
from partita.engine.execute.probe import Findings, examine, names_of, takes_channels_last, why_not_stackable
from partita.engine.execute.problem import Change, ModelProblem, reference, stacked
from partita.engine.execute.seeding import OwnDraws
from partita.engine.execute.vmap import Vmap

__all__ = [
    "Auto",
    "Build",
    "Executor",
    "Findings",
    "ModelProblem",
    "Moment",
    "Vmap",
    "budget",
    "examine",
    "make_executor",
    "names_of",
]


def make_executor(
    kind: str,
    model: nn.Module,
    data: FederatedData,
    partition: Partition,
    findings: Findings,
    params: Tensors,
    *,
    memory: int | None = None,
    picks: dict[str, dict[str, str]] | None = None,
    label: str = "",
    change: Change | None = None,
    tracks: bool = True,
    usual: Collection[int] = (),
    batch: int | None = None,
    half: bool = False,
    tell: Callable[[str], None] = lambda text: None,  # noqa: ARG005
) -> tuple[Runner, ModelProblem]:
    """The executor of this name and the problem it solves; falls back to the loop, with the reason.

    `usual` are the numbers of clients that come in every round, `batch` the samples of a step (None: all that
    a client has); `half`: models compute in bfloat16; `tell` hears what takes a while.
    """
    own = findings.own
    given = (model, partition, *findings[:3], data.clients, change, tracks, own.recomputes)
    alone = replace(reference(*given), draws=OwnDraws(bool(own.draws)))
    loop = Loop(Bound(replace(alone, half=half), data))
    if kind == "loop":
        return loop, loop.bound.problem
    last = takes_channels_last(alone, params, data)  # the reference has images as they are given
    loop = Loop(Bound(replace(alone, half=half, last=last), data))
    pool = _pool(loop, findings)
    if kind == "pool":
        return pool, loop.bound.problem
    problem = stacked(*given)
    reason: str | None = own.alone
    # parameters, gradient, momentum, new values, delta; what autograd saves and as much again on the way back
    model_bytes, sample_bytes = 5 * tree.nbytes(params), 3 * findings.sample_bytes
    room = budget(memory, data.x.device)
    if not reason:
        largest = int(data.train[:, 1].max())
        tried = max(3, min(batch or largest, largest, room // max(1, 4 * sample_bytes)))
        with arithmetic("fp32"):
            reason = why_not_stackable(alone, problem, params, data, tried)
    picks = {} if picks is None else picks
    if reason is not None:
        check.warn(
            f"executor={kind!r}: {type(model).__name__} cannot be stacked; each client trains alone "
            f"(executor={pool.name!r}). Reason: {reason}",
        )
        picks["fallback"] = {"picked": pool.name, "why": reason}
        return pool, loop.bound.problem
    problem = replace(problem, half=half)
    bound = Bound(problem, data)
    vmap = Vmap(bound, room, model_bytes=model_bytes, sample_bytes=sample_bytes)
    if kind == "vmap":
        return vmap, problem
    graph = Graph(bound, room, vmap.model_bytes, vmap.sample_bytes, picks=picks, label=label)
    graph = replace(graph, usual=frozenset(usual), always=kind == "compiled", tell=tell)
    if kind in ("graph", "compiled"):
        return graph, problem
    candidates = (vmap, pool) if data.x.device.type == "cpu" else (graph, vmap, loop)
    return Auto(candidates, picks, label=label), problem


def _pool(loop: Loop, findings: Findings) -> Loop | Pool:
    """A worker for each core; a loop where there is one, or where passes share something."""
    bound, count = loop.bound, torch.get_num_threads()
    if bound.data.x.device.type != "cpu" or count == 1 or findings.own.draws or findings.own.remembers:
        return loop
    return Pool((loop, *[Loop(Bound(bound.problem.twin(), bound.data)) for _ in range(count - 1)]))


def budget(memory: int | None, device: torch.device) -> int:
    """Bytes that stacked clients may take: as the user says, or a quarter of what there is."""
    return memory if memory is not None else _memory(device) // 4


def _memory(device: torch.device) -> int:
    """What the device has in all: the same in every run on it, so that chunks are the same too."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
