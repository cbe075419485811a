"""Two models of the same names at one client: the one that all clients train together, and its own.

w     received, moved, sent back as w^t − w
v_i   the client's own copy, kept until its next round

A name that is never received (normalization layers with norm="personal") has two copies at the client, too:
v's is in its personal part, w's in its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from partita.algorithms.local import sgd
from partita.algorithms.local.sgd import Carry
from partita.core import tree
from partita.core.parts import Optimizer, Problem
from partita.core.types import Batch, ClientState, Download, Partition, Tensors, Upload

KEPT = "shared."
"""What the memory calls w's copy of a name that is never received: this and the name."""

KEPT_BY_W = "optimizer_of_shared."
"""What the memory calls the state of w's optimizer, where it is kept; that of v_i's has the usual name."""
KEPT_BY_BOTH = (sgd.KEPT, KEPT_BY_W)

Step = Callable[[Carry, Batch, tuple[Tensor, ...]], Carry]


class Pair(NamedTuple):
    """What passes from step to step, for w and for v_i."""

    shared: Carry
    own: Carry


def all_twice(model: nn.Module, names: Sequence[str]) -> Partition:  # noqa: ARG001
    """Everything is shared, and every client has a copy of everything."""
    return Partition(shared=tuple(names), personal=tuple(names))


def copies(model: Tensors, partition: Partition) -> ClientState:
    """A new client's own model is the one that the run begins with."""
    alone = [k for k in partition.personal if k not in partition.shared]
    return ClientState(tree.pick(model, partition.personal), {KEPT + k: model[k] for k in alone})


def shared_model(download: Download, state: ClientState) -> Tensors:
    """w: what was received, and w's copies of what never is."""
    kept = {k.removeprefix(KEPT): v for k, v in state.memory.items() if k.startswith(KEPT)}
    return {**kept, **download.shared}


def start(problem: Problem, optimizer: Optimizer) -> Callable[[Download, ClientState], Pair]:
    """w as received, v_i as kept."""
    begin_w, begin_v = sgd.start(problem, optimizer, KEPT_BY_W), sgd.start(problem, optimizer)

    def both(download: Download, state: ClientState) -> Pair:
        w = state._replace(personal=shared_model(download, state))
        return Pair(begin_w(download, w), begin_v(download, state))

    return both


def on_shared(step: Step) -> Callable[[Pair, Batch, tuple[Tensor, ...]], Pair]:
    """The step on w."""
    return lambda pair, batch, lr: pair._replace(shared=step(pair.shared, batch, lr))


def on_own(step: Step) -> Callable[[Pair, Batch, tuple[Tensor, ...]], Pair]:
    """The step on v_i."""
    return lambda pair, batch, lr: pair._replace(own=step(pair.own, batch, lr))


def finish(problem: Problem) -> Callable[[Pair, Download, ClientState], tuple[Upload, ClientState]]:
    """Δ = w^t − w is sent, v_i stays. The loss is the mean over the steps of both."""
    end = sgd.finish(problem)

    def both(pair: Pair, download: Download, state: ClientState) -> tuple[Upload, ClientState]:
        w, v = pair
        total = w._replace(loss=w.loss + v.loss, steps=w.steps + v.steps)
        upload, _ = end(total, download, state)
        memory = sgd.remembered(sgd.remembered(state.memory, v), w, KEPT_BY_W)
        memory = {k: w.params[k.removeprefix(KEPT)] if k.startswith(KEPT) else x for k, x in memory.items()}
        return upload, ClientState(tree.pick(v.params, problem.partition.personal), memory)

    return both


def everything(problem: Problem) -> tuple[str, ...]:
    """All names, each once."""
    return tuple(dict.fromkeys((*problem.partition.shared, *problem.partition.personal)))


def add(carry: Carry, params: Tensors, loss: Tensor, **more: Any) -> Carry:
    """After a step: new values, and its loss."""
    return carry._replace(params=params, loss=carry.loss + loss, steps=carry.steps + 1, **more)
