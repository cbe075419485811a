"""Means over clients and seeds, with the interval that new clients and new seeds would fall into."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from partita.core import check
from partita.core.draws import generator
from partita.engine.significance.paired import _parts, _resampled

RESAMPLES = 2_000


class Interval(NamedTuple):
    """A mean, the ends of its interval (NaN where there is nothing to tell it from), and what varies in it."""

    mean: float
    low: float
    high: float
    covers: str
    """What is drawn anew: 'clients and seeds', 'clients', 'test samples and seeds', ..., or 'nothing'."""

    def __str__(self) -> str:
        if np.isnan(self.low):
            return f"{self.mean:.4f}"
        return f"{self.mean:.4f} ({self.low:.4f} to {self.high:.4f}, over {self.covers})"


def mean_interval(
    scores: ArrayLike,
    *,
    weights: ArrayLike | None = None,
    errors: ArrayLike | None = None,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Return the mean of scores[seed, client] with its interval, by a hierarchical bootstrap.

    scores    a row for each seed, a column for each client; one row alone may be flat; NaN where unknown. For
              the difference of two methods on the same seeds and clients pass the difference of their scores
    weights   of the clients, such as their numbers of test samples; without it each counts the same
    errors    standard errors of the scores, from the test samples of each client. With them the clients are
              those there are, and their test samples are drawn anew; without them clients are drawn anew

    Seeds are drawn with replacement, then clients, the same for every seed drawn (McCullagh 2000; Owen 2007,
    the pigeonhole bootstrap), and the weighted mean is worked out each time: x̄*. Drawing samples within drawn
    clients would count their noise twice, for the scores carry it already (Davison & Hinkley 1997, section
    3.8). With few seeds or clients percentiles of x̄* are too narrow; the distance of each end from the mean is
    multiplied by

        t_{1−α/2}(ν) / z_{1−α/2},  ν = (V_s + V_c)² / (V_s² / (S − 1) + V_c² / (C − 1))

    (Satterthwaite 1946), where V_s and V_c are the variances of x̄* when only seeds or only clients are drawn,
    with factors S / (S − 1) and C / (C − 1) that make them unbiased. With one seed it covers clients alone.
    """
    from scipy.stats import norm
    from scipy.stats import t as student

    x = np.atleast_2d(np.asarray(scores, dtype=np.float64))
    w = np.broadcast_to(np.ones(x.shape[1]) if weights is None else np.asarray(weights, np.float64), x.shape)
    if x.ndim != 2 or w.min(initial=0.0) < 0:
        raise check.fail("scores", x.shape, "a row for each seed and a column for each client, weights from 0")
    known = np.isfinite(x) & (w > 0)
    x, w = np.where(known, x, 0.0), np.where(known, w, 0.0)
    rows, columns = w.any(1), w.any(0)
    x, w = x[rows][:, columns], w[rows][:, columns]
    if not w.size:
        return Interval(float("nan"), float("nan"), float("nan"), "nothing")
    mean = float((w * x).sum() / w.sum())
    seeds, clients = x.shape
    rng = generator(seed, "means")
    over_seeds = _means(x, w, _resampled(seeds, RESAMPLES, rng), None)
    if errors is None:
        over_clients = _means(x, w, None, _resampled(clients, RESAMPLES, rng))
        freedom, unit = clients - 1, "clients"
    else:
        e = np.where(known, np.nan_to_num(np.broadcast_to(np.asarray(errors, np.float64), known.shape)), 0.0)
        e = e[rows][:, columns]
        # test samples are the same for all seeds, so that their noise is common to them
        scale = float(np.sqrt(((w * e).sum(0) ** 2).sum()) / w.sum())
        over_clients = mean + scale * rng.standard_normal(RESAMPLES)
        freedom, unit = 0, "test samples"
    parts = [(v, k) for v, k in ((over_clients, freedom), (over_seeds, seeds - 1)) if v.std() > 0 or k > 0]
    covers = " and ".join(
        name for name, there in ((unit, errors is not None or clients > 1), ("seeds", seeds > 1)) if there
    )
    if not covers:
        return Interval(mean, float("nan"), float("nan"), "nothing")
    unbiased = [(v - mean) * (np.sqrt((k + 1) / k) if k else 1.0) for v, k in parts]
    variances = [float((v**2).mean()) for v in unbiased]
    losses = sum(v**2 / k for v, (_, k) in zip(variances, parts) if k)
    ν = sum(variances) ** 2 / losses if losses > 0 else np.inf
    wider = float(student.ppf(0.5 + level / 2, ν) / norm.ppf(0.5 + level / 2))
    low, high = np.quantile(sum(unbiased), [0.5 - level / 2, 0.5 + level / 2]) * wider
    return Interval(mean, float(mean + low), float(mean + high), covers)


def _means(x: np.ndarray, w: np.ndarray, seeds: np.ndarray | None, clients: np.ndarray | None) -> np.ndarray:
    """Return the weighted mean of each resample of seeds or of clients; the mean itself where it is empty."""
    if seeds is not None:
        above, below = seeds @ (w * x).sum(1), seeds @ w.sum(1)
    else:
        assert clients is not None
        above, below = clients @ (w * x).sum(0), clients @ w.sum(0)
    return np.divide(above, below, out=np.full(len(above), (w * x).sum() / w.sum()), where=below > 0)
