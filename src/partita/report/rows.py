"""What a report reads of a run: rows of numbers, any of which may be missing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

from partita.core import check

Row = dict[str, Any]
# a difference below this part of a score is rounding, not a difference
ROUNDING = 1e-9
KINDS = ("local", "global", "personal")
# what the tables and figures call the three models
NAMES = {"local": "each alone", "global": "one global model", "personal": "personal models"}


class Result(Protocol):
    """A finished run, as far as a report is concerned: a `Run`, or anything with the same rows."""

    @property
    def metrics(self) -> list[Row]:
        """The rows of metrics.jsonl."""

    @property
    def clients(self) -> Sequence[Row]:
        """The rows of clients.csv."""

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json; may be empty."""

    def summary(self) -> Mapping[str, Any]:
        """summary.json."""


Runs = Mapping[str, Sequence[Result]]
Means = Mapping[str, Sequence[Row]]  # one row per client for each label


@dataclass(frozen=True)
class Honest:
    """A run without its liars, whose scores are nobody's concern; the summary counts the honest only too."""

    run: Result
    clients: Sequence[Row]

    @property
    def metrics(self) -> list[Row]:
        """The rows of metrics.jsonl."""
        return self.run.metrics

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json; may be empty."""
        return self.run.config

    def summary(self) -> Mapping[str, Any]:
        """summary.json."""
        return self.run.summary()


def honest(run: Result) -> Result:
    """The run, of its honest clients."""
    rows = [row for row in run.clients if not number(row.get("byzantine"))]
    return run if len(rows) == len(run.clients) else Honest(run, rows)


def checked(runs: Runs) -> Runs:
    """The runs, of their honest clients, or a ValueError: no runs at all, a label without a run, scores of
    different kinds."""
    if not runs:
        raise check.fail("runs", dict(runs), "at least one label with a run")
    for label, seeds in runs.items():
        if not seeds:
            raise check.fail(f"runs[{label!r}]", list(seeds), "at least one run")
    metrics = {r.summary().get("metric") for seeds in runs.values() for r in seeds}
    if len(metrics) > 1:
        names = sorted(str(m) for m in metrics)
        raise check.fail("metric of runs", names, "runs of one metric", "their scores do not compare")
    return {label: [honest(run) for run in seeds] for label, seeds in runs.items()}


def number(value: object) -> float | None:
    """A finite number as a float; None for everything else: missing, NaN, infinite."""
    # floats and nothing are most of a large table; to ask whether they are Real takes ten times as long
    if value is None or type(value) is float:
        return value if value is not None and math.isfinite(value) else None
    return float(value) if isinstance(value, int | Real) and math.isfinite(value) else None


def numbers(values: Iterable[object]) -> list[float]:
    """Those of the values that are finite numbers."""
    return [x for x in map(number, values) if x is not None]


def mean(values: Iterable[object]) -> float | None:
    """The mean of what is there; None when nothing is."""
    found = numbers(values)
    return math.fsum(found) / len(found) if found else None


def first(runs: Runs) -> Result:
    """The first run of the first label: what all of them have in common is read there."""
    return next(iter(runs.values()))[0]


def higher_is_better(runs: Runs) -> bool:
    """Whether a larger score is a better one."""
    return bool(first(runs).summary().get("higher_is_better", True))


def metric(runs: Runs) -> str:
    """What the scores are."""
    return str(first(runs).summary().get("metric") or "score")


def clock(run: Result, *keys: str) -> Any:
    """What the virtual clock showed, such as clock(run, "staleness", "mean"); None if not recorded."""
    found: Any = run.summary()
    for key in ("clock", *keys):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def federated(runs: Runs) -> Runs:
    """The runs that share something; all, if none does. Alone, clients need neither rounds nor a clock."""
    there = {label: [run for run in seeds if not _alone(run)] for label, seeds in runs.items()}
    return {label: seeds for label, seeds in there.items() if seeds} or runs


def _alone(run: Result) -> bool:
    return number((run.summary().get("parameters") or {}).get("shared")) == 0


def virtual_time(run: Result) -> float | None:
    """How long the run took on the virtual clock; None where that is just its number of rounds."""
    time, rounds = number(clock(run, "time")), number(run.summary().get("rounds"))
    if time is None or rounds is None:
        return time
    counts = (("staleness", "max"), ("late",), ("lost",), ("abandoned",))
    told = any(number(clock(run, *keys)) for keys in counts)
    return time if told or not math.isclose(time, rounds) else None


def same_clients(runs: Sequence[Result]) -> bool:
    """Whether a name is the same client in all these runs: on the same data, or where names say who they are.

    A recipe may draw other clients for every seed; client 3 of one seed then is nobody in particular in
    another. Runs that do not tell their data count as runs on the same.
    """
    known = {(run.config.get("data") or {}).get("fingerprint") for run in runs} - {None}
    if len(known) < 2:
        return True
    return any(not str(row["client"]).isdecimal() for run in runs for row in run.clients)


def marks(seeds: Sequence[Result]) -> list[str]:
    """What to add to each run's names of clients: nothing, or " (seed 1)" where seeds have other clients."""
    if same_clients(seeds):
        return [""] * len(seeds)
    found = [run.summary().get("seed") for run in seeds]
    if None in found or len(set(found)) < len(found):
        return [f" (run {i + 1})" for i in range(len(seeds))]
    return [f" (seed {seed})" for seed in found]


