"""What the virtual clock has shown: who was at work, how stale uploads were, how long turns took."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from partita.types import Cohort

BINS = 4
"""Bins of delays for each doubling: bin b holds those from 2^(b/4) up to 2^((b+1)/4)."""


@dataclass
class Timing:
    """Counted over a run; `row` since the last row of metrics."""

    time: float = 0.0
    activity: float = 0.0  # time at work, of all clients together
    staleness: Counter[int] = field(default_factory=Counter)  # uploads by their age
    delays: Counter[int] = field(default_factory=Counter)  # uploads by the bin of their delay; -9999: none
    total_delay: float = 0.0
    longest: float = 0.0
    turns: dict[int, list[float]] = field(default_factory=dict)  # client -> reports, delay, late, lost
    row: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("time", "activity", "age", "uploads"), 0)
    )

    def count(self, cohort: Cohort) -> None:
        """One more server step."""
        row = self.row
        row["time"] += cohort.time - self.time
        row["activity"] += cohort.activity
        row["age"] += sum(cohort.staleness)
        row["uploads"] += len(cohort.clients)
        self.time, self.activity = cohort.time, self.activity + cohort.activity
        self.staleness.update(cohort.staleness)
        self.delays.update(map(_bin, cohort.delays))
        self.total_delay += sum(cohort.delays)
        self.longest = max(self.longest, *cohort.delays) if cohort.delays else self.longest
        for client, delay in zip(cohort.clients, cohort.delays):
            mine = self.turns.setdefault(client, [0, 0.0, 0, 0])
            mine[0] += 1
            mine[1] += delay
        for place, some in ((2, cohort.late), (3, cohort.lost)):
            for client in some:
                self.turns.setdefault(client, [0, 0.0, 0, 0])[place] += 1

    def next_row(self, clients: int) -> dict[str, Any]:
        """Share of clients at work and mean staleness since the last row; who was late or lost so far."""
        row, self.row = self.row, dict.fromkeys(self.row, 0)
        return {
            "active": row["activity"] / (row["time"] * clients) if row["time"] else None,
            "staleness": row["age"] / row["uploads"] if row["uploads"] else None,
            "late": self.total(2),
            "lost": self.total(3),
        }

    def total(self, place: int) -> int:
        """How often clients were late (2) or lost (3)."""
        return int(sum(mine[place] for mine in self.turns.values()))

    def summary(self, clients: int, steps: int) -> dict[str, Any]:
        """The whole run."""
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
            "late": self.total(2),
            "lost": self.total(3),
        }

    def client(self, number: int) -> dict[str, Any]:
        """How often one client reported, was late or lost, and its mean delay."""
        reports, delay, late, lost = self.turns.get(number, (0, 0.0, 0, 0))
        mean = delay / reports if reports else None
        return {"reports": int(reports), "delay": mean, "late": int(late), "lost": int(lost)}

    # ---- checkpoints

    def facts(self) -> dict[str, Any]:
        """All of it; pairs, since the keys of JSON are words."""
        return {
            **{k: getattr(self, k) for k in ("time", "activity", "total_delay", "longest", "row")},
            **{k: list(getattr(self, k).items()) for k in ("staleness", "delays", "turns")},
        }

    @staticmethod
    def of(facts: dict[str, Any]) -> Timing:
        """What `facts` wrote."""
        kinds: dict[str, Callable[[Iterable[Any]], Any]] = {
            "staleness": _counter,
            "delays": _counter,
            "turns": dict,
        }
        return Timing(**{k: kinds[k](v) if k in kinds else v for k, v in facts.items()})


def _counter(pairs: Iterable[Any]) -> Counter[int]:
    return Counter(dict(pairs))


def _bin(delay: float) -> int:
    return math.floor(BINS * math.log2(delay)) if delay > 0 else NONE


NONE = -9999


def _edges(number: int) -> tuple[float, float]:
    return (0.0, 0.0) if number == NONE else (2 ** (number / BINS), 2 ** ((number + 1) / BINS))
