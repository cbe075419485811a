"""How k methods compare over the clients: means with intervals, ranks, and which pairs can be told apart.

The training of both sides counts: a difference between runs that have not trained enough is not clear,
however small its p-value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from partita.engine.record import Record, number
from partita.engine.significance import Interval, mean_interval, rank_methods
from partita.engine.verdict import Difference, listed, trained, untrained
from partita.report.rows import Runs, checked, first, same_clients, suffixes

MOST_CLIENTS = 5_000
"""Clients beyond this number are grouped for intervals, and drawn at random for ranks."""
BASELINES = {"global": "one global model", "local": "training alone"}
"""What the labels are compared with where no label is that."""


class Contrast(NamedTuple):
    """Two methods, the one with the better mean first.

    `difference` has the interval that holds for all pairs at once, `p_mean` belongs to it, `p_rank` to the
    ranks of the clients' changes; both are corrected for all pairs. `early` says who has not trained enough.
    """

    first: str
    second: str
    difference: Difference
    p_mean: float
    p_rank: float
    early: str

    @property
    def clear(self) -> bool:
        """Whether the first is better beyond chance, and both have trained enough."""
        return self.difference.low > 0 and not self.early


class Standing(NamedTuple):
    """How the methods stand; `pairs` are empty where fewer than two clients have a score of each."""

    clients: int
    means: dict[str, Interval]
    ranks: dict[str, float]
    critical_difference: float
    p: float
    groups: list[list[str]]
    pairs: list[Contrast]
    best: str | None

    def between(self, one: str, other: str) -> Contrast | None:
        """Return the pair of these two."""
        return next((pair for pair in self.pairs if {pair.first, pair.second} == {one, other}), None)

    def against_best(self) -> list[Contrast]:
        """Return the best method against each of the others."""
        return [pair for pair in self.pairs if pair.first == self.best]

    @property
    def clearly_best(self) -> str | None:
        """The best method, if it is better than each of the others beyond chance; None otherwise."""
        rivals = self.against_best()
        return self.best if rivals and all(pair.clear for pair in rivals) else None


class Scores(NamedTuple):
    """Scores [seed, client] of each method, NaN where unknown, and how many test samples each client has."""

    methods: dict[str, np.ndarray]
    names: list[str]
    weights: np.ndarray
    paired: bool
    """Whether a row is the same seed in all methods."""


def standing(runs: Runs) -> Standing:
    """Compare the labels, and the baselines of their runs where no label is one of them."""
    runs = checked(runs)
    scores, higher = gathered(runs), first(runs).higher_is_better
    means = {name: interval(x, scores.weights) for name, x in scores.methods.items()}
    known = {name: x for name, x in scores.methods.items() if np.isfinite(x).any()}
    nothing = Standing(0, means, {}, np.nan, np.nan, [], [], next(iter(known), None))
    if len(known) < 2 or not same_everywhere(runs):
        return nothing
    with np.errstate(invalid="ignore"):
        table = np.stack([over_seeds(x) for x in known.values()], axis=1)
    there = np.flatnonzero(np.isfinite(table).all(1) & (scores.weights > 0))
    if len(there) < 2:
        return nothing
    if len(there) > MOST_CLIENTS:
        there = np.sort(np.random.default_rng(0).choice(there, MOST_CLIENTS, replace=False))
    ranking = rank_methods(table[there], weights=scores.weights[there], higher_is_better=higher)
    names, trainings = list(known), _trainings(runs)
    pairs = []
    for pair in ranking.pairs:
        a, b = names[pair.first], names[pair.second]
        difference = Difference(pair.difference, pair.low, pair.high)
        if scores.paired and len(known[a]) > 1:
            difference = _wider(difference, interval(_gain(known[a], known[b], higher), scores.weights))
        early = untrained({a: trainings[a], b: trainings[b]})
        pairs.append(Contrast(a, b, difference, pair.p_mean, pair.p_rank, early))
    return Standing(
        clients=ranking.clients,
        means=means,
        ranks=dict(zip(names, ranking.ranks.tolist())),
        critical_difference=ranking.critical_difference,
        p=ranking.p,
        groups=[[names[i] for i in group] for group in ranking.groups],
        pairs=pairs,
        best=names[ranking.best],
    )


def same_everywhere(runs: Runs) -> bool:
    """Return whether a name is the same client for all labels, in each seed."""
    seeds = _common_seeds(runs)
    groups = [[r for rs in runs.values() for r in rs if r.facts.get("seed") == seed] for seed in seeds]
    return all(map(same_clients, groups or zip(*runs.values())))


def gathered(runs: Runs, model: str = "personal") -> Scores:
    """Put the scores of a model of all labels side by side; those of several labels' baselines after them."""
    columns: dict[str, list[dict[str, float]]] = {}
    seeds = _common_seeds(runs)
    weights: dict[str, float] = {}
    for label, records in runs.items():
        picked = [r for r in records if r.facts.get("seed") in seeds] if seeds else list(records)
        columns[label] = [_scores(r, model, s) for r, s in zip(picked, suffixes(picked))]
        for record, suffix in zip(picked, suffixes(picked)):
            sizes = record.table.numbers("n_test")
            weights |= {f"{n}{suffix}": float(w) for n, w in zip(record.names, np.nan_to_num(sizes, nan=1.0))}
    columns |= _baselines(runs, columns, seeds) if len(runs) > 1 else {}
    place = {name: i for i, name in enumerate(weights)}
    methods = {}
    for label, rows in columns.items():
        methods[label] = np.full((len(rows), len(place)), np.nan)
        for i, row in enumerate(rows):
            methods[label][i, [place[name] for name in row]] = list(row.values())
    paired = len({len(rows) for rows in columns.values()}) == 1 and (bool(seeds) or len(runs) == 1)
    return Scores(methods, list(weights), np.array(list(weights.values())), paired)


