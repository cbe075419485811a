"""The numbers of a comparison as plain rows: the report and the command line show the same ones."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from partita.core import check
from partita.core.metrics import SHARES
from partita.engine.record import MODELS, ROUNDING, Record, gain, lookup, mean, number, numbers, spread
from partita.engine.verdict import Difference, difference_of, ending
from partita.report import ranking
from partita.report.rows import Row, Runs, checked, first, metric, same_clients, suffixes

REFERENCES = ("global", "local")
CHANCE = ("worse", "beyond_chance", "better_beyond_chance", "estimate", "low", "high", "of")


def table(runs: Runs) -> list[Row]:
    """Return one row per label: scores over its seeds, how many clients are worse off, what it cost.

    `hurt_vs_global` and `hurt_vs_local` count the clients that are worse in the sample; `chance_vs_global`
    and `chance_vs_local` say how many are so beyond chance, and estimate how many truly lose (None where the
    run has not kept its samples). `interval` are the ends of the personal mean's, over clients and seeds.
    `epochs` are those of local training of a mean client, `training` says how it ended; `baselines` has both
    for what the label is compared with.

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
        **{f"chance_vs_{kind}": chance(seeds, kind) for kind in REFERENCES},
        "interval": _interval(seeds),
        **_training([f.get("training") for f in facts]),
        "baselines": {
            kind: _training([lookup(f, "baselines", kind) for f in facts])
            for kind in REFERENCES
            if any(lookup(f, "baselines", kind) for f in facts)
        },
        **{key: mean(f.get(key) for f in facts) for key in costs},
        "virtual_time": mean(f.virtual_time for f in facts),
        "diverged": mean(lookup(f, "diverged", "clients") or 0 for f in facts),
        "best": False,
    }


def _interval(seeds: Sequence[Record]) -> list[float] | None:
    """Return the ends of the interval of the mean personal score; None where clients are too few."""
    scores = ranking.gathered({"": seeds})
    found = ranking.interval(scores.methods[""], scores.weights)
    if np.isnan(found.low):
        return None
    is_share = seeds[0].facts.get("metric") in SHARES
    return [min(max(x, 0.0), 1.0) if is_share else x for x in (found.low, found.high)]


def _training(trainings: Sequence[object]) -> dict[str, Any]:
    """Return the mean local epochs of a client, and how training ended, once for all alike."""
    words = dict.fromkeys(filter(None, map(ending, trainings)))
    least, most = (numbers(lookup(t, "epochs", end) for t in trainings) for end in ("min", "max"))
    return {
        "epochs": mean(lookup(t, "epochs", "mean") for t in trainings),
        "epochs_min": min(least, default=None),
        "epochs_max": max(most, default=None),
        "training": "; ".join(words),
    }


def chance(seeds: Sequence[Record], reference: str) -> dict[str, float | None] | None:
    """Return how many clients are worse in the sample, beyond chance and truly; means over the seeds.

    None where a run does not know, as one that has not kept its samples.
    """
    facts = [lookup(run.facts, "chance", f"vs_{reference}") for run in seeds]
    if not all(facts):
        return None
    return {key: mean(fact.get(key) for fact in facts) for key in CHANCE}


def change(seeds: Sequence[Record], reference: str) -> Difference | None:
    """Return the mean change of the clients against a reference, with its interval over clients and seeds.

    None where fewer than two clients have both scores.
    """
    if len(seeds) == 1:
        known = difference_of(lookup(seeds[0].facts, "intervals", f"vs_{reference}"))
        if known is not None:
            return known
    scores = [ranking.gathered({"": seeds}, model) for model in ("personal", reference)]
    ours, theirs = (s.methods[""] for s in scores)
    found = ranking.interval(gain(ours, theirs, seeds[0].higher_is_better), scores[0].weights)
    return None if np.isnan(found.low) else Difference(found.mean, found.low, found.high)


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