def over_seeds(runs: Runs) -> str:
    """A sentence: what a client is where there are several seeds; empty where there is one."""
    if not all(map(same_clients, runs.values())):
        return " The seeds have different clients, so each client of each seed counts by itself."
    several = any(len(seeds) > 1 for seeds in runs.values())
    return " Scores are each client's means over the seeds." if several else ""


def means(runs: Runs) -> Means:
    """One row per client for each label, averaged over its seeds where they have the same clients."""
    return {label: averaged(seeds) for label, seeds in runs.items()}


def averaged(seeds: Sequence[Result]) -> Sequence[Row]:
    """One row per client, its numbers averaged over the runs that have it."""
    if len(seeds) == 1:
        return seeds[0].clients
    found: dict[str, list[Row]] = {}
    for run, mark in zip(seeds, marks(seeds)):
        for row in run.clients:
            found.setdefault(f"{row['client']}{mark}", []).append(row)
    return [
        {"client": name, **{k: mean(row.get(k) for row in rows) for k in rows[0] if k != "client"}}
        for name, rows in found.items()
    ]


def change(row: Row, reference: str, higher: bool, suffix: str = "") -> float | None:
    """How much better (above zero) the personal model is than the reference model, for one client.

    `suffix="_train"` compares the scores on the training samples.
    """
    own, other = number(row.get(f"personal{suffix}")), number(row.get(f"{reference}{suffix}"))
    if own is None or other is None:
        return None
    return difference(own, other, higher)


def difference(ours: float, theirs: float, higher: bool) -> float:
    """How much better (above zero) our score is; exactly zero where only rounding differs."""
    if abs(ours - theirs) <= ROUNDING * max(abs(ours), abs(theirs)):
        return 0.0
    return ours - theirs if higher else theirs - ours


def changes(rows: Iterable[Row], reference: str, higher: bool, suffix: str = "") -> list[float]:
    """The changes of all clients that have both scores."""
    return numbers(change(row, reference, higher, suffix) for row in rows)


def references(rows: Sequence[Row], higher: bool) -> list[str]:
    """What the personal models can be compared with, the more telling first.

    A method without a personal part gives everyone the global model: the change against it is zero for all
    and says nothing, so there training alone comes first.
    """
    there = [k for k in ("global", "local") if any(change(row, k, higher) is not None for row in rows)]
    return sorted(there, key=lambda kind: not differs(rows, kind, higher))


def differs(rows: Sequence[Row], reference: str, higher: bool) -> bool:
    """Whether any client scores differently with its personal model."""
    return any(change(row, reference, higher) for row in rows)
