"""The account of releases, beside dp-accounting used directly and the closed form of one Gaussian release."""

from __future__ import annotations

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp
from scipy.optimize import brentq
from scipy.stats import norm

import partita as pt
from partita.core.check import Refused
from partita.privacy import epsilon, noise_for
from support import each

SETTINGS = [
    # noise, releases, rate, delta
    (0.6, 10, 0.01, 1e-5),
    (0.8, 50, 0.02, 1e-5),
    (1.0, 100, 0.1, 1e-5),
    (1.0, 1000, 0.01, 1e-5),
    (1.2, 200, 0.05, 1e-6),
    (1.5, 500, 0.1, 1e-6),
    (2.0, 30, 0.5, 1e-4),
    (2.0, 300, 0.2, 1e-5),
    (3.0, 100, 0.3, 1e-5),
    (4.0, 60, 1.0, 1e-5),
    (5.0, 1, 1.0, 1e-5),
    (5.0, 100, 0.5, 1e-5),
    (8.0, 200, 1.0, 1e-6),
    (10.0, 20, 0.9, 1e-5),
    (15.0, 100, 1.0, 1e-3),
    (20.0, 1000, 1.0, 1e-5),
    (30.0, 100, 0.1, 1e-5),
    (40.0, 10, 1.0, 1e-5),
    (1.0, 3, 0.001, 1e-7),
    (6.0, 2000, 0.25, 1e-5),
    (2.0, 3000, 0.005, 1e-6),
    (30.0, 5000, 0.1, 1e-6),
    (20.0, 100_000, 0.1, 1e-6),
]


@each("noise, releases, rate, delta", SETTINGS)
def test_epsilon_is_that_of_dp_accounting(noise, releases, rate, delta) -> None:
    """Losses are counted in steps of its own default there, and by other rules here."""
    event = dp_accounting.GaussianDpEvent(noise)
    accountant = pld.PLDAccountant()
    accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, event), releases)
    expected = accountant.get_epsilon(delta)
    assert epsilon(noise, releases, rate=rate, delta=delta) == pytest.approx(expected, rel=0.002)


def test_very_many_releases_with_a_small_chance_are_counted_in_finer_steps() -> None:
    """Counted in steps of 0.001, these would be 0.57; in steps of 0.0001 they are 0.285."""
    assert epsilon(5.0, 100_000, rate=0.001, delta=1e-7) < 0.28


@each("noise, releases, delta", [(0.09, 1, 1e-5), (0.05, 10, 1e-6), (0.01, 100, 1e-3), (1e-9, 5, 1e-5)])
def test_hardly_any_noise_is_counted_as_if_everybody_took_part(noise, releases, delta) -> None:
    mu = np.sqrt(releases) / noise
    bound = epsilon(noise, releases, rate=0.1, delta=delta)
    assert bound == epsilon(noise, releases, delta=delta)
    assert bound == pytest.approx(mu**2 / 2 + mu * norm.isf(delta), rel=0.01)


@each("noise, releases, rate, delta", SETTINGS[::4])
def test_renyi_bounds_are_above(noise, releases, rate, delta) -> None:
    """Another account of the same releases, by moments, never promises more."""
    accountant = rdp.RdpAccountant()
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    accountant.compose(event, releases)
    bound = accountant.get_epsilon(delta)
    assert bound * 0.5 < epsilon(noise, releases, rate=rate, delta=delta) < bound


@each("noise, turns, delta", [(1.0, 1, 1e-5), (3.0, 9, 1e-5), (10.0, 400, 1e-6)])
def test_turns_are_one_release_with_less_noise(noise, turns, delta) -> None:
    """k releases with noise z are one with z/√k, whose ε has a closed form (Balle & Wang, 2018)."""
    mu = np.sqrt(turns) / noise

    def excess(e: float) -> float:
        return norm.cdf(mu / 2 - e / mu) - np.exp(e) * norm.cdf(-mu / 2 - e / mu) - delta

    assert epsilon(noise, turns, delta=delta) == pytest.approx(brentq(excess, 0, 200), rel=1e-6)


@each("target, releases, rate", [(0.5, 100, 0.1), (2.0, 100, 0.1), (8.0, 300, 0.02), (1.0, 40, 1.0)])
def test_the_noise_that_is_found_keeps_epsilon_and_little_less_does_not(target, releases, rate) -> None:
    noise = noise_for(target, releases, rate=rate)
    assert epsilon(noise, releases, rate=rate) <= target
    assert epsilon(noise * 0.99, releases, rate=rate) > target


def test_nothing_released_costs_nothing() -> None:
    assert epsilon(1.0, 0) == 0.0
    assert epsilon(1.0, 10, rate=0.0) == 0.0


@each(
    "make, field",
    [
        (lambda: pt.privacy.gaussian(epsilon=1, noise=1), "privacy epsilon"),
        (lambda: pt.privacy.gaussian(epsilon=0), "privacy epsilon"),
        (lambda: pt.privacy.gaussian(noise=-1), "privacy noise"),
        (lambda: pt.privacy.gaussian(noise=1, clip=0), "privacy clip"),
        (lambda: pt.privacy.gaussian(noise=1, delta=0), "privacy delta"),
        (lambda: pt.privacy.gaussian(noise=1, quantile=1.5), "privacy quantile"),
        (lambda: pt.privacy.banded(noise=1, bands=0), "privacy bands"),
        (lambda: epsilon(1.0, 10, rate=2.0), "privacy rate"),
        (lambda: noise_for(1e-9, 1000), "privacy epsilon"),
    ],
)
def test_wrong_numbers_are_refused(make, field) -> None:
    with pytest.raises(Refused) as refused:
        make()
    assert refused.value.field == field
