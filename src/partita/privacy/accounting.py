"""What releases amount to: (ε, δ) of a number of Gaussian releases, by privacy loss distributions.

    release        Σ_i x_i + N(0, z² C² I),  |x_i| ≤ C                  z: the noise, C: the clip
    participation  each client by a chance q of its own in each of T releases (Poisson sampling),
                   or in at most k of them, whoever else comes

Neighbours differ by one client: what it sends is there, or is 0, and nobody takes its turns. `dp-accounting`
composes the releases; its numbers are upper bounds. Where all take part, T releases are one with noise z/√T,
which has a closed form (Balle & Wang, 2018). With hardly any noise, z < 0.1, chances would take minutes to
compose: then the bound is that of all taking part, since there is nothing to be hidden any more.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np

from partita.core import check
from partita.core.options import Option, checked

STEPS = (2e-3, 1e-3, 1e-4, 1e-5)
"""In which losses are counted: finer ones are more work, and where releases are many, ε is less."""
CLOSE = 0.002
"""The share of ε by which steps may be too coarse."""
HARDLY_ANY_NOISE = 0.1
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
    if rate == 1 or noise < HARDLY_ANY_NOISE:
        with np.errstate(divide="ignore"):  # of a logarithm of what is 0
            return float(_library()[0].get_epsilon_gaussian(noise / math.sqrt(releases), delta))
    before = _composed(noise, releases, rate, delta, STEPS[0])
    for coarse, fine in itertools.pairwise(STEPS):
        found = _composed(noise, releases, rate, delta, fine)
        if before - found <= (coarse / fine - 1) * CLOSE * found:  # what is too much shrinks with the step
            break
        before = found
    return found


def _composed(noise: float, releases: int, rate: float, delta: float, interval: float) -> float:
    dp, pld = _library()
    accountant = pld.PLDAccountant(value_discretization_interval=interval)
    accountant.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise)), releases)
    return float(accountant.get_epsilon(delta))


@functools.lru_cache(maxsize=256)
def _noise(epsilon: float, releases: int, rate: float, delta: float) -> float:
    """Return the least z that keeps the bound: roughly at first, and from there in fine steps."""
    if not releases or not rate:
        return LEAST_NOISE

    def roughly(z: float) -> bool:
        by_chance = rate < 1 and z >= HARDLY_ANY_NOISE
        return (_rough if by_chance else _epsilon)(z, releases, rate, delta) <= epsilon

    near = _least(roughly, 1.0, 2.0)
    found = _least(lambda z: _epsilon(z, releases, rate, delta) <= epsilon, min(near, MOST_NOISE), 1.02)
    if found >= MOST_NOISE:
        raise check.fail("privacy epsilon", epsilon, f"more than what noise of {MOST_NOISE:g} clips leaves")
    return found


def _rough(noise: float, releases: int, rate: float, delta: float) -> float:
    return _composed(noise, releases, rate, delta, STEPS[0])


def _least(keeps: Callable[[float], bool], start: float, factor: float) -> float:
    """Return the least noise that keeps a bound: by steps of a factor, then by bisection of its logarithm."""
    low = high = start
    while high < MOST_NOISE and not keeps(high):
        low, high = high, high * factor
    if high >= MOST_NOISE:
        return high
    while low == high or (low > LEAST_NOISE and keeps(low)):
        high, low = low, low / factor
    while high / low > 1.0005:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if keeps(middle) else (middle, high)
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
