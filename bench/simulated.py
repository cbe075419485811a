"""Rounds of real workers whose clients sleep, and the seconds of what driver and workers do beside them.

bench/scaling.py computes with what is measured here.
"""

from __future__ import annotations

import functools
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

import partita as pt
from partita.cli.bench.workloads import LR, WORKLOADS
from partita.core import draws, tree
from partita.core.parts import Algorithm, Program
from partita.core.types import ClientState, Download, Group, RoundContext, Tensors, Upload, Work
from partita.data import FederatedData
from partita.engine.cohorts import RunningSum
from partita.engine.execute import EXECUTORS, Runner, Task
from partita.engine.execute.plan import BoundProblem
from partita.engine.pending import Trained
from partita.engine.workers.messages import sent
from partita.engine.workers.share import Assignment, Summed
from partita.engine.workers.spread import Joined
from partita.engine.workers.wire import Channel, Outbox, pack, unpack
from workers import Rounds

SHARES = 8  # whose sums are added up when that is timed
MOST_ROWS, ROW_BYTES = 1000, 640 << 20  # deltas whose way back is timed: more than memory that is kept
WARM = 1  # rounds after the first that are left out: memory is new, and stages are bound


# ---- an executor whose clients sleep


@dataclass(frozen=True, eq=False)
class Sleeping:
    """An executor that sleeps as long as its clients would train, and returns what they send after no step.

    Programs that do not train are run by `inner`. `results` has what a number of clients sends: it is
    computed once, so that a round costs the time of its sleep.
    """

    inner: Runner
    client: float
    floor: float
    results: dict[int, tuple[Upload, ClientState]] = field(default_factory=dict)
    name: str = "sleeping"

    @property
    def bound(self) -> BoundProblem:
        """The problem that other programs are run for."""
        return self.inner.bound

    def __call__(
        self, program: Program, clients: np.ndarray, group: Group, states: ClientState, context: RoundContext
    ) -> tuple[Upload, ClientState]:
        """Sleep, where clients would train."""
        if not program.trains:
            return self.inner(program, clients, group, states, context)
        begin = time.perf_counter()
        if len(clients) not in self.results:
            self.results[len(clients)] = self._untrained(program, len(clients), group, states)
        rest = max(self.floor, len(clients) * self.client) - (time.perf_counter() - begin)
        time.sleep(max(0.0, rest))
        return self.results[len(clients)]

    def _untrained(
        self, program: Program, n: int, group: Group, states: ClientState
    ) -> tuple[Upload, ClientState]:
        rule, download = self.bound.bind(program), group.download
        state = tree.row(states, 0)
        one = rule.finish(rule.start(download, state), download, state)
        return tree.stack([one] * n)  # type: ignore[no-any-return]

    def prefetch(self, program: Program, clients: np.ndarray, context: RoundContext) -> None:
        """Do nothing: there is nothing to prepare."""

    def on(self, data: FederatedData) -> Sleeping:
        """Return this executor bound to `data`."""
        return replace(self, inner=self.inner.on(data))


def sleeping(task: Task, client: float, floor: float) -> Sleeping:
    """Return an executor whose clients sleep so many seconds each, and a share at least the floor."""
    return Sleeping(EXECUTORS["loop"](task), client, floor)


def method(way: str) -> Algorithm:
    """Return federated averaging whose deltas are added up by workers, or are all sent."""
    mean = pt.aggregate.mean()
    return pt.fedavg(lr=LR, aggregate=mean if way == "sums" else mean._replace(linear=False))


def rounds(
    name: str, workers: int, cohort: int, way: str, client: float, floor: float, count: int
) -> tuple[float, float]:
    """Return the median seconds of a round, and those beyond the work of the busiest worker."""
    work = WORKLOADS[name]._replace(clients=cohort, steps=1, batch=2)
    clock = Rounds("cpu")
    pt.federate(
        work.model(),
        work.data(),
        method(way),
        rounds=count + WARM + 1,
        cohort=cohort,
        steps=work.steps,
        batch=work.batch,
        baselines=False,
        evaluate_every=10**6,
        device="cpu",
        executor=functools.partial(sleeping, client=client, floor=floor),
        workers=pt.workers.processes(workers, threads=1),
        shares=workers,
        callbacks=[clock],
        progress=False,
    )
    taken, overhead = clock.seconds(WARM)
    return statistics.median(taken), statistics.median(overhead)