def interval(scores: np.ndarray, weights: np.ndarray) -> Interval:
    """Return the mean of scores[seed, client] with its interval; very many clients are drawn in groups."""
    known = np.isfinite(scores).any(0) & (weights > 0)
    scores, weights = scores[:, known], weights[known]
    if len(weights) > MOST_CLIENTS:
        group = np.random.default_rng(0).permutation(len(weights)) % MOST_CLIENTS
        there = np.isfinite(scores)
        below = np.stack([np.bincount(group, weights * row, MOST_CLIENTS) for row in there])
        above = np.stack([np.bincount(group, weights * row, MOST_CLIENTS) for row in np.nan_to_num(scores)])
        # every group holds about as many clients, so that the ratio of its sums stands for a client
        with np.errstate(invalid="ignore"):
            return mean_interval(above / below, weights=below.mean(0))
    return mean_interval(scores, weights=weights)


def over_seeds(scores: np.ndarray) -> np.ndarray:
    """Return each client's mean over the seeds; NaN where it has no score."""
    count = np.isfinite(scores).sum(0)
    means: np.ndarray = np.where(count > 0, np.nansum(scores, 0) / np.maximum(count, 1), np.nan)
    return means


def _gain(ours: np.ndarray, theirs: np.ndarray, higher: bool) -> np.ndarray:
    gained: np.ndarray = ours - theirs if higher else theirs - ours
    return gained


def _wider(one: Difference, other: Interval) -> Difference:
    """Return the difference with an interval that holds both: all pairs at once, and the seeds."""
    low, high = np.nanmin([one.low, other.low]), np.nanmax([one.high, other.high])
    return Difference(one.mean, float(low), float(high))


def _common_seeds(runs: Runs) -> set[object]:
    """Return the seeds that all labels have, if each run has its own."""
    sets = []
    for records in runs.values():
        seeds = [record.facts.get("seed") for record in records]
        if None in seeds or len(set(seeds)) < len(seeds):
            return set()
        sets.append(set(seeds))
    return set.intersection(*sets)


def _scores(record: Record, model: str, suffix: str) -> dict[str, float]:
    pairs = zip(record.names, map(number, record.scores(model)))
    return {f"{name}{suffix}": x for name, x in pairs if x is not None}


def _baselines(
    runs: Runs, columns: Mapping[str, list[dict[str, float]]], seeds: set[object]
) -> dict[str, list[dict[str, float]]]:
    """Return the scores of the baselines that no label has, each from the first label with them."""
    found: dict[str, list[dict[str, float]]] = {}
    for model, name in BASELINES.items():
        for records in runs.values():
            picked = [r for r in records if r.facts.get("seed") in seeds] if seeds else list(records)
            rows = [_scores(r, model, s) for r, s in zip(picked, suffixes(picked))]
            if any(rows):
                if name not in columns and not any(rows == other for other in columns.values()):
                    found[name] = rows
                break
    return found


def _trainings(runs: Runs) -> dict[str, Sequence[object]]:
    """Return how each method and baseline has trained, seed by seed."""
    found: dict[str, Sequence[object]] = {
        label: [record.facts.get("training") for record in records] for label, records in runs.items()
    }
    for model, name in BASELINES.items():
        records = next((r for r in runs.values() if np.isfinite(r[0].scores(model)).any()), None)
        if records is not None and name not in found:
            found[name] = [of_baseline(record, model) for record in records]
    return found


def of_baseline(record: Record, model: str) -> object:
    """Return the training of a run's baseline, or its own where the model is its own."""
    baselines = record.facts.get("baselines") or {}
    return baselines[model] if model in baselines else record.facts.get("training")


# ---- in words


def sentence(where: Standing, metric: str, runs: Runs) -> str:
    """Say what is known of the ranking, and what is not: the title of a comparison."""
    best = where.best
    if best is None:
        return "No method has a score."
    rivals = where.against_best()
    if not rivals:
        others = [label for label in where.means if label != best]
        if not same_everywhere(runs):
            return "The methods have different data, so that no client is in all of them."
        return f"There are too few clients in common to compare {listed([best, *others])}."
    everyone = _trainings(runs)
    if any(trained(t) is not True for t in everyone[best]):
        caution = untrained({name: everyone[name] for name in (best, *(pair.second for pair in rivals))})
        return f"It is too early to say which method is best: {caution}."
    behind = [pair for pair in rivals if pair.clear]
    close = [pair for pair in rivals if not pair.clear and not pair.early]
    early = [pair for pair in rivals if pair.early]
    ends = f"; too early to say of {listed([p.second for p in early])}" if early else ""
    caution = untrained({pair.second: everyone[pair.second] for pair in early})
    ends += f": {caution}" if caution else ""
    if not close and behind:
        nearest = min(behind, key=lambda pair: pair.difference.mean)
        named = listed([pair.second for pair in behind])
        losing = "the other methods" if len(rivals) > 1 and not early else named
        of = f" (least to {nearest.second})" if len(behind) > 1 else ""
        return (
            f"{best} is better than {losing} on average, by {nearest.difference.size()} {metric}{of}{ends}."
        )
    if not close:
        return f"It is too early to say whether {best} is best: {caution}."
    closest = close[0]
    if len(close) == 1:
        words = f"No clear difference between {best} and {closest.second}: {closest.difference} {metric}"
    else:  # others among them may well be told apart
        named = listed([pair.second for pair in close])
        words = (
            f"{best} has the best mean, but is not clearly better than {named}: {closest.difference} {metric}"
        )
        words += f" against {closest.second}"
    if behind:
        words += f"; {best} is better than {listed([p.second for p in behind])}"
    return f"{words}{ends}."
