"""The reference: one client after another, any module, exact batches, plain autograd."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from partita import tree
from partita.execute.base import Bound, Build, work_of
from partita.execute.plan import Moment, draw
from partita.types import Batch, ClientState, Download, Group, LocalRule, Upload


@dataclass(frozen=True)
class Loop:
    """See `partita.execute.base.Executor`."""

    bound: Bound
    name: str = "loop"

    def __post_init__(self) -> None:
        keep_freed_memory()

    def __call__(
        self, build: Build, clients: np.ndarray, group: Group, states: ClientState, moment: Moment
    ) -> tuple[Upload, ClientState]:
        """Each client's rule from start to finish."""
        rule = self.bound.bind(build)
        stack: Any = None
        for i in range(len(clients)):
            shared, extra, version = group.download
            if group.stacked:
                shared, extra = tree.row((shared, extra), i)
            download = Download(shared, extra, version)
            result = self._client(rule, clients[i : i + 1], download, tree.row(states, i), moment)
            if stack is None:
                stack = tree.map_tensors(lambda x: x.new_empty(len(clients), *x.shape), result)
            tree.map_tensors(lambda rows, x, i=i: rows[i].copy_(x), stack, result)
        uploads, states = stack
        return uploads, states

    def _client(
        self, rule: LocalRule, client: np.ndarray, download: Download, state: ClientState, moment: Moment
    ) -> tuple[Upload, ClientState]:
        carry = rule.start(download, state)
        for number, phase in enumerate(rule.phases):
            plan = draw(self.bound.data, client, work_of(phase, moment), number, moment)
            lr = self.bound.rates(phase, moment)
            for s in range(int(plan.steps[0])):
                x, y = self.bound.data.gather(plan.rows[0, s, : int(plan.size[0, s])])
                carry = phase.step(carry, Batch(x, y, None, plan.keys[0, s]), lr)
        return rule.finish(carry, download, state)


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
