"""Partita, the textbook loop and peers in turn: seconds depend on the machine and its load, ratios less."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from partita.api import Run, federate
from partita.cli.bench.ceilings import Ceilings, ceilings, flops_of_a_step
from partita.cli.bench.peers.apart import Speed, Turns
from partita.cli.bench.peers.job import Job
from partita.cli.bench.textbook import textbook, wait
from partita.cli.bench.workloads import METHODS, WORKLOADS, Method, Workload
from partita.core.device import arithmetic
from partita.data import FederatedData
from partita.engine.callbacks import Callback, Event

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """One line of the table; steps are client steps per second."""

    name: str
    textbook: float
    partita: float
    executor: str
    phases: dict[str, float]  # shares of the time of a round
    flops: float | None = None
    share: float | None = None  # of what a product of large matrices reaches
    peers: dict[str, Speed] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """How many times faster."""
        return self.partita / self.textbook

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ratio": self.ratio}


class Marks(Callback):
    """When each round was over, and what its time was spent on."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.times: list[float] = []
        self.phases: list[Mapping[str, float]] = []

    def round(self, event: Event) -> None:
        """Note the time."""
        wait(self._device)
        self.times.append(time.perf_counter())
        self.phases.append(event.phases)

    def shares(self) -> dict[str, float]:
        """Of the time after the first round."""
        first, last = self.phases[0], self.phases[-1]
        spent = {k: last[k] - first[k] for k in last}
        total = self.times[-1] - self.times[0] - spent.pop("evaluation") - spent.pop("files")
        spent["other"] = total - sum(spent.values())  # the loop itself; a device that ends the server's step
        return {k: v / total for k, v in spent.items() if total}


def by_workload(
    names: list[str],
    device: str,
    executor: str,
    precision: str,
    repeats: int,
    tell: Tell,
    peers: Sequence[str] = (),
) -> Iterator[Row]:
    """A row for each workload: fedavg against the textbook loop and the peers."""
    tell("measuring what the machine can do")
    most = ceilings(device, precision)
    for name in names:
        work = WORKLOADS[name].on(device)
        data = work.data()
        there = data.to(device)
        tell(f"{name}: the textbook loop")
        with arithmetic(precision):
            textbook(work, there, device, 1)
        theirs: list[float] = []
        ours: list[float] = []
        others = [Turns(peer, Job(name, device, precision, work.rounds)) for peer in peers]
        for i in range(repeats):
            with arithmetic(precision):
                theirs += textbook(work, there, device, work.rounds)
            for other in others:
                tell(f"{name}: {other.name}, {i + 1} of {repeats}")
                other.measure()
            tell(f"{name}: partita, {i + 1} of {repeats}")
            seconds, run, shares = rounds(work, data, METHODS["fedavg"], device, executor, precision)
            ours += seconds
        row = _row(name, work, statistics.median(theirs), statistics.median(ours), run, shares, most)
        yield replace(row, peers={other.name: other.speed() for other in others})


def by_method(
    names: list[str], workload: str, device: str, executor: str, precision: str, tell: Tell
) -> Iterator[Row]:
    """A row for each method: its clients side by side, against one after another.

    Everyone reports in every round, so that those of each class of devices are as many each time.
    """
    work = WORKLOADS[workload].on(device)
    cohort = max(work.cohort, 8)
    work = work._replace(cohort=cohort, clients=cohort)
    data = work.data()
    for name in names:
        method = METHODS[name]
        longer = work if method.turns == 1 else work._replace(rounds=2 * method.turns * work.rounds)
        found = {}
        for kind in ("loop", executor):
            tell(f"{name}: {kind}")
            seconds, run, shares = rounds(longer, data, method, device, kind, precision)
            found[kind] = _of_all(seconds, method.turns)
        yield _row(name, work, found["loop"], found[executor], run, shares, None)


def _of_all(seconds: list[float], turns: int) -> float:
    """Seconds in which all have reported once; of asynchronous runs the second half alone."""
    if turns == 1:
        return statistics.median(seconds)
    return statistics.mean(seconds[len(seconds) // 2 :]) * turns


def rounds(
    work: Workload,
    data: FederatedData,
    method: Method,
    device: str,
    executor: str,
    precision: str,
) -> tuple[list[float], Run, dict[str, float]]:
    """Seconds of each round but the first, which warms up, records and compiles; what they went into."""
    marks = Marks(device)
    run = federate(
        work.model(),
        data,
        method.algorithm(),
        rounds=work.rounds + 1,
        cohort=work.cohort,
        steps=work.steps,
        batch=work.batch,
        executor=executor,
        device=device,
        precision=precision,
        baselines=False,
        progress=False,
        evaluate_every=work.rounds + 1,
        callbacks=[marks],
        **method.options(work.cohort),
    )
    return list(np.diff(marks.times)), run, marks.shares()


def _row(
    name: str,
    work: Workload,
    slow: float,
    fast: float,
    run: Run,
    shares: dict[str, float],
    most: Ceilings | None,
) -> Row:
    steps = work.cohort * work.steps
    flops = None if most is None else flops_of_a_step(work) * steps / fast
    share = None if most is None or flops is None else flops / most.flops
    return Row(name, steps / slow, steps / fast, _executor(run), shares, flops, share)


def _executor(run: Run) -> str:
    """What was used in the end."""
    picks = run.config["executor"]["picks"]
    found = [pick["picked"] for role, pick in picks.items() if "training" in role or role == "fallback"]
    return ", ".join(dict.fromkeys(found)) or str(run.config["executor"]["requested"])
