"""Means over clients and seeds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from partita.core.check import Refused
from partita.engine.significance import mean_interval


def test_one_seed_covers_clients_and_is_about_the_t_interval() -> None:
    scores = np.random.default_rng(0).normal(0.8, 0.1, 12)
    told = mean_interval(scores)
    wanted = stats.ttest_1samp(scores, 0).confidence_interval()
    half = (wanted.high - wanted.low) / 2
    assert told.covers == "clients"
    assert told.mean == pytest.approx(scores.mean())
    assert told.low == pytest.approx(wanted.low, abs=0.15 * half)
    assert told.high == pytest.approx(wanted.high, abs=0.15 * half)
    assert "over clients" in str(told)


def test_seeds_that_disagree_widen_the_interval() -> None:
    rng = np.random.default_rng(0)
    clients = rng.normal(0, 0.1, 50)
    alike = mean_interval(clients + np.zeros((3, 1)))
    apart = mean_interval(clients + np.array([[-0.1], [0.0], [0.1]]))
    assert alike.covers == apart.covers == "clients and seeds"
    # three seeds with standard error 0.1 / √3 and two degrees of freedom dominate: about ± 4.3 of them
    assert apart.high - apart.mean == pytest.approx(4.3 * 0.1 / np.sqrt(3), rel=0.25)
    assert alike.high - alike.low < (apart.high - apart.low) / 5


def test_the_weighted_mean_is_drawn_as_a_ratio() -> None:
    """The spread is that of the linearized ratio, Σ w (x − x̄) / Σ w."""
    rng = np.random.default_rng(1)
    w, x = rng.integers(1, 50, 200), rng.normal(0, 1, 200)
    told = mean_interval(x, weights=w)
    mean = np.average(x, weights=w)
    error = np.sqrt(((w * (x - mean)) ** 2).sum()) / w.sum()
    assert told.mean == pytest.approx(mean)
    assert (told.high - told.low) / 2 == pytest.approx(1.97 * error, rel=0.08)


def test_the_same_clients_with_new_samples() -> None:
    scores, errors = np.array([0.2, 0.9, 0.5, 0.7]), np.array([0.1, 0.1, 0.2, 0.2])
    told = mean_interval(scores, errors=errors)
    assert told.covers == "test samples"
    assert (told.high - told.low) / 2 == pytest.approx(1.96 * np.sqrt((errors**2).sum()) / 4, rel=0.06)
    assert mean_interval(np.stack([scores] * 3), errors=errors).covers == "test samples and seeds"


def test_unknown_scores_are_left_out() -> None:
    scores = np.array([[0.5, np.nan, 0.7, np.nan], [0.6, 0.4, 0.8, np.nan]])
    told = mean_interval(scores, weights=[1, 2, 0, 5])
    assert told.mean == pytest.approx((0.5 + 0.6 + 2 * 0.4) / 4)
    assert mean_interval([0.5]).covers == "nothing"
    assert np.isnan(mean_interval([0.5]).low)
    assert str(mean_interval([0.5])) == "0.5000"
    assert np.isnan(mean_interval([np.nan, np.nan]).mean)
    assert mean_interval([0.5, 0.5, 0.5])[:3] == (0.5, 0.5, 0.5)
    with pytest.raises(Refused) as error:
        mean_interval([0.5, 0.6], weights=[1, -1])
    assert error.value.field == "scores"


@given(st.integers(1, 4), st.integers(1, 8), st.integers(0, 99))
def test_shift_scale_and_seed(seeds: int, clients: int, draw: int) -> None:
    x = np.random.default_rng(draw).normal(size=(seeds, clients))
    told, moved = mean_interval(x), mean_interval(3 - 2 * x)
    assert mean_interval(x) == told or np.isnan(told.low)
    assert moved.mean == pytest.approx(3 - 2 * told.mean)
    assert moved.low == pytest.approx(3 - 2 * told.high, nan_ok=True)
    if told.covers != "nothing":
        assert told.low <= told.mean <= told.high
