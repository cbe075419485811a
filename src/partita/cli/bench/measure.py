"""Measure rounds of Partita and the textbook loop in turn: ratios depend less on the machine's load."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from partita.api import Run, federate
from partita.cli.bench.ceilings import flops_of_a_step, peak_flops
from partita.cli.bench.one_model import one_model
from partita.cli.bench.textbook import textbook, wait
from partita.cli.bench.workloads import METHODS, WORKLOADS, Method, Workload
from partita.core.device import arithmetic
from partita.data import FederatedData
from partita.engine.callbacks import Callback, Event


@dataclass(frozen=True)
class Row:
    """One line of the table.

    textbook, partita  client steps per second
    one_model          those of one model that is trained on the same samples; None: not measured
    phases             shares of the time of a round of Partita
    flops, share       operations per second in training, also as a share of a large matrix product's
    """

    name: str
    textbook: float
    partita: float
    executor: str
    phases: dict[str, float]
    flops: float | None = None
    share: float | None = None
    one_model: float | None = field(default=None, kw_only=True)

    @property
    def ratio(self) -> float:
        """How many times as fast Partita is."""
        return self.partita / self.textbook

    @property
    def overhead(self) -> float:
        """The share of a round that is not local training."""
        return 1.0 - self.phases.get("steps", 0.0)

    def facts(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return {**asdict(self), "ratio": self.ratio}


class RoundTimes(Callback):
    """Note when each round ended, and what its time was spent on."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.times: list[float] = []
        self.phases: list[Mapping[str, float]] = []

    def round(self, event: Event) -> None:
        """Note the time at the end of a round."""
        wait(self._device)
        self.times.append(time.perf_counter())
        self.phases.append(event.phases)

    def shares(self) -> dict[str, float]:
        """Return each phase's share of the time after the first round, without evaluations and files."""
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
    notify: Callable[[str], None],
    take_turn: Callable[[str], None] = lambda name: None,  # noqa: ARG005
) -> Iterator[Row]:
    """Yield a row for each workload: fedavg against the textbook loop.

    `take_turn` is called with the workload's name in every repeat, so that others are measured in the same
    minutes.
    """
    notify("measuring what the machine can do")
    peak = peak_flops(device, precision)
    for name in names:
        work = WORKLOADS[name].on(device)
        data = work.data()
        on_device = data.to(device)
        with arithmetic(precision):
            textbook(work, on_device, device, 1)  # warms up
        theirs: list[float] = []
        ours: list[float] = []
        one: list[float] = []
        for i in range(repeats):
            notify(f"{name}: {i + 1} of {repeats}")
            with arithmetic(precision):
                theirs += textbook(work, on_device, device, work.rounds)
                one += one_model(work, on_device, device, work.rounds)
            take_turn(name)
            seconds, run, phases = rounds(work, data, METHODS["fedavg"], device, executor, precision)
            ours += seconds
        row = _row(name, work, statistics.median(theirs), statistics.median(ours), run, phases)
        flops = flops_of_a_step(work) * row.partita
        whole = work.cohort * work.steps / statistics.median(one)
        yield Row(**{**vars(row), "flops": flops, "share": flops / peak, "one_model": whole})


def by_method(
    names: list[str], workload: str, device: str, executor: str, precision: str, notify: Callable[[str], None]
) -> Iterator[Row]:
    """Yield a row for each method: its clients under `executor`, against one after another.

    All clients report in every round, so that each class of devices has as many of them each time.
    """
    work = WORKLOADS[workload].on(device)
    cohort = max(work.cohort, 8)
    work = work._replace(cohort=cohort, clients=cohort)
    data = work.data()
    for name in names:
        method = METHODS[name]
        longer = work if method.updates == 1 else work._replace(rounds=2 * method.updates * work.rounds)
        seconds = {}
        for kind in ("loop", executor):
            notify(f"{name}: {kind}")
            times, run, phases = rounds(longer, data, method, device, kind, precision)
            seconds[kind] = _until_all_reported(times, method.updates)
        yield _row(name, work, seconds["loop"], seconds[executor], run, phases)


def rounds(
    work: Workload, data: FederatedData, method: Method, device: str, executor: str, precision: str
) -> tuple[list[float], Run, dict[str, float]]:
    """Return the seconds of each round, the run, and the phases' shares.

    The first round is left out: it warms up, records and compiles.
    """
    times = RoundTimes(device)
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
        callbacks=[times],
        **method.settings(work.cohort),
    )
    return list(np.diff(times.times)), run, times.shares()


def _until_all_reported(seconds: list[float], updates: int) -> float:
    """Return the seconds in which every client reports once; of an asynchronous run, in its second half."""
    if updates == 1:
        return statistics.median(seconds)
    return statistics.mean(seconds[len(seconds) // 2 :]) * updates


def _row(name: str, work: Workload, slow: float, fast: float, run: Run, phases: dict[str, float]) -> Row:
    steps = work.cohort * work.steps
    return Row(name, steps / slow, steps / fast, _executor(run), phases)


def _executor(run: Run) -> str:
    """Return the executors that trained in the end."""
    choices = run.config["executor"]["picks"]
    trained = [c["picked"] for role, c in choices.items() if "training" in role or role == "fallback"]
    return ", ".join(dict.fromkeys(trained)) or str(run.config["executor"]["requested"])
