"""What releases amount to: (ε, δ) of a number of Gaussian releases, by privacy loss distributions.

    release        Σ_i x_i + N(0, z² C² I),  |x_i| ≤ C                  z: the noise, C: the clip
    participation  each client by a chance q of its own in each of T releases (Poisson sampling),
                   or in at most k of them, whoever else comes

Neighbours differ by one client: what it sends is there, or is 0, and nobody takes its turns. `dp-accounting`
composes the releases; its numbers are upper bounds. With hardly any noise, z < 0.1, the bound is
ε = μ²/2 + μ Φ⁻¹(1 − δ) with μ = √T/z, as if everybody took part: there is nothing to be hidden any more.
"""

from __future__ import annotations

import functools
import math
from statistics import NormalDist
from typing import Annotated, Any

from partita.core import check
from partita.core.options import Option, checked

FINE, COARSE = 1e-4, 1e-3
"""Steps in which losses are counted: the coarse one is a tenth of the work, and 0.001 too much in ε."""
HARDLY_ANY_NOISE = 0.1
SMALL_EPSILON = 0.5
"""Below this, the coarse steps are too coarse."""
LEAST_NOISE, MOST_NOISE = 1e-2, 1e6

RATE = Option("q, the chance of each client to take part in a release (1: all take part)", low=0, high=1)
RELEASES = Option("T, the releases that a client may take part in", low=0)
DELTA = Option("δ, the probability with which ε may not hold", low=0, open_low=True, high=0.5)


@checked("privacy ")
def epsilon(
    noise: Annotated[float, Option("z, the noise in units of the clip", low=0, open_low=True)],
    releases: Annotated[int, RELEASES],
    rate: Annotated[float, RATE] = 1.0,
    delta: Annotated[float, DELTA] = 1e-5,
) -> float:
    """Return the ε of so many releases with this noise.

    >>> round(partita.privacy.epsilon(noise=1.0, releases=100, rate=0.1), 2)
    7.05
    """
    return _epsilon(float(noise), releases, float(rate), float(delta))


@checked("privacy ")
def noise_for(
    epsilon: Annotated[float, Option("ε, what all releases together may amount to", low=0, open_low=True)],
    releases: Annotated[int, RELEASES],
    rate: Annotated[float, RATE] = 1.0,
    delta: Annotated[float, DELTA] = 1e-5,
) -> float:
    """Return the least noise, in units of the clip, with which so many releases amount to ε.

    >>> round(partita.privacy.noise_for(epsilon=2.0, releases=100, rate=0.1), 2)
    2.47
    """
    return _noise(float(epsilon), releases, float(rate), float(delta))


@functools.lru_cache(maxsize=4096)
def _epsilon(noise: float, releases: int, rate: float, delta: float) -> float:
    if not releases or not rate:
        return 0.0
    if noise < HARDLY_ANY_NOISE:
        mu = math.sqrt(releases) / noise
        return mu * mu / 2 + mu * NormalDist().inv_cdf(1 - delta)
    coarse = _composed(noise, releases, rate, delta, COARSE)
    return coarse if coarse >= SMALL_EPSILON else _composed(noise, releases, rate, delta, FINE)


def _composed(noise: float, releases: int, rate: float, delta: float, interval: float) -> float:
    dp, pld = _library()
    event = dp.GaussianDpEvent(noise)
    accountant = pld.PLDAccountant(value_discretization_interval=interval)
    accountant.compose(event if rate == 1 else dp.PoissonSampledDpEvent(rate, event), releases)
    return float(accountant.get_epsilon(delta))


@functools.lru_cache(maxsize=256)
def _noise(epsilon: float, releases: int, rate: float, delta: float) -> float:
    """Return z by bisection on a logarithmic scale; the noise found is one that keeps the bound."""
    if not releases or not rate:
        return LEAST_NOISE
    low = high = 1.0
    while high < MOST_NOISE and _epsilon(high, releases, rate, delta) > epsilon:
        low, high = high, high * 2
    if high >= MOST_NOISE:
        raise check.fail("privacy epsilon", epsilon, f"more than what noise of {MOST_NOISE:g} clips leaves")
    while low == high or (low > LEAST_NOISE and _epsilon(low, releases, rate, delta) <= epsilon):
        high, low = low, low / 2
    while high / low > 1.0005:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if _epsilon(middle, releases, rate, delta) <= epsilon else (middle, high)
    return high


def _library() -> tuple[Any, Any]:
    """Return dp-accounting, which is loaded where it is used."""
    try:
        import dp_accounting
        from dp_accounting import pld
    except ImportError as error:
        reason = "the account of privacy needs the package dp-accounting"
        raise ImportError(f"{reason}: pip install 'partita[privacy]'") from error
    return dp_accounting, pld
