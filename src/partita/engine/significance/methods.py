"""Several methods on the same clients: average ranks, which pairs differ, and the best against the rest."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from partita.core import check
from partita.core.draws import generator
from partita.engine.significance.paired import resampled


class Pair(NamedTuple):
    """Two methods: how much better the first is on the mean client; p-values are corrected for all pairs.

    `low` and `high` hold the true mean differences of all pairs at once. `p_mean` belongs to them, `p_rank`
    to the ranks of the changes (Wilcoxon).
    """

    first: int
    second: int
    difference: float
    low: float
    high: float
    p_mean: float
    p_rank: float


class Ranking(NamedTuple):
    """How k methods compare over the clients that have a score of each of them."""

    clients: int
    ranks: np.ndarray
    """Average rank of each method over the clients; 1 is best."""
    p: float
    """Friedman's test: small where the methods are not all alike."""
    critical_difference: float
    """Nemenyi's: average ranks farther apart than this differ, for the scale of the picture."""
    groups: list[list[int]]
    """Methods next to each other in rank of which no two differ beyond chance; the bars of the picture."""
    pairs: list[Pair]
    """Every pair of methods, the one with the better mean first."""
    best: int
    """The method with the best mean."""

    def against_best(self) -> list[Pair]:
        """Return the best method against each of the others."""
        return [pair for pair in self.pairs if pair.first == self.best]


def rank_methods(
    scores: ArrayLike,
    *,
    weights: ArrayLike | None = None,
    higher_is_better: bool = True,
    level: float = 0.95,
    seed: int = 0,
) -> Ranking:
    """Compare k methods by scores[client, method], each the mean over the seeds.

    weights   of the clients in the means, such as their numbers of test samples; ranks count each the same

    - Friedman's test (1937) on ranks R̄_j within each of N clients, in the form of Iman & Davenport (1980):
      F = (N − 1) χ² / (N (k − 1) − χ²) with k − 1 and (k − 1)(N − 1) degrees of freedom, corrected for ties.
    - Each pair by Wilcoxon's signed-rank test (1945; equal scores after Pratt 1959), its p corrected for all
      k (k − 1) / 2 pairs (Holm 1979), as Benavoli, Corani & Mangili (2016) advise: whether two methods differ
      should not depend on which others were tried. `groups` follow from these.
    - Critical difference CD = q √(k (k + 1) / (6 N)) (Nemenyi 1963; Demšar 2006).
    - Mean differences of all pairs with simultaneous intervals: d̄ ± c s / √N, where c is the 1 − α quantile
      of the largest |t*| over all pairs when clients are drawn anew (Westfall & Young 1993; Romano & Wolf
      2005), never below the quantile of one t test. That the best was chosen by the same scores is covered.

    Clients are what varies here; that training again gives other models is not covered unless the scores are
    means over seeds. Clients that lack a score of some method are left out.
    """
    from scipy.stats import f as fisher
    from scipy.stats import rankdata, studentized_range

    x = np.asarray(scores, dtype=np.float64)
    if x.ndim != 2 or x.shape[1] < 2:
        raise check.fail(
            "scores", x.shape, "a row for each client and a column for each of two or more methods"
        )
    w = np.ones(len(x)) if weights is None else np.asarray(weights, dtype=np.float64)
    known = np.isfinite(x).all(1) & (w > 0)
    x, w = x[known] * (1.0 if higher_is_better else -1.0), w[known]
    N, k = x.shape
    if N < 2:
        raise check.fail("scores", N, "two or more clients that have a score of every method")
    α = 1 - level
    ranked = rankdata(-x, axis=1)
    ranks = ranked.mean(0)
    spread = ((ranked - (k + 1) / 2) ** 2).sum() / (k - 1)
    χ2 = N**2 * ((ranks - (k + 1) / 2) ** 2).sum() / spread if spread > 0 else 0.0
    rest = N * (k - 1) - χ2
    p = float(fisher.sf((N - 1) * χ2 / rest, k - 1, (k - 1) * (N - 1))) if rest > 1e-9 else 0.0
    q = float(studentized_range.ppf(level, k, np.inf)) / np.sqrt(2)
    # a weighted mean is a ratio; to first order it varies as the mean of these
    mean = w @ x / w.sum()
    pairs = _pairs(x, mean + N * w[:, None] * (x - mean) / w.sum(), level, seed)
    differ = {frozenset(pair[:2]) for pair in pairs if pair.p_rank < α}
    return Ranking(
        clients=N,
        ranks=ranks,
        p=p,
        critical_difference=float(q * np.sqrt(k * (k + 1) / (6 * N))),
        groups=_groups(np.argsort(ranks, kind="stable").tolist(), differ),
        pairs=pairs,
        best=int(np.argmax(mean)),
    )


