"""Many clients at once: who is worse beyond chance, and how many truly lose."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from partita.core import check
from partita.engine.significance.paired import Changes

OVERLAP = 2.5
"""Questions about one set of p-values overlap: so much more than Bonferroni's share leaves each its level.

On uniform p-values of 5 to 10,000 clients the share that is just enough is 2.7 to 16 times Bonferroni's.
"""


def worse(changes: Changes, rate: float = 0.1) -> np.ndarray:
    """Return for each client whether it is worse beyond chance, at most `rate` of those named wrongly so.

    For m clients in order of p_worse this is the step-up rule of Benjamini & Hochberg (1995): the first k are
    named, for the largest k with

        m p_(k) ≤ rate · k

    A right-or-wrong test on few samples cannot give a small p: it should not count among the m. For these
    the sum over clients of P(p_i ≤ p_(k)), as it is for models that are equally good, takes the place of
    m p_(k) (Döhler, Durand & Roquain 2018, their step-up rule HSU):

        Σ_i F_i(p_(k)) / (1 − F_i(τ)) ≤ rate · k,  p_(k) ≤ τ,
        τ = max {t: Σ_i F_i(t) / (1 − F_i(t)) ≤ rate · m}

    Both keep the false discovery rate below `rate` for independent clients, whatever their sizes.
    """
    check.number("rate", rate, low=0.0, high=1.0, open_low=True)
    p, known = changes.p_worse, changes.n > 0
    named = np.zeros(len(p), dtype=bool)
    if not known.any():
        return named
    if changes.unlike is None:
        named[known] = _step_up(p[known], p[known] * known.sum(), rate)
    else:
        named[known] = _discrete_step_up(p[known], changes.unlike[known], rate)
    return named


def _step_up(p: np.ndarray, cost: np.ndarray, rate: float) -> np.ndarray:
    """Name the smallest p up to the last one whose cost is at most rate times how many are named."""
    order = np.argsort(p, kind="stable")
    fits = np.flatnonzero(cost[order] <= rate * np.arange(1, len(p) + 1) * (1 + 1e-12))
    return p <= p[order[fits[-1]]] if len(fits) else np.zeros(len(p), dtype=bool)


def _discrete_step_up(p: np.ndarray, unlike: np.ndarray, rate: float) -> np.ndarray:
    from scipy.stats import binom

    sizes, clients = np.unique(unlike, return_counts=True)
    supports = [binom.sf(np.arange(size + 1) - 1, size, 0.5)[::-1] for size in sizes]  # rising, up to 1

    def chances(t: np.ndarray) -> np.ndarray:
        """F(t) = P(p ≤ t), a row for each size: the largest attainable p that is not above t."""
        t = t * (1 + 1e-12)
        places = [np.searchsorted(support, t, side="right") for support in supports]
        return np.stack([np.append(0.0, s)[place] for s, place in zip(supports, places)])

    # sums of at most rate · m need all F below rate / (1 + rate) on average; beyond ½ the sum is too large
    attainable = np.unique(np.concatenate([s[s <= 0.75] for s in supports]))
    thinned = attainable[:: max(1, len(attainable) // 4096)]  # a smaller τ is as valid
    f = chances(thinned)
    fits = np.flatnonzero(clients @ (f / (1 - f)) <= rate * len(p))
    if not len(fits):
        return np.zeros(len(p), dtype=bool)
    τ = thinned[fits[-1]]
    values, place = np.unique(p, return_inverse=True)
    cost = (clients / (1 - chances(np.array([τ]))[:, 0])) @ chances(values)
    cost = np.where(values <= τ * (1 + 1e-12), cost, np.inf)
    return _step_up(p, cost[place], rate)


class Losers(NamedTuple):
    """How many clients truly lose: an estimate, and the interval that holds the number at `level`."""

    estimate: float
    low: int
    high: int
    of: int
    """Clients that were looked at: those with test samples."""
    level: float

    def __str__(self) -> str:
        return f"{self.estimate:.0f} of {self.of} ({self.level:.0%} interval {self.low} to {self.high})"


def losers(changes: Changes, *, same: np.ndarray | None = None, level: float = 0.95) -> Losers:
    """Estimate how many clients truly lose: those whose change over endless test samples is below 0.

    same   the clients whose two models are one function; their change is truly zero, they never lose

    The ends of the interval are bounds of closed testing (Goeman & Solari 2011; Meinshausen & Rice 2006). If
    only L of m clients lost, of the others no more than a binomial number would have p_worse ≤ t; so that L
    is refused where, for some of the thresholds t,

        P(Bin(m − L, t) ≥ K(t) − L) < α,  K(t) = #{i: p_worse_i ≤ t}

    `low` is the smallest L that is not refused. The same is asked of the clients with p_worse ≤ ½ alone, with
    2 t instead of t: the many who clearly gain say nothing about those who lose (Zhao, Small & Su 2019). All
    questions together err with probability (1 − level) / 2. `high` is m less the number that surely gain,
    found in the same way from p_better. Discrete tests count by parts, as random p-values do on average
    (Geyer & Meeden 2005).

    No assumption on the sizes of changes is made, and no data could tell zero from a loss too small to see:
    where nothing stands out the interval is wide. The estimate is the empirical-Bayes one of Stephens (2017):
    z_i = Φ⁻¹(p_worse_i), of which a discrete test tells only between which bounds it lies, is taken as
    N(η_i, 1); the η_i are drawn from points −6, −5.5, ..., 6 whose weights maximize the likelihood with a
    prior of 2 on zero; P(η_i < 0 | z_i) is summed. It leans towards nobody losing where little can be told.
    """
    candidates = changes.n > 0
    if same is not None:
        candidates &= ~np.asarray(same, dtype=bool)
    of, m = int((changes.n > 0).sum()), int(candidates.sum())
    lose = changes.worse_beyond[candidates], changes.p_worse[candidates]
    gain = changes.better_beyond[candidates], changes.p_better[candidates]
    α = (1 - check.number("level", level, low=0.0, high=0.9999)) / 2
    low = _at_least(*lose, α)
    high = max(m - _at_least(*gain, α), low)
    estimate = _expected_losers(lose[0], lose[1])
    return Losers(float(np.clip(estimate, low, high)), low, high, of, level)


def _at_least(below: np.ndarray, p: np.ndarray, α: float) -> int:
    """Return a lower bound of how many of these tests have a false null hypothesis, at 1 − α."""
    m = len(p)
    if not m:
        return 0
    questions = [(whole, t) for whole in (1.0, 0.5) for t in _thresholds(whole, m, α)]
    share, best = OVERLAP * α / len(questions), 0
    for whole, t in questions:
        total, count = _by_parts(below, p, whole).sum(), _by_parts(below, p, t).sum()
        best = max(best, _smallest(float(total), float(count), t / whole, share))
    return best


def _thresholds(whole: float, m: int, α: float) -> list[float]:
    """Return thresholds a factor 3 apart, from half of the whole down to where a single p is enough."""
    fewest = whole * α / (20 * m)
    steps = int(np.ceil(np.log(whole / 2 / fewest) / np.log(3)))
    return [whole / 2 / 3**i for i in range(steps + 1)]


def _by_parts(below: np.ndarray, p: np.ndarray, t: float) -> np.ndarray:
    """Return for each test P(U ≤ t) where U is uniform between `below` and `p`."""
    width = p - below
    inside: np.ndarray = np.divide(t - below, width, out=(p <= t).astype(np.float64), where=width > 1e-12)
    return inside.clip(0.0, 1.0)


def _smallest(m: float, count: float, t: float, α: float) -> int:
    """Return the smallest L with P(Bin(m − L, t) ≥ count − L) ≥ α; the chance rises with L.

    Counts by parts need the chance between whole numbers: P(Bin(m, t) ≥ k) = I_t(k, m − k + 1), the
    incomplete beta function.
    """
    from scipy.special import betainc

    few, enough = -1, int(np.ceil(count - 1e-9))  # with so many losers, the count needs nobody else
    while enough - few > 1:
        L = (few + enough) // 2
        reached = betainc(count - L, m - count + 1, t)
        few, enough = (L, enough) if reached < α else (few, L)
    return max(enough, 0)


def _expected_losers(below: np.ndarray, p: np.ndarray, prior: float = 2.0, steps: int = 500) -> float:
    """Return Σ_i P(η_i < 0 | z_i) for weights of η that maximize the penalized likelihood, by EM."""
    from scipy.stats import norm

    if not len(p):
        return 0.0
    η = np.arange(-12, 13) / 2
    bounds, clients = np.unique(np.stack([below, p]), axis=1, return_counts=True)
    edges = np.clip(norm.ppf(bounds), -9.0, 9.0)[:, :, None]
    inside = norm.cdf(edges[1] - η) - norm.cdf(edges[0] - η)
    density = norm.pdf((edges[0] + edges[1]) / 2 - η)  # where the p-value is continuous
    likelihood = np.where(edges[1] - edges[0] > 1e-3, inside, density) + 1e-300
    weights = np.full(len(η), 1 / len(η))
    pseudo = np.where(η == 0, prior - 1, 0.0)
    for _ in range(steps):
        mine = likelihood * weights
        mine /= mine.sum(1, keepdims=True)
        weights = clients @ mine + pseudo
        weights /= weights.sum()
    return float((clients @ mine)[η < 0].sum())
