"""The numbers of a comparison as plain rows: the report and the command line show the same ones."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from partita.core import check
from partita.engine.record import MODELS, ROUNDING, Record, gain, lookup, mean, number, spread
from partita.report.rows import Row, Runs, checked, first, metric, same_clients, suffixes


def table(runs: Runs) -> list[Row]:
    """Return one row per label: scores over its seeds, how many clients are hurt, what it cost.

    `local`, `global`, `personal` and `worst_tenth` (the personal score that nine clients in ten reach) are
    {"mean", "std"} over the seeds, or None. `std` is the sample standard deviation, 0 for a single seed. The
    counts (`diverged`: clients whose training diverged), seconds, bytes and `virtual_time` (None where it is
    just the number of rounds) are means over the seeds. One label is `best`: by its personal models.
    """
    runs = checked(runs)
    rows = [_row(label, seeds, metric(runs)) for label, seeds in runs.items()]
    ranked = [row for row in rows if row["personal"] is not None]
    if ranked:
        choose = max if first(runs).higher_is_better else min
        choose(ranked, key=lambda row: row["personal"]["mean"])["best"] = True
    return rows


def paired(runs: Runs, against: str | None = None) -> list[Row]:
    """Compare each other label with the label `against` (default: the best), client by client.

    The unit is a client, known by its name: the difference of its personal scores under the two labels, up is
    better, averaged over the seeds that both labels have (where they share none, over all combinations of
    runs with the same clients). Where the seeds have different clients, each client of each seed is a unit.
    `p` is the two-sided Wilcoxon signed-rank test's; None where it says nothing (no client differs).
    """
    runs = checked(runs)
    if against is None:
        against = next((row["label"] for row in table(runs) if row["best"]), next(iter(runs)))
    elif against not in runs:
        raise check.fail("against", against, f"one of {', '.join(runs)}{check.meant(against, runs)}")
    higher = first(runs).higher_is_better
    return [
        {"label": label, "against": against, **_contrast(_differences(seeds, runs[against], higher))}
        for label, seeds in runs.items()
        if label != against
    ]


def _row(label: str, seeds: Sequence[Record], metric: str) -> Row:
    facts = [run.facts for run in seeds]
    costs = ("scored", "seconds", "client_steps_per_second", "bytes_up", "bytes_down")
    return {
        "label": label,
        "seeds": len(seeds),
        "metric": metric,
        "higher_is_better": seeds[0].higher_is_better,
        **{model: spread(lookup(f, "test", model) for f in facts) for model in MODELS},
        "worst_tenth": spread(run.worst_tenth() for run in seeds),
        "hurt_vs_global": mean(run.hurt("global") for run in seeds),
        "hurt_vs_local": mean(run.hurt("local") for run in seeds),
        **{key: mean(f.get(key) for f in facts) for key in costs},
        "virtual_time": mean(f.virtual_time for f in facts),
        "diverged": mean(lookup(f, "diverged", "clients") or 0 for f in facts),
        "best": False,
    }


def _differences(ours: Sequence[Record], theirs: Sequence[Record], higher: bool) -> list[float]:
    """Return for each client our score minus theirs, up is better, averaged over pairs of runs."""
    pairs = [
        (a, b, suffix or other)
        for a, suffix in zip(ours, suffixes(ours))
        for b, other in zip(theirs, suffixes(theirs))
    ]
    # runs of one seed saw the same data and cohorts; compared with each other they differ by the method only
    same_seed = [pair for pair in pairs if pair[0].facts.get("seed") == pair[1].facts.get("seed")]
    scores: dict[str, list[tuple[float, float]]] = {}
    for a, b, suffix in same_seed or [pair for pair in pairs if same_clients(pair[:2])]:
        others = _personal_scores(b)
        for name, score in _personal_scores(a).items():
            if name in others:
                scores.setdefault(f"{name}{suffix}", []).append((score, others[name]))
    means = [[statistics.fmean(side) for side in zip(*both)] for both in scores.values()]
    return [float(gain(our_mean, their_mean, higher)) for our_mean, their_mean in means]


def _personal_scores(run: Record) -> dict[str, float]:
    scores = zip(run.names, map(number, run.scores("personal")))
    return {name: score for name, score in scores if score is not None}


def _contrast(differences: Sequence[float]) -> dict[str, Any]:
    return {
        "clients": len(differences),
        "better": sum(d > 0 for d in differences),
        "equal": sum(d == 0 for d in differences),
        "worse": sum(d < 0 for d in differences),
        "median": statistics.median(differences) if differences else None,
        "mean": mean(differences),
        "p": _wilcoxon(differences),
    }


def _wilcoxon(differences: Sequence[float]) -> float | None:
    if not any(differences):
        return None
    from scipy.stats import wilcoxon  # heavy; only a comparison needs it

    # differences that are equal up to rounding share a rank
    largest = max(map(abs, differences))
    return float(wilcoxon([round(d / largest / ROUNDING) for d in differences]).pvalue)
