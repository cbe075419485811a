"""The numbers of a comparison as plain rows: the report and the command line show the same ones."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from partita.core import check
from partita.report.rows import (
    KINDS,
    ROUNDING,
    Result,
    Row,
    Runs,
    changes,
    checked,
    higher_is_better,
    marks,
    mean,
    metric,
    number,
    numbers,
    same_clients,
    virtual_time,
)


def table(runs: Runs) -> list[Row]:
    """One row per label: scores over its seeds, who is hurt, what it cost.

    `local`, `global`, `personal` and `worst_tenth` (the personal score that nine clients in ten reach) are
    {"mean", "std"} over the seeds, or None. `std` is the sample standard deviation, 0 for a single seed. The
    counts (`diverged`: clients whose training diverged), seconds, bytes and `virtual_time` (None where it is
    just the number of rounds) are means over the seeds. One label is `best`: by its personal models.
    """
    runs = checked(runs)
    higher = higher_is_better(runs)
    rows = [_row(label, seeds, metric(runs), higher) for label, seeds in runs.items()]
    ranked = [row for row in rows if row["personal"] is not None]
    if ranked:
        choose = max if higher else min
        choose(ranked, key=lambda row: row["personal"]["mean"])["best"] = True
    return rows


def paired(runs: Runs, against: str | None = None) -> list[Row]:
    """Each other label compared with the label `against` (default: the best), client by client.

    The unit is a client, known by its name: the difference of its personal scores under the two labels, up is
    better, averaged over the seeds that both labels have (where they share none, over all combinations of
    runs with the same clients). Where the seeds have different clients, each client of each seed is a unit.
    `p` is the two-sided Wilcoxon signed-rank test's; None where it says nothing (no client differs).
    """
    runs = checked(runs)
    higher = higher_is_better(runs)
    if against is None:
        against = next((row["label"] for row in table(runs) if row["best"]), next(iter(runs)))
    elif against not in runs:
        raise check.fail("against", against, f"one of {', '.join(runs)}{check.meant(against, runs)}")
    return [
        {"label": label, "against": against, **_contrast(_differences(seeds, runs[against], higher))}
        for label, seeds in runs.items()
        if label != against
    ]


def _row(label: str, seeds: Sequence[Result], metric: str, higher: bool) -> Row:
    facts = [run.summary() for run in seeds]
    return {
        "label": label,
        "seeds": len(seeds),
        "metric": metric,
        "higher_is_better": higher,
        **{kind: _spread(_score(run, kind) for run in seeds) for kind in KINDS},
        "worst_tenth": _spread(_worst_tenth(run.clients, higher) for run in seeds),
        "hurt_vs_global": mean(_hurt(run.clients, "global", higher) for run in seeds),
        "hurt_vs_local": mean(_hurt(run.clients, "local", higher) for run in seeds),
        "scored": mean(_scored(run) for run in seeds),
        **{
            key: mean(f.get(key) for f in facts)
            for key in ("seconds", "client_steps_per_second", "bytes_up", "bytes_down")
        },
        "virtual_time": mean(map(virtual_time, seeds)),
        "diverged": mean((f.get("diverged") or {}).get("clients", 0) for f in facts),
        "best": False,
    }


def _spread(values: Iterable[float | None]) -> dict[str, float] | None:
    found = numbers(values)
    if not found:
        return None
    return {"mean": statistics.fmean(found), "std": statistics.stdev(found) if len(found) > 1 else 0.0}


def _score(run: Result, kind: str) -> float | None:
    """The mean over all test samples: the summary's, or made from the clients' rows."""
    test = run.summary().get("test") or {}
    return number(test[kind]) if kind in test else _weighted(run.clients, kind)


def _weighted(rows: Iterable[Row], kind: str) -> float | None:
    pairs = [(number(row.get(kind)), number(row.get("n_test"))) for row in rows]
    there = [(score, weight) for score, weight in pairs if score is not None and weight]
    total = sum(weight for _, weight in there)
    return sum(score * weight for score, weight in there) / total if total else None


def _worst_tenth(rows: Iterable[Row], higher: bool) -> float | None:
    scores = numbers(row.get("personal") for row in rows)
    return float(np.quantile(scores, 0.1 if higher else 0.9)) if scores else None


def _hurt(rows: Iterable[Row], reference: str, higher: bool) -> int | None:
    found = changes(rows, reference, higher)
    return sum(x < 0 for x in found) if found else None


def _scored(run: Result) -> float:
    given = number(run.summary().get("scored"))
    return len(numbers(row.get("personal") for row in run.clients)) if given is None else given


def _differences(ours: Sequence[Result], theirs: Sequence[Result], higher: bool) -> list[float]:
    """Per client: our score minus theirs, up is better, averaged over pairs of runs."""
    marked = list(zip(ours, marks(ours))), list(zip(theirs, marks(theirs)))
    pairs = [(a, b, i or j) for a, i in marked[0] for b, j in marked[1]]
    # runs of one seed saw the same data and cohorts; compared with each other they differ by the method only
    same = [pair for pair in pairs if pair[0].summary().get("seed") == pair[1].summary().get("seed")]
    found: dict[str, list[tuple[float, float]]] = {}
    for a, b, mark in same or [pair for pair in pairs if same_clients(pair[:2])]:
        scores = _personal(b)
        for name, score in _personal(a).items():
            if name in scores:
                found.setdefault(f"{name}{mark}", []).append((score, scores[name]))
    return [_difference(both, 1.0 if higher else -1.0) for both in found.values()]


def _personal(run: Result) -> dict[str, float]:
    scores = {str(row["client"]): number(row.get("personal")) for row in run.clients}
    return {name: score for name, score in scores.items() if score is not None}


def _difference(pairs: Sequence[tuple[float, float]], sign: float) -> float:
    found = statistics.fmean(sign * (a - b) for a, b in pairs)
    scale = max(abs(x) for pair in pairs for x in pair)
    return 0.0 if abs(found) <= ROUNDING * scale else found


def _contrast(differences: Sequence[float]) -> dict[str, Any]:
    return {
        "clients": len(differences),
        "better": sum(d > 0 for d in differences),
        "equal": sum(d == 0 for d in differences),
        "worse": sum(d < 0 for d in differences),
        "median": statistics.median(differences) if differences else None,
        "mean": statistics.fmean(differences) if differences else None,
        "p": _wilcoxon(differences),
    }


def _wilcoxon(differences: Sequence[float]) -> float | None:
    if not any(differences):
        return None
    from scipy.stats import wilcoxon  # heavy; only a comparison needs it

    return float(wilcoxon(differences).pvalue)
