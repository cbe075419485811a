"""Whether a learning curve still rises beyond its noise where it ends."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

FEWEST = 8
"""Evaluations that are needed to say anything."""
TAIL = 6
"""The end of a curve is its last third, and at least so many evaluations."""
WAVES = 6


class Rise(NamedTuple):
    """How a curve goes on at its end."""

    rising: bool | None
    """Whether it still improves beyond its noise; None where it has too few evaluations to tell."""
    p: float
    gain_per_doubling: float
    """What training twice as long would add if the curve went on as it did at its end; above 0 is better."""


def rising(curve: ArrayLike, *, higher_is_better: bool = True, level: float = 0.05) -> Rise:
    """Return whether a curve, its scores in the order of evaluations, still improves at its end.

    The last third of the curve (six evaluations at least), y_1 ... y_T, is taken apart into slow cosine
    waves (Müller & Watson 2008; Lazarus, Lewis, Stock & Watson 2018):

        X_j = √2 / T Σ_t cos(π j (t − ½) / T) y_t,  j = 1 ... q,  q = min(6, T − 1)

    On a flat curve these are about independent and of equal variance, also where the noise of neighbours is
    correlated. A rise is in X_1 above all, so that

        −X_1 / √((X_2² + ... + X_q²) / (q − 1))

    is compared with Student's t of q − 1 degrees of freedom, on one side. Flat noise is called rising in a
    share `level` of cases; two to three times as often if the tail is short and the noise strongly
    correlated. The gain per doubling is the median slope of y against log₂ t over all pairs (Theil 1950; Sen
    1968); a curve that levels off gains less. Eight evaluations are the fewest. Scores that are not finite
    are left out.
    """
    from scipy.stats import t as student

    scores = np.asarray(curve, dtype=np.float64).ravel() * (1.0 if higher_is_better else -1.0)
    times = np.arange(1, len(scores) + 1)
    known = np.isfinite(scores)
    scores, times = scores[known], times[known]
    if len(scores) < FEWEST:
        return Rise(None, float("nan"), float("nan"))
    T = max(TAIL, len(scores) // 3)
    y, t = scores[-T:], np.log2(times[-T:])
    first, second = np.triu_indices(T, 1)
    gain = float(np.median((y[second] - y[first]) / (t[second] - t[first])))
    if np.ptp(y) <= 1e-12 * np.abs(y).max():
        return Rise(False, 1.0, 0.0)
    q = min(WAVES, T - 1)
    waves = np.cos(np.pi * np.arange(1, q + 1)[:, None] * (np.arange(T) + 0.5) / T)
    X = waves @ (y - y.mean())
    noise = np.sqrt((X[1:] ** 2).mean())
    p = float(student.sf(-X[0] / noise, q - 1)) if noise > 0 else float(X[0] > 0)
    return Rise(p <= level and gain > 0, p, gain)
