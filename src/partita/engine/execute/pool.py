"""Clients side by side on the cores of a machine: a few workers, each with one client and one core.

For models whose stacked form is slower than one client after another, such as convolutions on a CPU: two
workers with a core each leave less idle than one client on two cores.
"""

from __future__ import annotations

import collections
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from partita.core.parts import Program
from partita.core.types import ClientState, Group, RoundContext, Upload
from partita.data import FederatedData
from partita.engine.execute.loop import Buffers, Loop, Rows
from partita.engine.execute.plan import BoundProblem

MAX_IDLE = 1.25  # turns of all workers per client's turn, above which each client has all cores instead


@dataclass(frozen=True)
class Pool:
    """An executor whose workers each have a problem of their own: modules are not shared."""

    workers: tuple[Loop, ...]
    name: str = "pool"

    @property
    def bound(self) -> BoundProblem:
        """The problem and the data of the first worker."""
        return self.workers[0].bound

    def prefetch(self, program: Program, clients: np.ndarray, context: RoundContext) -> None:
        """Do nothing: clients are prepared one by one."""

    def release(self, kept: Any = ()) -> None:
        """Use the memory of earlier results of training again, but for what is `kept`."""
        self.workers[0].release(kept)

    def on(self, data: FederatedData, counted: FederatedData | None = None) -> Pool:
        """Return this executor bound to `data`."""
        return replace(self, workers=tuple([w.on(data, counted) for w in self.workers]))

    def __call__(
        self, program: Program, clients: np.ndarray, group: Group, states: ClientState, context: RoundContext
    ) -> tuple[Upload, ClientState]:
        """Let every worker take the next client, those with most work first."""
        n, count = len(clients), len(self.workers)
        alone = functools.partial(self.workers[0], program, clients, group, states, context)
        if -(-n // count) * count > MAX_IDLE * n:
            return alone()
        parallel = functools.partial(self._parallel, program, clients, group, states, context)
        # generators belong to all threads: a model that draws by itself runs in one
        return self.bound.problem.draws.watched(parallel, alone, self.bound.data.device)

    def _parallel(
        self, program: Program, clients: np.ndarray, group: Group, states: ClientState, context: RoundContext
    ) -> tuple[Upload, ClientState]:
        n, count = len(clients), len(self.workers)
        rows = Rows(n, self.workers[0].buffers if program.trains else Buffers())
        starts = self.bound.starts(clients, context)
        places = iter(self.bound.by_work(program, clients, context).tolist())

        def work(worker: Loop) -> None:
            try:
                for i in places:
                    rows.put(i, worker.one(program, i, clients, group, states, context, starts))
            finally:  # after an error nobody goes on
                collections.deque(places, maxlen=0)

        for done in [threads(count).submit(work, worker) for worker in self.workers]:
            done.result()
        return rows.result()


def _one_core() -> None:
    torch.set_num_threads(1)
    torch.get_num_threads()  # from now on this thread keeps it: before, it would look at what is set for all


@functools.cache
def threads(count: int) -> ThreadPoolExecutor:
    """Return threads that compute on one core each; they stay for the next round."""
    before = torch.get_num_threads()
    workers = ThreadPoolExecutor(count, "partita", initializer=_one_core)
    barrier = threading.Barrier(count)
    for done in [workers.submit(barrier.wait) for _ in range(count)]:  # so that all of them have begun
        done.result()
    torch.set_num_threads(before)  # threads that come later begin with what was set last
    return workers
