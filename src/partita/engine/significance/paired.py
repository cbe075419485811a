"""Two models on the same test samples of a client: the change, its interval, its p-values, for many clients.

Samples of all clients lie in flat arrays; `ranges` has a row (start, length) for each client, as
`FederatedData.test` has. A change above zero is better. Clients are taken one by one: what is said of one
depends on its own samples and on `seed` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from partita.core import check
from partita.core.draws import generator

ENUMERATED = 12
"""Up to so many samples all 2ⁿ signs are tried."""
FLIPS = 9_999
"""Signs that are drawn where there are too many to try all."""
NORMAL = 1_000
"""Above so many samples the central limit theorem serves as well as drawing."""
STUDENTIZED = 10
"""From so many samples on resampled t statistics widen the interval of a mean."""
CELLS = 1 << 22
"""Numbers that are held at once."""


@dataclass(frozen=True, eq=False)
class Changes:
    """What changes for each client between a reference and a model, an entry per client; above 0 is better.

    `p_worse` is small where the model is worse beyond chance, `p_better` where it is better, `p` (two-sided)
    where it is one of them. `worse_beyond` and `better_beyond` are the chances of an even stronger result,
    p(T > t) where the p-value is p(T ≥ t): the two differ much in tests on few samples. `unlike` counts the
    samples that one model gets right and the other wrong; None for other metrics.

    A client without samples, or with a sample whose change is no finite number, has `n` 0, a change of NaN
    and p-values of 1. `low` and `high` are NaN where the samples are too few to give an interval.
    """

    n: np.ndarray
    change: np.ndarray
    low: np.ndarray
    high: np.ndarray
    p: np.ndarray
    p_worse: np.ndarray
    p_better: np.ndarray
    worse_beyond: np.ndarray
    better_beyond: np.ndarray
    unlike: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.n)


# ---- right or wrong


def right_wrong(ours: ArrayLike, theirs: ArrayLike, ranges: ArrayLike, *, level: float = 0.95) -> Changes:
    """Compare which samples each of two models gets right: exact McNemar tests, score intervals.

    Of a client's n samples, b are right with `ours` alone and c with `theirs` alone. Where the models are
    equally good, b is binomial given b + c (McNemar 1947; the exact form is that of Cochran 1950):

        p_worse = P(X ≥ c),  p_better = P(X ≥ b),  X ~ Bin(b + c, ½),  p = min(1, 2 min(p_worse, p_better))

    These tests never reject more often than they say; the mid-p form does, and false discovery rates need
    tests that do not. What they lose by being discrete, `worse` and `losers` give back. The interval of the
    difference (b − c) / n of accuracies holds all Δ whose score statistic is small (Tango 1998):

        |b − c − nΔ| ≤ z √(n (2 q(Δ) + Δ (1 − Δ)))

    where q(Δ) is the maximum likelihood estimate of the share of samples that only `theirs` gets right. It is
    not empty at b = c = 0: models that never differed on 10 samples may still differ on the next.
    """
    from scipy.stats import binom, norm

    right, reference = _flat("ours", ours, bool), _flat("theirs", theirs, bool)
    starts, n = split_ranges(ranges, len(right))
    if len(reference) != len(right):
        raise check.fail("theirs", len(reference), f"as many samples as ours has: {len(right)}")
    b, c = _sums(right & ~reference, starts, n), _sums(~right & reference, starts, n)
    p_worse, p_better = binom.sf(c - 1, b + c, 0.5), binom.sf(b - 1, b + c, 0.5)
    low, high = _score_interval(b, c, n, float(norm.ppf(0.5 + level / 2)))
    with np.errstate(invalid="ignore"):
        change = (b - c) / n
    return Changes(
        n=n,
        change=change,
        low=low,
        high=high,
        p=np.minimum(1.0, 2 * np.minimum(p_worse, p_better)),
        p_worse=p_worse,
        p_better=p_better,
        worse_beyond=binom.sf(c, b + c, 0.5),
        better_beyond=binom.sf(b, b + c, 0.5),
        unlike=b + c,
    )


def _score_interval(b: np.ndarray, c: np.ndarray, n: np.ndarray, z: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of Tango's interval, found by bisection; NaN where n is 0."""
    middle = np.divide(b - c, n, out=np.full(len(n), np.nan), where=n > 0)
    ends = []
    for side in (-1.0, 1.0):
        inside, outside = middle.copy(), np.full(len(n), side)
        for _ in range(60):  # halved to the last bit of a double
            Δ = (inside + outside) / 2
            covered = np.abs(b - c - n * Δ) <= z * np.sqrt(_score_variance(b, c, n, Δ))
            inside, outside = np.where(covered, Δ, inside), np.where(covered, outside, Δ)
        ends.append(np.where(n > 0, outside, np.nan))
    return ends[0], ends[1]


