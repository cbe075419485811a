"""The reference: one client after another, any module, exact batches, plain autograd."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from partita.core import tree
from partita.core.parts import LocalRule
from partita.core.types import Batch, ClientState, Download, Group, RoundContext, Upload
from partita.data import FederatedData
from partita.engine.execute.base import BoundProblem, Build
from partita.engine.execute.plan import Plan, plans, start_keys
from partita.engine.execute.stack import Spec, flatten, unflatten


@dataclass(frozen=True)
class Loop:
    """See `partita.engine.execute.base.Executor`."""

    bound: BoundProblem
    name: str = "loop"
    spare: dict[Any, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        keep_freed_memory()

    def __call__(
        self, build: Build, clients: np.ndarray, group: Group, states: ClientState, context: RoundContext
    ) -> tuple[Upload, ClientState]:
        """Each client's rule from start to finish."""
        work = functools.partial(self._all, build, clients, group, states, context)
        return self.bound.problem.draws.watched(work, work, self.bound.data.x.device)

    def _all(
        self, build: Build, clients: np.ndarray, group: Group, states: ClientState, context: RoundContext
    ) -> tuple[Upload, ClientState]:
        rows = Rows(len(clients), self.spare if context.role == "training" else {})
        keys = start_keys(clients, context, self.bound.data.x.device)
        for i in range(len(clients)):
            rows.put(i, self.one(build, i, clients, group, states, context, keys))
        return rows.result()

    def one(
        self,
        build: Build,
        i: int,
        clients: np.ndarray,
        group: Group,
        states: ClientState,
        context: RoundContext,
        keys: Tensor,
    ) -> tuple[Upload, ClientState]:
        """The i-th client alone."""
        shared, extra, version, _ = group.download
        if group.stacked:
            shared, extra = tree.row((shared, extra), i)
        download = Download(shared, extra, version, keys[i])
        own = clients[i : i + 1], download, tree.row(states, i), context.of(slice(i, i + 1))
        return self._client(self.bound.bind(build), *own)

    def prefetch(self, build: Build, clients: np.ndarray, context: RoundContext) -> None:
        """Nothing: clients are prepared one by one."""

    def on(self, data: FederatedData) -> Loop:
        """The same on other samples."""
        return replace(self, bound=self.bound.on(data))

    def _client(
        self,
        rule: LocalRule,
        client: np.ndarray,
        download: Download,
        state: ClientState,
        context: RoundContext,
    ) -> tuple[Upload, ClientState]:
        carry = rule.start(download, state)
        for number, phase in enumerate(rule.phases):
            found = plans(self.bound.data, client, phase, number, context)
            lr, _ = self.bound.rates(phase, context)
            batches: tuple[Batch | None, ...] = (None,) * len(found)
            for s in range(int(found[0].steps[0])):
                if phase.until is not None and bool(phase.until(carry)):
                    break
                batches = tuple([self._batch(plan, s, last) for plan, last in zip(found, batches)])
                carry = phase.step(carry, batches if phase.batches > 1 else batches[0], lr)
        return rule.finish(carry, download, state)

    def _batch(self, plan: Plan, s: int, before: Batch | None) -> Batch:
        if plan.whole and before is not None:
            return before._replace(key=plan.keys[0, s])  # the rows are there already
        x, y = self.bound.data.gather(plan.rows[0, s, : int(plan.size[0, s])])
        return Batch(x, y, None, plan.keys[0, s])


class Rows:
    """The results of n clients side by side, as they come.

    Memory of an earlier round is used again once nobody holds it any more: memory that is new to the process
    costs more than the copy into it.
    """

    def __init__(self, n: int, spare: dict[Any, Tensor]) -> None:
        self._n, self._spare = n, spare
        self._rows: list[Any] = []
        self._spec: Spec = None
        self._lock = threading.Lock()

    def put(self, i: int, result: tuple[Upload, ClientState]) -> None:
        """The i-th client's."""
        leaves: list[Any] = []
        spec = flatten(result, leaves)
        with self._lock:
            if not self._rows:
                self._spec = spec
                self._rows = [self._room(k, x) if isinstance(x, Tensor) else x for k, x in enumerate(leaves)]
        for row, x in zip(self._rows, leaves):
            if isinstance(x, Tensor):
                row[i].copy_(x)

    def result(self) -> tuple[Upload, ClientState]:
        """All of them."""
        found: tuple[Upload, ClientState] = unflatten(self._spec, iter(self._rows))
        return found

    def _room(self, k: int, x: Tensor) -> Tensor:
        shape = (self._n, *x.shape)
        room = self._spare.pop(k, None)
        if room is None or room.shape != shape or room.dtype != x.dtype or sys.getrefcount(room) > 2:
            room = x.new_empty(shape)
        self._spare[k] = room
        return room


@functools.cache
def keep_freed_memory(limit: int = 1 << 29) -> None:
    """Let the process keep up to `limit` bytes of freed memory instead of returning them to the system.

    Clients of a large model free and take the same tens of megabytes in turn; getting them back from the
    system page by page costs a tenth of the time. glibc only; elsewhere nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        trim_threshold, map_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
        libc.mallopt(map_threshold, 1 << 25)
        libc.mallopt(trim_threshold, limit)
