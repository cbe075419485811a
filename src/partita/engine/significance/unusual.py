"""Which clients have inputs or labels unlike those of the others, in units of what the others have.

A robust z-score over the clients says how far a client is out; it stands out beyond a bound that grows with
the number of clients, so that among clients that are all alike the chance of naming any is about 5 %.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from partita.core import check
from partita.engine.significance.paired import split_ranges

FEWEST = 8
"""Clients that are needed to say what is usual among them."""
FAR = 1.5
"""Inputs that stand out are at least so many times as far as the median client's."""
CHANCE = 0.05
"""Of naming any client among clients that are all alike."""


class Unusual(NamedTuple):
    """How far each client is from the others; NaN where it has no samples, or the clients are too few."""

    kind: str
    distance: np.ndarray
    usual: float
    """The median distance."""
    z: np.ndarray
    """How far out the distance is among the clients: a robust z-score."""
    stands_out: np.ndarray

    def sentence(self, client: int) -> str | None:
        """Say that a client is unlike the others; None where it does not stand out."""
        if not self.stands_out[client]:
            return None
        far = f"{self.distance[client]:.2g}, the median client {self.usual:.2g}"
        return f"its {self.kind} are unlike the others’: distance {far} (z = {self.z[client]:.1f})"


def unlike_labels(counts: ArrayLike) -> Unusual:
    """Return how far the label mix of each client is from that of all others, by counts[client, class].

    The distance is the total variation d_i = ½ Σ_c |p_i(c) − p_{−i}(c)| to the pooled labels of the others.
    n samples of the same mix are by chance alone at a distance of mean e(n) and standard deviation s(n): e by
    the mean absolute deviation of binomials (De Moivre 1730), s by that of the normal limit. What exceeds it
    is compared with what others exceed it by:

        z_i = (x_i − median x) / √((1.4826 MAD x)² + s(n_i)²),  x_i = d_i − e(n_i)
    """
    from scipy.special import gammaln, xlog1py, xlogy

    k = np.asarray(counts, dtype=np.float64)
    if k.ndim != 2 or (k < 0).any():
        raise check.fail("counts", k.shape, "a row for each client and a column for each class, from 0")
    n = k.sum(1, keepdims=True)
    rest = k.sum(0) - k
    with np.errstate(invalid="ignore", divide="ignore"):
        mix, others = k / n, rest / rest.sum(1, keepdims=True)
    known = np.isfinite(mix).all(1) & np.isfinite(others).all(1)
    n, p = n[known], np.clip(others[known], 0.0, 1.0)
    distance = np.full(len(k), np.nan)
    distance[known] = np.abs(mix[known] - p).sum(1) / 2
    # E|X − np| = 2 ν C(n, ν) p^ν (1 − p)^(n − ν + 1), ν = ⌊np⌋ + 1
    ν = np.minimum(np.floor(n * p) + 1, n)
    log = gammaln(n + 1) - gammaln(ν + 1) - gammaln(n - ν + 1) + xlogy(ν, p) + xlog1py(n - ν + 1, -p)
    by_chance = (2 * ν * np.exp(log) / n).sum(1) / 2
    noise = np.sqrt((1 - 2 / np.pi) * (p * (1 - p)).sum(1) / n[:, 0]) / 2
    z = np.full(len(k), np.nan)
    z[known] = _robust_z(distance[known] - by_chance, noise)
    return _unusual("labels", distance, z)


def unlike_inputs(inputs: ArrayLike, ranges: ArrayLike) -> Unusual:
    """Return how far the mean input of each client is from those of the others.

    inputs   a row for each sample, of any shape; `ranges` has a row (start, length) for each client

    The mean u_ij of feature j varies over the clients, and by chance: a client of n_i samples, which within
    clients have a variance of w_j, has one that is off by w_j / n_i. With v_j the variance over clients (from
    the MAD over clients, less what chance adds; shrunk by a tenth towards its mean over features) and M_j the
    median, a distance as that of Mahalanobis (1936) with a diagonal covariance is

        D_i² = mean_j (u_ij − M_j)² / (v_j + w_j / n_i)

    Features of any scale count the same, and a client with few samples is not far just because its mean is
    noisy. D^(2/3) is about normal (Wilson & Hilferty 1931): its robust z-score is taken over the clients.
    """
    x = np.asarray(inputs)
    x = x.reshape(len(x), -1)
    starts, n = split_ranges(ranges, len(x))
    known = n > 0
    distance, z = np.full(len(n), np.nan), np.full(len(n), np.nan)
    if known.sum() >= FEWEST and x.size:
        distance[known] = _distances(*_client_means(x, starts[known], n[known]), n[known, None])
        z[known] = _robust_z(distance[known] ** (2 / 3), np.zeros(int(known.sum())))
    return _unusual("inputs", distance, z)


def _client_means(x: np.ndarray, starts: np.ndarray, n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each client's mean of the features that vary, and their variance within clients, both scaled."""
    means, squares = np.empty((len(n), x.shape[1])), np.zeros(x.shape[1])
    for i, (start, length) in enumerate(zip(starts.tolist(), n.tolist())):  # one client at a time in memory
        samples = x[start : start + length].astype(np.float64)
        means[i] = samples.mean(0)
        squares += ((samples - means[i]) ** 2).sum(0)
    within = squares / max(int(n.sum()) - len(n), 1)
    scale = np.sqrt(within + means.var(0))
    varies = scale > 1e-6 * np.abs(means).max(0)
    return means[:, varies] / scale[varies], within[varies] / scale[varies] ** 2


def _distances(means: np.ndarray, within: np.ndarray, n: np.ndarray) -> np.ndarray:
    if not means.shape[1]:
        return np.zeros(len(means))
    away = means - np.median(means, axis=0)
    spread = (1.4826 * np.median(np.abs(away), axis=0)) ** 2
    between = np.maximum(spread - within * np.median(1 / n), 0.0)
    between = 0.9 * between + 0.1 * between.mean()
    distances: np.ndarray = np.sqrt((away**2 / np.maximum(between + within / n, 1e-12)).mean(1))
    return distances


def _robust_z(x: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Return (x − median) over the spread of the clients and the noise of each; 0 where nothing varies."""
    if len(x) < FEWEST:
        return np.full(len(x), np.nan)
    away = x - np.median(x)
    spread = np.sqrt((1.4826 * np.median(np.abs(away))) ** 2 + noise**2)
    small = 1e-9 * max(float(np.abs(x).max()), 1e-300)
    return np.where(np.abs(away) <= small, 0.0, away / np.maximum(spread, small))


def _unusual(kind: str, distance: np.ndarray, z: np.ndarray) -> Unusual:
    """Say who stands out: z above the bound that normal z-scores of so many clients exceed by chance."""
    from scipy.stats import t as student

    clients = int(np.isfinite(z).sum())
    usual = float(np.nanmedian(distance)) if np.isfinite(distance).any() else float("nan")
    # a spread from few clients is itself uncertain, a MAD like a standard deviation of a third as many
    bound = float(student.isf(CHANCE / clients, max(clients / 3, 2))) if clients else np.inf
    far = np.nan_to_num(distance) > (FAR * usual if kind == "inputs" else 0.0)
    return Unusual(kind, distance, usual, z, far & (np.nan_to_num(z) > bound))
