"""Curves that still rise, and those that do not."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from partita.engine.significance import rising
from support import each


@each("n", [0, 1, 7])
def test_too_few_evaluations_tell_nothing(n: int) -> None:
    assert rising(np.arange(n)).rising is None
    assert np.isnan(rising(np.arange(n)).p)


@each("n", [8, 12, 30, 100])
def test_an_approach_rises_until_it_is_there(n: int) -> None:
    noise = 0.005 * np.random.default_rng(n).standard_normal(n)
    t = np.arange(1, n + 1) / n
    under_way, there = (0.9 - 0.8 * np.exp(-t / τ) + noise for τ in (0.6, 0.03))
    assert rising(under_way).rising is True
    assert rising(under_way).gain_per_doubling > 0.05
    assert rising(there).rising is False
    assert rising(-under_way, higher_is_better=False) == rising(under_way)
    assert rising(-under_way).rising is False


def test_the_gain_per_doubling_of_a_logarithm() -> None:
    told = rising(0.1 * np.log2(np.arange(1, 41)))
    assert told.gain_per_doubling == pytest.approx(0.1)
    assert told.rising is True


def test_the_statistic_from_its_definition() -> None:
    y = np.random.default_rng(3).normal(size=24)
    T, tail = 8, y[-8:]
    X = [np.sqrt(2) / T * sum(np.cos(np.pi * j * (t - 0.5) / T) * tail[t - 1] for t in range(1, T + 1)) for j in range(1, 7)]  # fmt: skip  # noqa: E501
    assert rising(y).p == pytest.approx(stats.t.sf(-X[0] / np.sqrt(np.mean(np.square(X[1:]))), 5))


def test_constants_gaps_and_a_last_jump() -> None:
    assert rising([0.5] * 10) == (False, 1.0, 0.0)
    curve = np.linspace(0.1, 0.9, 20)
    curve[[3, 15]] = np.nan
    assert rising(curve).rising is True
    assert rising([0.5] * 19 + [0.6]).rising is False  # one evaluation may be luck
