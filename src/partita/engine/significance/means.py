"""Means over clients and seeds, with the interval that new clients and new seeds would fall into."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from partita.core import check
from partita.core.draws import generator
from partita.engine.significance.paired import resampled

RESAMPLES = 2_000


class Interval(NamedTuple):
    """A mean, the ends of its interval (NaN where nothing can be drawn anew), and what varies in it."""

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

    Seeds are drawn with replacement, and clients, the same for every seed (McCullagh 2000; Owen 2007, the
    pigeonhole bootstrap). The weighted mean x̄* moves by what the seeds drawn and what the clients drawn
    change; drawing samples within drawn clients would count their noise twice, for the scores carry it
    already (Davison & Hinkley 1997, section 3.8). Of S seeds and C clients, deviations are multiplied by
    √(S / (S − 1)) and √(C / (C − 1)), which makes their variances V_s and V_c unbiased, and the ends by

        √((t_{S−1}² V_s + t_{C−1}² V_c) / (V_s + V_c)) / z

    with the 1 − α/2 quantiles of Student's t and of the normal distribution, as percentiles of few seeds are
    too narrow; for normal scores this never covers less than it says (Banerjee 1960). With one seed it covers
    clients alone.
    """
    from scipy.stats import norm
    from scipy.stats import t as student

    x = np.atleast_2d(np.asarray(scores, dtype=np.float64))
    w = np.broadcast_to(np.ones(x.shape[1]) if weights is None else np.asarray(weights, np.float64), x.shape)
    if x.ndim != 2 or w.min(initial=0.0) < 0:
        raise check.fail(
            "scores", x.shape, "a row for each seed and a column for each client, weights from 0"
        )
    known = np.isfinite(x) & (w > 0)
    x, w = np.where(known, x, 0.0), np.where(known, w, 0.0)
    rows, columns = w.any(1), w.any(0)
    x, w = x[rows][:, columns], w[rows][:, columns]
    if not w.size:
        return Interval(float("nan"), float("nan"), float("nan"), "nothing")
    mean = float((w * x).sum() / w.sum())
    seeds, clients = x.shape
    rng = generator(seed, "means")
    sources = []  # what is drawn anew, the deviations of x̄* from the mean, degrees of freedom
    if errors is not None:
        e = np.broadcast_to(np.asarray(errors, np.float64), known.shape)
        e = np.where(known, np.nan_to_num(e), 0.0)[rows][:, columns]
        # the test samples are the same for all seeds, and so is their noise
        scale = float(np.sqrt(((w * e).sum(0) ** 2).sum()) / w.sum())
        sources.append(("test samples", scale * rng.standard_normal(RESAMPLES), np.inf))
    elif clients > 1:
        sources.append(("clients", _deviations((w * x).sum(0), w.sum(0), rng), clients - 1))
    if seeds > 1:
        sources.append(("seeds", _deviations((w * x).sum(1), w.sum(1), rng), seeds - 1))
    if not sources:
        return Interval(mean, float("nan"), float("nan"), "nothing")
    variances = np.array([(deviations**2).mean() for _, deviations, _ in sources])
    quantiles = student.ppf(0.5 + level / 2, [k for _, _, k in sources])
    wider = np.sqrt(quantiles**2 @ variances / max(variances.sum(), 1e-300)) / norm.ppf(0.5 + level / 2)
    together = np.sum([deviations for _, deviations, _ in sources], axis=0)
    low, high = mean + wider * np.quantile(together, [0.5 - level / 2, 0.5 + level / 2])
    return Interval(mean, float(low), float(high), " and ".join(unit for unit, _, _ in sources))


def _deviations(above: np.ndarray, below: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return how far Σ above* / Σ below* is from the mean in each resample, scaled to unbiased variance."""
    n, mean = len(above), above.sum() / below.sum()
    means = [(weights @ above) / (weights @ below) for weights in resampled(n, RESAMPLES, rng)]
    deviations: np.ndarray = (np.concatenate(means) - mean) * np.sqrt(n / (n - 1))
    return deviations