def _score_variance(b: np.ndarray, c: np.ndarray, n: np.ndarray, Δ: np.ndarray) -> np.ndarray:
    """n (2q + Δ(1 − Δ)), where q solves 2n q² + (−b − c + (2n − b + c) Δ) q − c Δ (1 − Δ) = 0."""
    linear = -b - c + (2 * n - b + c) * Δ
    root = np.sqrt(np.maximum(linear**2 + 8 * n * c * Δ * (1 - Δ), 0.0))
    q = (root - linear) / np.maximum(4 * n, 1)
    variance: np.ndarray = n * (2 * q + Δ * (1 - Δ))
    return variance.clip(0.0)


# ---- means over samples


def mean_changes(gains: ArrayLike, ranges: ArrayLike, *, level: float = 0.95, seed: int = 0) -> Changes:
    """Compare a metric that is a mean over samples, by what each sample gains: sign flips, and t intervals.

    `gains` has for each sample how much better the model is on it than the reference. Where the two are
    alike, each gain d_j could as well have the other sign (Fisher 1935, the sign-flip test):

        p_better = P(Σ ε_j d_j ≥ Σ d_j),  ε_j = ±1 with probability ½ each

    over all 2ⁿ signs up to 12 samples, over 9,999 drawn ones beyond (Phipson & Smyth 2010 count the observed
    signs among them), by the normal limit beyond 1,000. Flipping the studentized mean gives the same p, as
    Σ d_j² does not change; so that the test also holds asymptotically for gains that are not symmetric.

    The interval of the mean d̄ reaches on either side as far as the farther of Student's t interval and, from
    10 samples on, the bootstrap-t interval (Efron 1979; Hall 1988):

        d̄ − s t*_{1−α/2} / √n  to  d̄ − s t*_{α/2} / √n,  t* = (d̄* − d̄) √n / s*

    t alone is too short for skewed gains, bootstrap-t for symmetric ones with long tails. Gains that are all
    equal give an interval of no width, one sample gives none.
    """
    flat = _flat("gains", gains, np.float64)
    starts, n = split_ranges(ranges, len(flat))
    unknown = _sums(~np.isfinite(flat), starts, n) > 0
    n = np.where(unknown, 0, n)
    flat = np.where(np.isfinite(flat), flat, 0.0)
    clients = len(n)
    change, low, high = (np.full(clients, np.nan) for _ in range(3))
    better, beyond = np.ones(clients), np.zeros(clients)
    signs = _drawn_signs(int(n[n <= NORMAL].max(initial=0)), seed)
    for rows, x in _by_size(flat, starts, n):
        change[rows] = x.mean(1)
        better[rows], beyond[rows] = _sign_flips(x, signs)
        if x.shape[1] > 1:
            low[rows], high[rows] = _t_interval(x, level, seed)
    worse, worse_beyond = 1 - beyond, 1 - better
    worse[n == 0], worse_beyond[n == 0] = 1.0, 0.0
    p = np.minimum(1.0, 2 * np.minimum(worse, better))
    return Changes(n, change, low, high, p, worse, better, worse_beyond, beyond)


def _drawn_signs(n: int, seed: int) -> np.ndarray:
    """Draw signs for n samples, a row each; the first rows are the same for every n.

    The first column is what was observed.
    """
    if n <= ENUMERATED:
        return np.empty((0, 0))
    drawn = generator(seed, "signs").integers(0, 2, (n, FLIPS), dtype=np.int8)
    return np.hstack([np.ones((n, 1)), 1.0 - 2.0 * drawn])


