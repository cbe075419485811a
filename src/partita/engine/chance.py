"""What is chance among the changes of a run's clients: each one's interval, who loses, what means are worth.

Two models of a client are compared on the same test samples of it: by an exact McNemar test where each sample
is right or wrong, by its changes where the score is a mean over samples, by a paired bootstrap otherwise
(`partita.engine.significance`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from partita.core.metrics import SHARES, ClientMetric
from partita.engine.samples import Samples
from partita.engine.significance import (
    Changes,
    losers,
    mean_changes,
    mean_interval,
    metric_changes,
    right_wrong,
    worse,
)

RESAMPLES, FEWEST_RESAMPLES = 499, 99
MOST_RESAMPLES = 200_000
"""Of all clients together, for a metric of whole clients: with more clients each has fewer, at last none."""


class Chance(NamedTuple):
    """What is known of the changes against a reference model.

    facts    the counts and intervals for summary.json
    columns  of clients.csv
    """

    facts: dict[str, Any]
    columns: dict[str, np.ndarray]


def changes(metric: ClientMetric, samples: Samples, ours: str, theirs: str, seed: int = 0) -> Changes | None:
    """Return what changes for each client from one model to another; None where that cannot be told."""
    rows = [samples.of(model, metric.name) for model in (ours, theirs)]
    if rows[0] is None or rows[1] is None:
        return None
    starts = np.cumsum(samples.sizes) - samples.sizes
    ranges = np.stack([starts, samples.sizes], axis=1)
    if metric.criterion is not None and metric.link is None:
        pairs = [_contributions(row) for row in rows if row is not None]
        if pairs[0] is not None and pairs[1] is not None:
            return _of_contributions(pairs[0], pairs[1], ranges, metric.higher_is_better, seed)
    resamples = min(RESAMPLES, MOST_RESAMPLES // max(1, int((samples.sizes > 0).sum())))
    if resamples < FEWEST_RESAMPLES:
        return None

    def score(outputs: np.ndarray, targets: np.ndarray) -> float:
        try:
            return metric.score(torch.from_numpy(outputs), torch.from_numpy(targets))
        except Exception:  # a user's function may be undefined for a client, or for samples drawn of it
            return float("nan")

    return metric_changes(
        score,
        rows[0].numpy(),
        rows[1].numpy(),
        samples.targets.numpy(),
        ranges,
        higher_is_better=metric.higher_is_better,
        strata=_strata(samples.targets),
        seed=seed,
        resamples=resamples,
    )


def _contributions(rows: Tensor) -> np.ndarray | None:
    """Return what each sample contributes to a mean; None where some count for more than others."""
    if rows.dim() == 1:
        return rows.double().numpy()
    each, weight = rows.double().T
    return (each / weight).numpy() if bool((weight == weight[:1]).all() and (weight > 0).all()) else None


def _of_contributions(
    ours: np.ndarray, theirs: np.ndarray, ranges: np.ndarray, higher_is_better: bool, seed: int
) -> Changes:
    if np.isin(ours, (0.0, 1.0)).all() and np.isin(theirs, (0.0, 1.0)).all():
        better, other = (ours, theirs) if higher_is_better else (theirs, ours)
        return right_wrong(better > 0, other > 0, ranges)
    return mean_changes(ours - theirs if higher_is_better else theirs - ours, ranges, seed=seed)


def no_changes(samples: Samples, scores: np.ndarray) -> Changes:
    """Return the changes of clients whose two models are one; none for a client without a score."""
    n = np.where(np.isfinite(scores), samples.sizes, 0)
    change = np.where(n > 0, 0.0, np.nan)
    ones, zeros = np.ones(len(n)), np.zeros(len(n))
    return Changes(n, change, change, change, ones, ones, ones, zeros, zeros, n * 0)


def _strata(targets: Tensor) -> np.ndarray | None:
    """Return classes within which samples are drawn anew; None for numbers and sequences."""
    return None if targets.is_floating_point() or targets.dim() > 1 else targets.numpy()


def of(found: Changes, honest: np.ndarray, same: bool, reference: str, names: Any) -> Chance:
    """Return counts, intervals and columns of the changes against a reference, over honest clients.

    same  whether the two models are one for everybody: then nobody loses
    """
    counted = honest & (found.n > 0)
    kept = Changes(**{k: v[counted] for k, v in vars(found).items() if v is not None})
    places = np.flatnonzero(counted)
    loses = worse(kept) & (not same)
    number = losers(kept, same=np.full(len(kept), same))
    flags = np.full(len(honest), np.nan)
    flags[places] = loses
    facts = {
        "worse": int((kept.change < 0).sum()),
        "beyond_chance": int(loses.sum()),
        "better_beyond_chance": int(worse(_turned(kept)).sum()) if not same else 0,
        "clients": [names[i] for i in places[loses].tolist()],
        "estimate": number.estimate,
        "low": number.low,
        "high": number.high,
        "of": number.of,
        "same": same,
    }
    columns = {
        f"vs_{reference}_low": found.low,
        f"vs_{reference}_high": found.high,
        f"vs_{reference}_p": np.where(found.n > 0, found.p_worse, np.nan),
        f"hurt_vs_{reference}": flags,
    }
    return Chance(facts, columns)


def _turned(found: Changes) -> Changes:
    """Return the changes from the other model's side."""
    return Changes(
        found.n,
        -found.change,
        -found.high,
        -found.low,
        found.p,
        found.p_better,
        found.p_worse,
        found.better_beyond,
        found.worse_beyond,
        found.unlike,
    )


def intervals(
    scores: Mapping[str, np.ndarray | None], weight: np.ndarray, metric: ClientMetric
) -> dict[str, Any]:
    """Return 95 % intervals of the mean scores over clients, and of how much better personal models are."""
    known = {k: v for k, v in scores.items() if v is not None and np.isfinite(v[weight > 0]).any()}
    result: dict[str, Any] = {k: _ends(v, weight)[1:] for k, v in known.items()}
    if metric.name in SHARES:
        result = {k: [x if x is None else min(max(x, 0.0), 1.0) for x in ends] for k, ends in result.items()}
    for reference in ("global", "local"):
        if "personal" in known and reference in known:
            gained = (known["personal"] - known[reference]) * (1 if metric.higher_is_better else -1)
            mean, low, high = _ends(gained, weight)
            result[f"vs_{reference}"] = {"difference": mean, "low": low, "high": high}
    return result


def _ends(scores: np.ndarray, weight: np.ndarray) -> list[float | None]:
    """Return the mean of what clients have, and the ends of its interval; None where it has none."""
    there = (weight > 0) & np.isfinite(scores)
    if not there.any():
        return [None, None, None]
    interval = mean_interval(scores[there], weights=weight[there])
    ends = (interval.mean, interval.low, interval.high)
    return [float(x) if np.isfinite(x) else None for x in ends]
