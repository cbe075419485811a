"""What several runs under labels have in common, and their clients averaged over the seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from partita.core import check
from partita.engine.record import NUMERIC_COLUMNS, Record, lookup, number
from partita.engine.table import Table

Row = dict[str, Any]
Runs = Mapping[str, Sequence[Record]]
"""For each label, its runs: one per seed."""
Averages = Mapping[str, Record]
"""For each label, the record of its clients, averaged over the seeds."""
NAMES = {"local": "each alone", "global": "one global model", "personal": "personal models"}
"""What the page calls the three models."""


def checked(runs: Runs) -> Runs:
    """Return the runs without their Byzantine clients, whose scores count for nothing.

    Refuse no runs at all, a label without a run, and scores of different metrics.
    """
    if not runs:
        raise check.fail("runs", dict(runs), "at least one label with a run")
    for label, seeds in runs.items():
        if not seeds:
            raise check.fail(f"runs[{label!r}]", list(seeds), "at least one run")
    metrics = {run.facts.get("metric") for seeds in runs.values() for run in seeds}
    if len(metrics) > 1:
        names = sorted(str(m) for m in metrics)
        raise check.fail("metric of runs", names, "runs of one metric", "their scores do not compare")
    return {label: [_honest(run) for run in seeds] for label, seeds in runs.items()}


def _honest(run: Record) -> Record:
    honest = run.honest
    if honest.all():
        return run
    clients = [row for row, is_honest in zip(run.clients, honest) if is_honest]
    samples = None if run.samples is None else run.samples.subset(honest)
    facts, newcomers = run.facts, run.newcomers
    return Record(run.metrics, clients, run.config, facts, samples=samples, newcomers=newcomers)


def first(runs: Runs) -> Record:
    """Return the first run of the first label: what all of them have in common is read there."""
    return next(iter(runs.values()))[0]


def metric(runs: Runs) -> str:
    """Return the name of the metric."""
    return str(first(runs).facts.get("metric") or "score")


def several_seeds(runs: Runs) -> bool:
    """Whether any label has more than one run."""
    return any(len(seeds) > 1 for seeds in runs.values())


def federated(runs: Runs) -> Runs:
    """Return the runs that share something; all, if none does.

    Clients that train alone need neither rounds nor a clock.
    """
    sharing = {
        label: [run for run in seeds if number(lookup(run.facts, "parameters", "shared")) != 0]
        for label, seeds in runs.items()
    }
    return {label: seeds for label, seeds in sharing.items() if seeds} or runs


# ---- clients


def same_clients(runs: Sequence[Record]) -> bool:
    """Whether a name is the same client in all these runs: on the same data, or where names say who they are.

    A recipe may draw other clients for every seed; then client 3 of one seed has nothing to do with client 3
    of another. Runs that do not tell their data count as runs on the same.
    """
    fingerprints = {lookup(run.config, "data", "fingerprint") for run in runs} - {None}
    return len(fingerprints) < 2 or any(not name.isdecimal() for run in runs for name in run.names)


def suffixes(seeds: Sequence[Record]) -> list[str]:
    """Return what to add to each run's names of clients: " (seed 1)" where seeds have different clients."""
    if same_clients(seeds):
        return [""] * len(seeds)
    numbers = [run.facts.get("seed") for run in seeds]
    if None in numbers or len(set(numbers)) < len(numbers):
        return [f" (run {i + 1})" for i in range(len(seeds))]
    return [f" (seed {seed})" for seed in numbers]


def over_seeds(runs: Runs) -> str:
    """Say what a client is where there are several seeds; nothing where there is one."""
    if not all(map(same_clients, runs.values())):
        return " The seeds have different clients, so each client of each seed counts by itself."
    return " Scores are each client's means over the seeds." if several_seeds(runs) else ""


def averages(runs: Runs) -> Averages:
    """Average the clients of each label over its seeds, where these have the same clients."""
    return {label: average(seeds) for label, seeds in runs.items()}


def average(seeds: Sequence[Record]) -> Record:
    """Return a record with one row per client, its numbers averaged over the runs that have it."""
    if len(seeds) == 1:
        return seeds[0]
    rows: dict[str, int] = {}
    place = np.array(
        [
            rows.setdefault(f"{name}{suffix}", len(rows))
            for run, suffix in zip(seeds, suffixes(seeds))
            for name in run.names
        ],
        dtype=np.int64,
    )
    columns: dict[str, Any] = {"client": list(rows)}
    for column in NUMERIC_COLUMNS:
        values = np.concatenate([run.table.numbers(column) for run in seeds])
        known = np.isfinite(values)
        counts = np.bincount(place[known], minlength=len(rows))
        sums = np.bincount(place[known], values[known], minlength=len(rows))
        columns[column] = np.divide(sums, counts, out=np.full(len(rows), np.nan), where=counts > 0)
    return Record([], Table(len(rows), columns), {}, seeds[0].facts)


def references(clients: Record) -> list[str]:
    """Return what the personal models can be compared with, the more telling first.

    A method without a personal part gives everyone the global model: then the gain over it is zero for all
    and says nothing, so training alone comes first.
    """
    kinds = [kind for kind in ("global", "local") if not np.isnan(clients.gains(kind)).all()]
    return sorted(kinds, key=lambda kind: not differs(clients, kind))


def differs(clients: Record, reference: str) -> bool:
    """Whether any client scores differently with its personal model."""
    return bool(np.nan_to_num(clients.gains(reference)).any())