def _pairs(scores: np.ndarray, x: np.ndarray, level: float, seed: int, resamples: int = 4_999) -> list[Pair]:
    """Return all pairs with the differences and intervals of the means of x, and p-values of the scores."""
    from scipy.stats import t as student

    N, k = x.shape
    order = np.argsort(-x.mean(0), kind="stable")
    names = [(int(order[i]), int(order[j])) for i in range(k) for j in range(i + 1, k)]
    d = np.stack([x[:, a] - x[:, b] for a, b in names], axis=1)
    mean = d.mean(0)
    scale = d.std(0, ddof=1)
    scale = np.where(scale > 1e-12 * np.abs(d).max(0), scale, 0.0)
    units = (d - mean) / np.where(scale > 0, scale, 1.0)
    largest = _largest_t(units, resamples, seed)
    c = max(float(np.quantile(largest, level)), float(student.ppf(0.5 + level / 2, N - 1)))
    error = scale / np.sqrt(N)
    t = np.divide(np.abs(mean), error, out=np.where(mean == 0, 0.0, np.inf), where=error > 0)
    p_mean = np.maximum((1 + (largest[:, None] >= t).sum(0)) / (resamples + 1), 2 * student.sf(t, N - 1))
    p_rank = holm([_wilcoxon(np.round(scores[:, a] - scores[:, b], 12)) for a, b in names])
    ends = zip((mean - c * error).tolist(), (mean + c * error).tolist())
    rows = zip(names, mean.tolist(), ends, p_mean.tolist(), p_rank.tolist())
    return [Pair(*name, difference, *end, *ps) for name, difference, end, *ps in rows]


def _largest_t(units: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Return the largest |t*| over the columns, of mean 0 and variance 1, for resamples of the rows."""
    N, largest = len(units), []
    for weights in resampled(N, resamples, generator(seed, "pairs")):
        drift = weights @ units / N
        width = np.sqrt(np.maximum(weights @ units**2 / N - drift**2, 0.0) / (N - 1))
        t = np.divide(drift, width, out=np.zeros_like(drift), where=width > 1e-6)
        largest.append(np.abs(t).max(1))
    return np.concatenate(largest)


def _wilcoxon(d: np.ndarray) -> float:
    from scipy.stats import wilcoxon

    if not d.any():
        return 1.0
    exact = len(d) <= 50 and d.all() and len(np.unique(np.abs(d))) == len(d)
    return float(wilcoxon(d, zero_method="pratt", method="exact" if exact else "asymptotic").pvalue)


def holm(p: ArrayLike) -> np.ndarray:
    """Return p-values corrected for their number: the largest (m − rank + 1) p up to each (Holm 1979)."""
    values = np.asarray(p, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    stepped = np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1))
    corrected = np.empty(len(values))
    corrected[order] = np.minimum(stepped, 1.0)
    return corrected


def _groups(order: list[int], differ: set[frozenset[int]]) -> list[list[int]]:
    """Return the longest stretches of the order within which no two differ, of two methods or more."""
    groups: list[list[int]] = []
    for i in range(len(order)):
        group = [order[i]]
        for j in order[i + 1 :]:
            if any(frozenset((j, other)) in differ for other in group):
                break
            group.append(j)
        if len(group) > 1 and not any(set(group) <= set(other) for other in groups):
            groups.append(group)
    return groups
