"""What the virtual clock has shown: who was at work, how stale uploads were, how long turns took."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from partita.core.types import Cohort, Tensors

BINS = 4
"""Bins of delays for each doubling: bin b holds those from 2^(b/4) up to 2^((b+1)/4)."""


class ClientCounters:
    """For each client how often it reported, its delays together, and how often it was late or lost."""

    def __init__(self, clients: int) -> None:
        self.reports: NDArray[np.int64] = np.zeros(clients, dtype=np.int64)
        self.delay: NDArray[np.float64] = np.zeros(clients)
        # not zeros_like, which writes its zeros: memory that nobody writes to is never taken
        self.late: NDArray[np.int64] = np.zeros(clients, dtype=np.int64)
        self.lost: NDArray[np.int64] = np.zeros(clients, dtype=np.int64)

    def count(self, cohort: Cohort) -> None:
        """One more server step."""
        reported = list(cohort.clients[: len(cohort.delays)])
        np.add.at(self.reports, reported, 1)
        np.add.at(self.delay, reported, cohort.delays)
        for count, some in ((self.late, cohort.late), (self.lost, cohort.lost)):
            if some:
                np.add.at(count, list(some), 1)

    def columns(self) -> dict[str, np.ndarray]:
        """What clients.csv has: counts, and the mean delay of those who reported."""
        mean = np.full(len(self.delay), np.nan)
        np.divide(self.delay, self.reports, out=mean, where=self.reports > 0)
        return {"reports": self.reports, "delay": mean, "late": self.late, "lost": self.lost}

    def tensors(self) -> Tensors:
        """For a checkpoint: of the clients that had a turn."""
        some = np.flatnonzero((self.reports > 0) | (self.late > 0) | (self.lost > 0))
        found = {"clients": some, **{k: v[some] for k, v in vars(self).items()}}
        return {k: torch.from_numpy(v) for k, v in found.items()}

    def restore(self, tensors: Tensors) -> None:
        """Be where the checkpoint was."""
        some = tensors["clients"].numpy()
        for name, values in vars(self).items():
            values[:] = 0
            values[some] = tensors[name].numpy()


PLAIN = ("time", "activity", "total_delay", "longest", "abandoned", "row")


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

    def count(self, cohort: Cohort, usable: int) -> None:
        """One more round, with so many usable uploads."""
        row = self.row
        self.abandoned += not cohort.suffices(usable)
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

    def facts(self) -> dict[str, Any]:
        """All but the turns; pairs, since the keys of JSON are words."""
        return {
            **{k: getattr(self, k) for k in PLAIN},
            **{k: list(getattr(self, k).items()) for k in ("staleness", "delays")},
        }

    @staticmethod
    def of(facts: dict[str, Any], turns: ClientCounters) -> Timing:
        """What `facts` wrote."""
        kinds: dict[str, Callable[[Iterable[Any]], Any]] = {"staleness": _counter, "delays": _counter}
        return Timing(turns, **{k: kinds[k](v) if k in kinds else v for k, v in facts.items()})


def _counter(pairs: Iterable[Any]) -> Counter[int]:
    return Counter(dict(pairs))


def _bin(delay: float) -> int:
    return math.floor(BINS * math.log2(delay)) if delay > 0 else NONE


NONE = -9999


def _edges(number: int) -> tuple[float, float]:
    return (0.0, 0.0) if number == NONE else (2 ** (number / BINS), 2 ** ((number + 1) / BINS))
