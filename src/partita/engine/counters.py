"""All that a run counts: uploads, bytes, steps, seconds, who was set aside, what the virtual clock has shown.

It is part of a checkpoint, so that a resumed run goes on counting.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partita.core.types import Cohort
from partita.engine.lockstep.meeting import clock
from partita.engine.samples import Scored

BINS = 4
"""Bins of delays for each doubling: bin b holds those from 2^(b/4) up to 2^((b+1)/4)."""


class ClientCounters:
    """For each client how often it reported, was late or lost, its delays, and passes over its samples;
    the round in which its upload was last used (0: never), and the training loss that it last had."""

    def __init__(self, clients: int) -> None:
        self.reports: NDArray[np.int64] = np.zeros(clients, dtype=np.int64)
        self.epochs: NDArray[np.float64] = np.zeros(clients)
        self.delay: NDArray[np.float64] = np.zeros(clients)
        # not zeros_like, which writes its zeros: memory that nobody writes to is never taken
        self.late: NDArray[np.int64] = np.zeros(clients, dtype=np.int64)
        self.lost: NDArray[np.int64] = np.zeros(clients, dtype=np.int64)
        self.seen: NDArray[np.int64] = np.zeros(clients, dtype=np.int64)
        self.loss: NDArray[np.float64] = np.zeros(clients)

    def count(self, cohort: Cohort) -> None:
        """One more server step."""
        reported = np.asarray(cohort.clients[: len(cohort.delays)], dtype=np.int64)
        self.reports[reported] += 1  # none of them is there twice
        self.delay[reported] += cohort.delays
        for count, some in ((self.late, cohort.late), (self.lost, cohort.lost)):
            if some:
                np.add.at(count, list(some), 1)

    def see(self, clients: NDArray[np.int64], loss: NDArray[np.float64], round: int) -> None:
        """Remember the losses of clients whose uploads were used in a round (NaN: no step, no loss)."""
        keeps = np.isnan(loss) & (self.seen[clients] > 0)
        self.loss[clients] = np.where(keeps, self.loss[clients], loss)
        self.seen[clients] = round

    def columns(self) -> dict[str, np.ndarray]:
        """What clients.csv has: counts, and the mean delay of those who reported."""
        mean = np.full(len(self.delay), np.nan)
        np.divide(self.delay, self.reports, out=mean, where=self.reports > 0)
        counts = {"reports": self.reports, "epochs": self.epochs, "late": self.late, "lost": self.lost}
        return {**counts, "delay": mean}

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds: the counts of the clients that had a turn."""
        active = np.flatnonzero((self.reports > 0) | (self.late > 0) | (self.lost > 0))
        counts = {name: values[active] for name, values in vars(self).items()}
        return {k: torch.from_numpy(v) for k, v in {"clients": active, **counts}.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the counts that a checkpoint holds."""
        active = state["clients"].numpy()
        for name, values in vars(self).items():
            values[:] = 0
            values[active] = state[name].numpy()


@dataclass
class Timing:
    """Counted over a run; `row` since the last row of metrics."""

    turns: ClientCounters
    time: float = 0.0
    activity: float = 0.0  # time at work, of all clients together
    staleness: Counter[int] = field(default_factory=Counter)  # uploads by their age
    delays: Counter[int] = field(default_factory=Counter)  # uploads by the bin of their delay; -9999: none
    total_delay: float = 0.0
    longest: float = 0.0
    abandoned: int = 0  # rounds without a server step, for want of usable uploads
    row: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("time", "activity", "age", "uploads"), 0)
    )

    def count(self, cohort: Cohort, abandoned: bool) -> None:
        """One more round; in one that was abandoned, the server has taken no step."""
        row = self.row
        self.abandoned += abandoned
        row["time"] += cohort.time - self.time
        row["activity"] += cohort.activity
        row["age"] += sum(cohort.staleness)
        row["uploads"] += len(cohort.clients)
        self.time, self.activity = cohort.time, self.activity + cohort.activity
        self.staleness.update(cohort.staleness)
        for delay, turns in Counter(cohort.delays).items():
            self.delays[_bin(delay)] += turns
        self.total_delay += sum(cohort.delays)
        self.longest = max(self.longest, *cohort.delays) if cohort.delays else self.longest
        self.turns.count(cohort)

    def next_row(self, clients: int) -> dict[str, Any]:
        """Share of clients at work and mean staleness since the last row; so far, what was late, lost or
        abandoned."""
        row, self.row = self.row, dict.fromkeys(self.row, 0)
        return {
            "active": row["activity"] / (row["time"] * clients) if row["time"] else None,
            "staleness": row["age"] / row["uploads"] if row["uploads"] else None,
            "late": int(self.turns.late.sum()),
            "lost": int(self.turns.lost.sum()),
            "abandoned": self.abandoned,
        }

    def summary(self, clients: int, rounds: int) -> dict[str, Any]:
        """The whole run; in an abandoned round the server took no step."""
        steps = rounds - self.abandoned
        uploads = sum(self.staleness.values())
        ages = sum(age * n for age, n in self.staleness.items())
        return {
            "time": self.time,
            "updates_per_time": steps / self.time if self.time else None,
            "active": self.activity / (self.time * clients) if self.time else None,
            "staleness": {
                "mean": ages / uploads if uploads else None,
                "max": max(self.staleness, default=None),
                "counts": [[age, n] for age, n in sorted(self.staleness.items())],
            },
            "delay": {
                "mean": self.total_delay / uploads if uploads else None,
                "max": self.longest if uploads else None,
                "counts": [[*_edges(b), n] for b, n in sorted(self.delays.items())],
            },
            "late": int(self.turns.late.sum()),
            "lost": int(self.turns.lost.sum()),
            "abandoned": self.abandoned,
        }

    # ---- checkpoints

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds; counters as pairs, since the keys of JSON are words."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        pairs = {k: list(values[k].items()) for k in ("staleness", "delays")}
        return {**values, **pairs, "turns": self.turns.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what a checkpoint holds."""
        for f in fields(self):
            if f.name != "turns":
                value = state[f.name]
                setattr(self, f.name, Counter(dict(value)) if f.name in ("staleness", "delays") else value)
        self.turns.load_state(state["turns"])


def _bin(delay: float) -> int:
    return math.floor(BINS * math.log2(delay)) if delay > 0 else NONE


NONE = -9999


def _edges(number: int) -> tuple[float, float]:
    return (0.0, 0.0) if number == NONE else (2 ** (number / BINS), 2 ** ((number + 1) / BINS))


class Times(NamedTuple):
    """How often the uploads of a client were set aside, in which round first and last, and why at last."""

    number: int
    first: int
    last: int
    why: str


class Tally(dict[int, Times]):
    """By client, how often its uploads were set aside: as large as there are such clients."""

    def count(self, client: int, round: int, why: str) -> None:
        """Count one more upload of this client."""
        number, first = self[client][:2] if client in self else (0, round)
        self[client] = Times(number + 1, first, round, why)


PHASES = ("cohort", "states", "steps", "screening", "aggregation", "server", "evaluation", "metrics", "files")
"""cohort: who reports; states: what clients keep; files: rows, checkpoints."""


class Timer:
    """Seconds of each phase of a round, without those of phases inside it.

    In lockstep a run has its share of what several compute as one, and nothing of what the others do.

    A GPU works while the host goes on; a round waits for it at the end of its steps, and as a rule nowhere
    else. With `wait` the host waits at both ends of every phase: each has the time that its work took.
    """

    def __init__(self, device: str, wait: bool = False) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.clock = clock()
        self._wait = wait and device != "cpu"
        self._open: list[tuple[str, float, list[float]]] = []  # name, begin, seconds of those inside

    def __call__(self, name: str) -> Timer:
        """`with timer(name):` counts what happens inside as this phase."""
        self._open.append((name, self._now(), []))
        return self

    def __enter__(self) -> None:
        """Begin the phase."""

    def __exit__(self, *error: object) -> None:
        name, begin, inside = self._open.pop()
        took = self._now() - begin
        self.seconds[name] += took - sum(inside)
        if self._open:
            self._open[-1][2].append(took)

    def _now(self) -> float:
        if self._wait:
            torch.cuda.synchronize()
        return self.clock()


class Ending(NamedTuple):
    """How a stage has ended: its number, its first and last round, how many it might have had, whether it
    had converged."""

    stage: int
    first: int
    last: int
    planned: int
    converged: bool


class Counters:
    """What is counted over a run.

    rows                 the rows of metrics so far
    uploads              uploads of honest clients that arrived
    loss_sum, loss_weight  the training loss since the last row, and the samples that it is of
    solved, unsolved     local steps whose inner problem reached the accuracy ν, and that missed it
    excluded             clients whose uploads were set aside
    clock                what the virtual clock has shown
    endings              how each stage that is over has ended
    global_scored        by split, how the last global model does for each client, for stages that have none
    """

    def __init__(self, clients: int) -> None:
        self.rows: list[dict[str, Any]] = []
        self.uploads = 0
        self.bytes_up = 0
        self.bytes_down = 0
        self.client_steps = 0
        self.training_seconds = 0.0
        self.loss_sum = 0.0
        self.loss_weight = 0.0
        self.solved = 0
        self.unsolved = 0
        self.excluded = Tally()
        self.clock = Timing(ClientCounters(clients))
        self.global_scored: dict[str, Scored] = {}
        self.endings: list[Ending] = []
        self._elapsed_before, self._begin = 0.0, time.perf_counter()

    @property
    def elapsed(self) -> float:
        """Seconds of computing, over all resumptions."""
        return self._elapsed_before + time.perf_counter() - self._begin

    @property
    def share_unsolved(self) -> float | None:
        """The share of local steps so far whose inner problem missed ν (None: no method asked for one)."""
        solves = self.solved + self.unsolved
        return self.unsolved / solves if solves else None

    def start(self) -> None:
        """Begin to count seconds, behind those of the run before it was interrupted."""
        self._begin = time.perf_counter()

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {
            "rows": self.rows,
            "elapsed": self.elapsed,
            **{name: getattr(self, name) for name in _NUMBERS},
            "excluded": [[client, *times] for client, times in self.excluded.items()],
            "clock": self.clock.state(),
            "endings": [list(ending) for ending in self.endings],
            "global_scored": {split: found.state() for split, found in self.global_scored.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what a checkpoint holds; a TypeError if it is damaged."""
        if not all(isinstance(row, dict) for row in state["rows"]):
            raise TypeError("rows are no objects")
        for name in ("elapsed", *_NUMBERS):
            if not isinstance(state[name], int | float):
                raise TypeError(f"{name} is no number")
        for name in _NUMBERS:
            setattr(self, name, state[name])
        self._elapsed_before, self.rows = state["elapsed"], state["rows"]
        self.start()
        self.excluded = Tally({client: Times(*times) for client, *times in state["excluded"]})
        self.clock.load_state(state["clock"])
        self.endings = [Ending(*ending) for ending in state["endings"]]
        self.global_scored = {k: Scored.of_state(v) for k, v in state["global_scored"].items()}


_NUMBERS = (
    "uploads",
    "bytes_up",
    "bytes_down",
    "client_steps",
    "training_seconds",
    "loss_sum",
    "loss_weight",
    "solved",
    "unsolved",
)
