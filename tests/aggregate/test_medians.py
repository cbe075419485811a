"""Coordinate median, trimmed mean and geometric median by their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partita import aggregate as agg
from reference import definitions as plain
from reference.definitions import combine, vector
from support import each

few = settings(deadline=None, max_examples=40)
seeds = st.integers(0, 2**32 - 1)


def drawn(seed: int, n: int, d: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Rows, some values of which are equal, and whole-number weights."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)).round(1), rng.integers(1, 5, n)


@few
@given(seed=seeds, n=st.integers(1, 13))
def test_coordinate_median(seed, n) -> None:
    x, weight = drawn(seed, n)
    np.testing.assert_allclose(vector(agg.coordinate_median(), x), np.median(x, axis=0), rtol=1e-15)
    expected = plain.weighted_median(x, weight)
    np.testing.assert_allclose(vector(agg.coordinate_median(), x, weight), expected, rtol=1e-15)
    np.testing.assert_allclose(vector(agg.coordinate_median(), x, weight / 7), expected, rtol=1e-15)


@few
@given(seed=seeds, n=st.integers(1, 13), f=st.integers(0, 6))
def test_trimmed_mean(seed, n, f) -> None:
    x, weight = drawn(seed, n)
    x += np.random.default_rng(seed).normal(size=x.shape)  # no ties: with weights they would be ambiguous
    used = min(f, (n - 1) // 2)
    done = combine(agg.trimmed_mean(f), {"x": x}, weight)
    np.testing.assert_allclose(done.delta["x"], plain.trimmed(x, used, weight), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(
        vector(agg.trimmed_mean(f), x), plain.trimmed(x, used, np.ones(n)), rtol=1e-12, atol=1e-14
    )
    assert int(done.notes["f"]) == used


@few
@given(seed=seeds, n=st.integers(3, 12), weighted=st.booleans())
def test_geometric_median(seed, n, weighted) -> None:
    rng = np.random.default_rng(seed)
    x, weight = rng.normal(size=(n, 5)), rng.integers(1, 5, n) if weighted else np.ones(n)
    got = vector(agg.geometric_median(tolerance=1e-13, iterations=5000), x, weight)
    expected = plain.weiszfeld(x, weight, 1e-6, 1000)
    reached, best = plain.objective(got, x, weight), plain.objective(expected, x, weight)
    assert reached <= best * (1 + 1e-8)
    for step in 1e-4 * rng.normal(size=(20, 5)):
        assert plain.objective(got + step, x, weight) >= reached * (1 - 1e-9)


def test_geometric_median_in_float64() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(9, 40)) + 100
    got = vector(agg.geometric_median(tolerance=1e-14, iterations=5000), x)
    np.testing.assert_allclose(got, plain.weiszfeld(x, np.ones(9), 1e-6), rtol=1e-12)


def test_geometric_median_on_a_line() -> None:
    """In one dimension it is the median."""
    x = np.array([[0.0], [1.0], [10.0], [2.0], [1e9]])
    np.testing.assert_allclose(vector(agg.geometric_median(), x), [2.0], rtol=1e-5)


def test_the_geometric_median_of_two_is_between_them() -> None:
    """All points between them are as good; the order of the clients must not decide."""
    x = np.array([[0.0, 2.0], [4.0, 0.0]])
    np.testing.assert_allclose(vector(agg.geometric_median(), x), [2.0, 1.0], rtol=1e-12)


def test_iterations_are_reported_and_limited() -> None:
    x = np.random.default_rng(0).normal(size=(9, 4))
    assert int(combine(agg.geometric_median(), {"x": x}).notes["iterations"]) in range(2, 200)
    assert int(combine(agg.geometric_median(0.0, 3), {"x": x}).notes["iterations"]) == 3


@few
@given(seed=seeds, n=st.integers(3, 9))
def test_two_equal_clients_are_one_of_double_weight(seed, n) -> None:
    x, weight = drawn(seed, n)
    twice, double = np.concatenate([x, x[:1]]), weight.copy()
    double[0] *= 2
    for rule in (agg.coordinate_median(), agg.geometric_median(1e-12, 3000)):
        got = vector(rule, twice, [*weight, weight[0]])
        np.testing.assert_allclose(got, vector(rule, x, double), rtol=1e-5, atol=1e-5)


def test_the_middle_of_two_huge_values() -> None:
    x = torch.full((4, 2), 3.4e38)
    assert torch.equal(combine(agg.coordinate_median(), {"x": x}).delta["x"], x[0])
    assert torch.isfinite(combine(agg.trimmed_mean(1), {"x": x}).delta["x"]).all()


def test_the_median_of_counters() -> None:
    count = torch.tensor([1, 2, 4, 100])
    assert combine(agg.coordinate_median(), {"n": count}).delta["n"] == 3
    assert combine(agg.trimmed_mean(1), {"n": torch.tensor([1, 2, 6, 7, 9])}).delta["n"] == 5
    big = torch.tensor([2**40, 2**40 + 2])
    assert combine(agg.geometric_median(), {"n": big}).delta["n"] == 2**40 + 1


@each("bad", [-1, 1.5, "1", None, True])
def test_f_is_a_count(bad) -> None:
    with pytest.raises(ValueError, match=r"aggregate f=.*: expected a whole number from 0"):
        agg.trimmed_mean(bad)
