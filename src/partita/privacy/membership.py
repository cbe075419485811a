"""Membership inference on clients: was a client among those whom a model was trained with?

    score       s_i = −(mean loss of the released model on the samples of client i)
    calibrated  s_i − μ_out,i                                 Watson et al. (2022): how hard a client is
    ratio       log N(s_i; μ_in,i, σ_in²) − log N(s_i; μ_out,i, σ_out²)            LiRA: Carlini et al. (2022)

μ_in,i and μ_out,i are means of the score over shadow runs with and without the client. With few of them the
deviations are those of all clients together. What is larger among members tells them apart; differential
privacy bounds how well anything can: TPR ≤ e^ε FPR + δ and TPR ≤ 1 − e^{−ε} (1 − δ − FPR).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partita.core import draws

Array = NDArray[np.float64]
Z = 1.959963984540054  # of a 95 % interval
ROUNDING = 1e-7  # of a score: deviations below it are none, so that equal scores have ratio 0


class Share(NamedTuple):
    """A figure, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


# ---- what is decided by


def ratios(score: Array, inside: Array, outside: Array) -> Array:
    """Return the log-likelihood ratio of each client, by the scores of shadow runs with it and without it.

    score    of each client under the model that is attacked
    inside   [runs, clients], scores under models that have seen the client
    outside  the same under models that have not
    """
    (mean_in, s_in), (mean_out, s_out) = _normal(inside), _normal(outside)
    ratio: Array = (
        np.log(s_out / s_in) + (((score - mean_out) / s_out) ** 2 - ((score - mean_in) / s_in) ** 2) / 2
    )
    return ratio


def calibrated(score: Array, outside: Array) -> Array:
    """Return by how much each client scores more than models that have not seen it give it on average."""
    difference: Array = score - outside.mean(0)
    return np.where(np.abs(difference) <= ROUNDING * np.abs(score), 0.0, difference)


def _normal(scores: Array) -> tuple[Array, float]:
    """Return the mean of each client, and one deviation for all: Σ (s − μ_i)² / Σ (n − 1)."""
    mean = scores.mean(0)
    variance = ((scores - mean) ** 2).sum() / max(1, scores.size - len(mean))
    return mean, max(math.sqrt(variance), ROUNDING * float(np.abs(mean).mean()), 1e-300)


# ---- how well it tells members from others


def auc(members: Array, others: Array) -> Share:
    """Return the chance that a member is above another client, ties counting for half.

    The interval is Newcombe's (2006, method 5): |θ̂ − θ| = z √V(θ), with Hanley and McNeil's variance. It has
    a width where all members are above all others, too.
    """
    from scipy.stats import rankdata

    m, n = len(members), len(others)
    ranks = rankdata(np.concatenate([members, others]))[:m]
    value = float((ranks.sum() - m * (m + 1) / 2) / (m * n))
    return Share(value, *auc_interval(value, m, n))


def auc_interval(value: float, members: float, others: float) -> tuple[float, float]:
    """Return the ends of the 95 % interval of an area, of so many members and others."""
    more = (members + others) / 2 - 1

    def beyond(theta: float) -> bool:
        spread = 1 + more * ((1 - theta) / (2 - theta) + theta / (1 + theta))
        return abs(value - theta) > Z * math.sqrt(theta * (1 - theta) * spread / (members * others))

    return _end(beyond, 0.0, value), _end(beyond, 1.0, value)


def _end(beyond: Callable[[float], bool], out: float, within: float) -> float:
    """Return where `beyond` begins between an end of the range and a value that is not beyond."""
    if not beyond(out):
        return out
    for _ in range(60):
        middle = (out + within) / 2
        out, within = (middle, within) if beyond(middle) else (out, middle)
    return within


def true_positives(members: Array, others: Array, fpr: float) -> float | None:
    """Return the share of members that are found with at most this share of others taken for members.

    None where there are too few others to see such a share.
    """
    if len(others) * fpr < 1 - 1e-9:
        return None
    allowed = math.floor(len(others) * fpr + 1e-9)
    threshold = np.sort(others)[::-1][allowed] if allowed < len(others) else -np.inf
    return float((members > threshold).mean())


def advantage(members: Array, others: Array) -> Share:
    """Return TPR − FPR where those with the largest values are called members, as many as there are.

    The threshold does not look at who is one, so that 0 is expected of a test that knows nothing. The
    interval is Newcombe's (1998, method 10) for a difference of two shares.
    """
    every, m = np.concatenate([members, others]), len(members)
    threshold = np.sort(every)[::-1][m - 1]
    above, ties = (every > threshold).sum(), (every == threshold).sum()
    part = (m - above) / ties  # of those at the threshold
    tpr, fpr = (float((x > threshold).mean() + part * (x == threshold).mean()) for x in (members, others))
    a, b = _wilson(tpr, len(members)), _wilson(fpr, len(others))
    low = tpr - fpr - math.hypot(tpr - a[0], b[1] - fpr)
    high = tpr - fpr + math.hypot(a[1] - tpr, fpr - b[0])
    return Share(tpr - fpr, max(-1.0, low), min(1.0, high))


def _wilson(share: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share of n."""
    center = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    return center - half, center + half


def most_true_positives(fpr: float, epsilon: float, delta: float = 0.0) -> float:
    """Return the largest share of members that any test can find under (ε, δ)-differential privacy."""
    small = math.exp(min(epsilon, 700.0)) * fpr + delta
    large = 1 - math.exp(-epsilon) * (1 - delta - fpr)
    return max(0.0, min(1.0, small, large))


# ---- who is in which run


def halves(clients: int, runs: int, seed: int) -> NDArray[np.bool_]:
    """Return [runs, clients], who takes part: in each pair of runs every client in one of them, by chance."""
    member = np.zeros((runs, clients), dtype=bool)
    for pair in range(runs // 2):
        chosen = draws.generator(seed, "membership", pair).permutation(clients)[: clients // 2]
        member[2 * pair, chosen] = True
        member[2 * pair + 1] = ~member[2 * pair]
    return member


def decided(score: Array, member: NDArray[np.bool_]) -> dict[str, Array]:
    """Return [runs, clients] of each test, where each run in turn is attacked and all others are shadows.

    The other run of its pair is left out, so that every client has as many shadows with it as without it,
    whether it was in the run or not: their number would tell.
    """
    runs = len(score)
    found = {name: np.zeros_like(score) for name in ("loss", "calibrated", "ratio")}
    for r in range(runs):
        shadows = [k for k in range(runs) if k // 2 != r // 2]
        s, there = score[shadows], member[shadows]
        inside, outside = (
            np.stack([s[mask[:, i], i] for i in range(score.shape[1])], axis=1) for mask in (there, ~there)
        )
        found["loss"][r] = score[r]
        found["calibrated"][r] = calibrated(score[r], outside)
        found["ratio"][r] = ratios(score[r], inside, outside)
    return found