def _sign_flips(x: np.ndarray, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return P(T ≥ t) and P(T > t) of the sums t of the rows, under random signs."""
    from scipy.stats import norm

    t, n = x.sum(1), x.shape[1]
    if n > NORMAL:
        scale = np.sqrt((x * x).sum(1))
        tail = norm.sf(np.divide(t, scale, out=np.zeros(len(t)), where=scale > 0))
        return np.where(scale > 0, tail, 1.0), np.where(scale > 0, tail, 0.0)
    if n <= ENUMERATED:
        signs = 1 - 2 * (np.arange(1 << n) >> np.arange(n)[:, None] & 1).astype(np.float64)
    else:
        signs = drawn[:n]
    rounding = 1e-12 * np.abs(x).sum(1)[:, None]
    at_least, above = np.empty(len(x)), np.empty(len(x))
    for part in _parts(len(x), signs.shape[1]):
        flipped, seen = x[part] @ signs, t[part, None]
        at_least[part] = (flipped >= seen - rounding[part]).mean(1)
        above[part] = (flipped > seen + rounding[part]).mean(1)
    return at_least, above


def _t_interval(
    x: np.ndarray, level: float, seed: int, resamples: int = 999
) -> tuple[np.ndarray, np.ndarray]:
    """Return the farther ends of Student's interval and of the bootstrap-t interval for the means of rows."""
    from scipy.stats import t as student

    n, mean = x.shape[1], x.mean(1)
    scale = x.std(1, ddof=1)
    scale = np.where(scale > 1e-12 * np.abs(x).max(1), scale, 0.0)  # equal up to rounding
    error, quantile = scale / np.sqrt(n), float(student.ppf(0.5 + level / 2, n - 1))
    lowest, highest = np.full(len(x), -quantile), np.full(len(x), quantile)
    if STUDENTIZED <= n <= NORMAL:
        weights = np.vstack([*resampled(n, resamples, generator(seed, "resamples", n))]).T
        # about the mean, in units of the spread: sums of squares that lose no digits
        units = (x - mean[:, None]) / np.where(scale > 0, scale, 1.0)[:, None]
        for part in _parts(len(x), resamples):
            drift = units[part] @ weights / n
            spread = np.sqrt(np.maximum((units[part] ** 2) @ weights / n - drift**2, 0.0) * n / (n - 1))
            t = np.divide(drift * np.sqrt(n), spread, out=np.zeros_like(drift), where=spread > 1e-6)
            ends = np.quantile(t, [0.5 - level / 2, 0.5 + level / 2], axis=1)
            lowest[part] = np.minimum(lowest[part], ends[0])
            highest[part] = np.maximum(highest[part], ends[1])
    return mean - highest * error, mean - lowest * error


# ---- metrics of a whole client

Metric = Callable[[np.ndarray, np.ndarray], float]


def metric_changes(
    metric: Metric,
    ours: np.ndarray,
    theirs: np.ndarray,
    targets: np.ndarray,
    ranges: ArrayLike,
    *,
    higher_is_better: bool,
    strata: ArrayLike | None = None,
    level: float = 0.95,
    seed: int = 0,
    resamples: int = 999,
) -> Changes:
    """Compare `metric(outputs, targets)` of two models, such as an AUC, by a paired bootstrap of samples.

    ours, theirs   what each model puts out for every sample, a row each; `targets` has what is right
    strata         for each sample the group within which samples are drawn, as a rule its class; without it
                   a client with few positives has resamples with none, for which an AUC is undefined

    A client's samples are drawn with replacement, the same for both models, and the difference of the two
    scores is worked out anew: δ*. With u = Φ⁻¹(share of δ* at most x) and k samples in the smallest stratum,
    P(δ ≤ x) is taken as T_{k−1}(u √((k − 1) / k)): percentiles corrected for being too narrow in small
    samples (Hesterberg 2015, "expanded percentiles"). `p_better` is that at x = 0. Resamples for which the
    metric is undefined (NaN, or an error of value) are left out; where more than half of them are, or the
    metric itself is, the client has no interval and p-values of 1. It costs 2 · `resamples` calls of the
    metric for each client.
    """
    y = np.asarray(targets)
    starts, n = split_ranges(ranges, len(y))
    groups = np.zeros(len(y), dtype=np.int64) if strata is None else np.unique(strata, return_inverse=True)[1]
    sign = 1.0 if higher_is_better else -1.0

    def gain(rows: np.ndarray) -> float:
        return sign * (_score(metric, ours[rows], y[rows]) - _score(metric, theirs[rows], y[rows]))

    clients = len(n)
    change, low, high = (np.full(clients, np.nan) for _ in range(3))
    p_worse, p_better = np.ones(clients), np.ones(clients)
    for client in range(clients):
        rows = np.arange(starts[client], starts[client] + n[client])
        change[client] = gain(rows) if len(rows) else np.nan
        if not np.isfinite(change[client]):
            n[client] = 0
            continue
        parts = [rows[groups[rows] == g] for g in np.unique(groups[rows])]
        rng = generator(seed, "resamples", client)
        drawn = np.array([gain(_drawn(parts, rng)) for _ in range(resamples)])
        drawn = drawn[np.isfinite(drawn)]
        smallest = min(len(part) for part in parts)
        if smallest > 1 and len(drawn) > resamples / 2:
            ends = _expanded(drawn, smallest, level)
            low[client], high[client], p_worse[client], p_better[client] = ends
    p = np.minimum(1.0, 2 * np.minimum(p_worse, p_better))
    beyond = 1 - p_better, 1 - p_worse
    return Changes(n, change, low, high, p, p_worse, p_better, *beyond)


def _score(metric: Metric, outputs: np.ndarray, targets: np.ndarray) -> float:
    try:
        return float(metric(outputs, targets))
    except (ValueError, ZeroDivisionError):  # undefined for these samples
        return float("nan")


def _drawn(parts: list[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    return np.concatenate([part[rng.integers(0, len(part), len(part))] for part in parts])


def _expanded(drawn: np.ndarray, k: int, level: float) -> tuple[float, float, float, float]:
    """Return the ends of the interval and the p-values of worse and better."""
    from scipy.stats import norm
    from scipy.stats import t as student

    wider = np.sqrt(k / (k - 1))
    tail = float(norm.cdf(wider * student.ppf(0.5 - level / 2, k - 1)))
    low, high = np.quantile(drawn, [tail, 1 - tail])
    shares = [(1 + (drawn >= 0).sum()) / (len(drawn) + 1), (1 + (drawn <= 0).sum()) / (len(drawn) + 1)]
    p_worse, p_better = (student.cdf(norm.ppf(min(s, 1 - 1e-12)) / wider, k - 1) for s in shares)
    return float(low), float(high), float(p_worse), float(p_better)


# ---- samples of many clients


def _flat(field: str, values: ArrayLike, kind: type) -> np.ndarray:
    flat: np.ndarray = np.asarray(values, dtype=kind)
    if flat.ndim != 1:
        raise check.fail(field, flat.shape, "one value for each sample")
    return flat


def split_ranges(ranges: ArrayLike, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and lengths, checked."""
    pairs = np.array(ranges, dtype=np.int64).reshape(-1, 2) if np.size(ranges) else np.zeros((0, 2), np.int64)
    starts, lengths = pairs[:, 0].copy(), pairs[:, 1].copy()
    wrong = (starts < 0) | (lengths < 0) | (starts + lengths > samples)
    if wrong.any():
        client = int(np.flatnonzero(wrong)[0])
        allowed = f"a start and a length within the {samples} samples (client {client})"
        raise check.fail("ranges", pairs[client].tolist(), allowed)
    return starts, lengths


def _sums(flags: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Count the flags of each client."""
    counts: np.ndarray = np.concatenate([[0], np.cumsum(flags, dtype=np.int64)])
    of_clients: np.ndarray = counts[starts + lengths] - counts[starts]
    return of_clients


def _by_size(
    flat: np.ndarray, starts: np.ndarray, lengths: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the clients that have the same number of samples, and these samples, a row per client."""
    for size in np.unique(lengths[lengths > 0]).tolist():
        clients = np.flatnonzero(lengths == size)
        for part in _parts(len(clients), size):
            rows = clients[part]
            yield rows, flat[starts[rows, None] + np.arange(size)]


def _parts(rows: int, width: int) -> list[slice]:
    """Cut rows into blocks of at most CELLS numbers."""
    step = max(1, CELLS // max(width, 1))
    return [slice(i, i + step) for i in range(0, rows, step)]


def resampled(n: int, resamples: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield how often each of n is drawn in each resample, a row per resample, some resamples at a time."""
    for part in _parts(resamples, n):
        rows = min(part.stop, resamples) - part.start
        drawn = rng.integers(0, n, (rows, n)) + n * np.arange(rows)[:, None]
        yield np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n).astype(np.float64)
