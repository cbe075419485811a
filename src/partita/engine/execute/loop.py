"""The reference: one client after another, any module, exact batches, plain autograd."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from partita.core import tree
from partita.core.parts import Program
from partita.core.types import Batch, ClientState, Download, Group, RoundContext, Upload
from partita.data import FederatedData
from partita.engine.execute.feed import Feed, Window
from partita.engine.execute.plan import BoundProblem, plans
from partita.engine.execute.stack import Spec, flatten, unflatten


@dataclass(frozen=True)
class Loop:
    """An executor that runs one client after another."""

    bound: BoundProblem
    name: str = "loop"
    buffers: Buffers = field(default_factory=lambda: Buffers())

    def __call__(
        self, program: Program, clients: np.ndarray, group: Group, states: ClientState, context: RoundContext
    ) -> tuple[Upload, ClientState]:
        """Run each client's rule from start to finish."""
        work = functools.partial(self._all, program, clients, group, states, context)
        return self.bound.problem.draws.watched(work, work, self.bound.data.device)

    def _all(
        self, program: Program, clients: np.ndarray, group: Group, states: ClientState, context: RoundContext
    ) -> tuple[Upload, ClientState]:
        rows = Rows(len(clients), self.buffers if program.trains else Buffers())
        starts = self.bound.starts(clients, context)
        for i in range(len(clients)):
            rows.put(i, self.one(program, i, clients, group, states, context, starts))
        return rows.result()

    def one(
        self,
        program: Program,
        i: int,
        clients: np.ndarray,
        group: Group,
        states: ClientState,
        context: RoundContext,
        starts: tuple[Tensor, Tensor | None],
    ) -> tuple[Upload, ClientState]:
        """Run the i-th client alone."""
        shared, extra, version, *_ = group.download
        if group.stacked:
            shared, extra = tree.row((shared, extra), i)
        keys, counts = starts
        download = Download(shared, extra, version, keys[i], None if counts is None else counts[i])
        client, state, context = clients[i : i + 1], tree.row(states, i), context.of(slice(i, i + 1))
        rule = self.bound.bind(program)
        carry = rule.start(download, state)
        for number, phase in enumerate(rule.phases):
            feed = Feed(self.bound.data, plans(self.bound.data, client, phase, number, context))
            rates, _ = self.bound.rates(phase, feed.plans[0], context)
            batches: tuple[Batch | None, ...] = (None,) * phase.batches
            for s, window in feed.steps():
                if phase.until is not None and bool(phase.until(carry)):
                    break
                batches = tuple([_batch(window, i, s, last) for i, last in enumerate(batches)])
                lr = tuple([rate[s] if rate.dim() else rate for rate in rates])  # by step, or the same
                carry = phase.step(carry, batches if phase.batches > 1 else batches[0], lr)
        return rule.finish(carry, download, state)

    def prefetch(self, program: Program, clients: np.ndarray, context: RoundContext) -> None:
        """Do nothing: clients are prepared one by one."""

    def release(self, kept: Any = ()) -> None:
        """Use the memory of earlier results of training again, but for what is `kept`."""
        self.buffers.release(kept)

    def on(self, data: FederatedData, counted: FederatedData | None = None) -> Loop:
        """Return this executor bound to `data`."""
        return replace(self, bound=self.bound.on(data, counted))


def _batch(window: Window, i: int, s: int, before: Batch | None) -> Batch:
    """Return the i-th batch of a client's step."""
    plan, s = window.plans[i], s - window.first
    if plan.whole and before is not None:
        return before._replace(key=plan.keys[0, s])  # the rows are there already
    x, y = window.data.gather(plan.rows[0, s, : int(plan.size[0, s])])
    return Batch(x, y, None, plan.keys[0, s], plan.piece)


class Buffers:
    """Memory for the results of training, used again once it is released.

    Memory that is new to the process costs more than the copy into it.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lent: list[Tensor] = []

    def take(self, n: int, like: Tensor) -> Tensor:
        """Return a stack of n rows like this one, with any content."""
        shape = (n, *like.shape)
        for i, buffer in enumerate(self._free):
            if buffer.shape == shape and buffer.dtype == like.dtype and buffer.device == like.device:
                self._lent.append(self._free.pop(i))
                return buffer
        self._lent.append(like.new_empty(shape))
        return self._lent[-1]

    def release(self, kept: Any) -> None:
        """Take back what was lent, but for the memory of `kept`; what was not needed since is given up."""
        in_use = {x.untyped_storage().data_ptr() for x in tree.leaves(kept) if isinstance(x, Tensor)}
        self._free = [x for x in self._lent if x.untyped_storage().data_ptr() not in in_use]
        self._lent = []


class Rows:
    """The results of n clients side by side, as they come."""

    def __init__(self, n: int, buffers: Buffers) -> None:
        self._n, self._buffers = n, buffers
        self._rows: list[Any] = []
        self._spec: Spec = None
        self._lock = threading.Lock()

    def put(self, i: int, result: tuple[Upload, ClientState]) -> None:
        """Copy the result of the i-th client into its row."""
        leaves: list[Any] = []
        spec = flatten(result, leaves)
        with self._lock:
            if not self._rows:
                self._spec = spec
                take = self._buffers.take
                self._rows = [take(self._n, x) if isinstance(x, Tensor) else x for x in leaves]
        for row, x in zip(self._rows, leaves):
            if isinstance(x, Tensor):
                row[i].copy_(x)

    def result(self) -> tuple[Upload, ClientState]:
        """Return all of them as stacks."""
        stacks: tuple[Upload, ClientState] = unflatten(self._spec, iter(self._rows))
        return stacks