# ---- the pieces of a round, one by one


class Pieces(NamedTuple):
    """Seconds of what driver and workers do with a model beside computing: as in `scaling.Costs`.

    take  seconds of the driver for the sum of a single share, which is not added to any other
    """

    model: int
    message: float
    take: float
    sum: float
    row: float
    state: float
    place: float
    place_row: float


def pieces(name: str, repeats: int = 9) -> Pieces:
    """Time each piece, with tensors of the model of a workload."""
    shared = {k: v.detach() for k, v in WORKLOADS[name].model().named_parameters()}
    timed = functools.partial(_median, repeats=repeats)
    box, result = Outbox(), _result(shared)
    place = timed(lambda: box.place(pack(result)))
    placed = box.place(pack(result))

    def add_up(order: Sequence[int]) -> Upload | None:
        total = RunningSum(torch.device("cpu"))
        for share in order:
            found: Summed = unpack(placed.packed(box.region))
            Joined(1, [np.arange(1)]).put(0, found.trained[:2])
            total.add(share, found.sum)
        return total.result()

    n = min(MOST_ROWS, ROW_BYTES // tree.nbytes(shared))
    rows, stack, outbox = list(range(n)), tree.stack([shared] * n), Outbox()
    return Pieces(
        model=tree.nbytes(shared),
        message=timed(functools.partial(_message, shared, *_channels())),
        take=timed(lambda: add_up([0])),
        sum=timed(lambda: add_up([i ^ 1 for i in range(SHARES)])) / SHARES,  # every other one is early
        row=timed(lambda: _rows_back(stack, n)) / n,
        state=timed(lambda: (outbox.place(pack(tree.rows(stack, rows))), _joined(stack, n))) / n,
        place=place,
        place_row=timed(lambda: outbox.place(pack(stack))) / n,
    )


def copied_bytes_per_second(repeats: int = 9) -> float:
    """Return the bytes per second at which a core copies memory that is there already."""
    source = torch.ones(1 << 28, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return source.nbytes / _median(lambda: target.copy_(source), repeats)


def _median(work: Callable[[], Any], repeats: int) -> float:
    work()
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def _result(shared: Tensors) -> Summed:
    """Return what a worker sends for a share of one client."""
    one = torch.ones(1)
    kept = Upload({}, one.double(), metrics={"loss": one, "steps": one}, client=torch.zeros(1).long())
    summed = Upload(shared, torch.ones((), dtype=torch.float64))
    return Summed(Trained(kept, ClientState({}, {}), [""]), tree.nbytes(shared), summed)


def _rows_back(deltas: Tensors, n: int) -> Any:
    """Take deltas as they come back, screen them and average them."""
    found, weight = _joined(deltas, n), torch.ones(n, dtype=torch.float64)
    tree.sound(tree.lengths(Upload(found), ()))
    return pt.aggregate.mean().combine(found, weight, weight)


def _joined(stack: Tensors, n: int) -> Any:
    joined = Joined(n, [np.arange(n)])
    joined.put(0, stack)
    return joined.tree


def _channels() -> tuple[Channel, Channel, Outbox]:
    ours, theirs = socket.socketpair()
    return Channel(ours), Channel(theirs), Outbox()


def _message(shared: Tensors, ours: Channel, theirs: Channel, outbox: Outbox) -> None:
    """Send a share without its model, and a reply of the same size."""
    context = RoundContext(0, 0, 0, 0, 1, Work(steps=1, batch=2))
    group = Group((0,), Download(shared, {}, 0))
    assignment = Assignment(np.zeros(1, dtype=np.int64), group, ClientState({}, {}), context)
    packed = pack(sent(assignment.of([0]), draws.key(0, "share", 0, device="cpu"))[1])
    message = outbox.place(packed)
    for sender, receiver in ((ours, theirs), (theirs, ours)):
        sender.send(("call", message), outbox.new_handle())
        unpack(receiver.receive()[0][1].packed(outbox.region))
