"""Fed+'s smoothed medians: fixed points of the paper's iteration, between the mean and the median."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita import aggregate as agg
from reference import definitions as plain
from reference.definitions import combine, vector
from support import each

few = settings(deadline=None, max_examples=25)
seeds = st.integers(0, 2**32 - 1)
BOTH = {
    "geometric": (agg.smoothed_geometric_median, plain.shrunk),
    "coordinate": (agg.smoothed_coordinate_median, plain.soft),
}
both = each("kind", BOTH)


def iterated(x, weight, delta, prox, steps) -> np.ndarray:
    """The paper's iteration as it is written."""
    mean = np.average(x, axis=0, weights=weight)
    w = mean
    for _ in range(steps):
        w = mean - np.average(prox(x - w, delta), axis=0, weights=weight)
    return w


@both
@few
@given(seed=seeds, n=st.integers(1, 11), delta=st.floats(0.05, 5), weighted=st.booleans())
def test_a_fixed_point(kind, seed, n, delta, weighted) -> None:
    rng = np.random.default_rng(seed)
    x, weight = rng.normal(size=(n, 4)), rng.integers(1, 5, n) if weighted else np.ones(n)
    rule, prox = BOTH[kind]
    w = vector(rule(delta, tolerance=1e-9, iterations=3000), x, weight)
    theta = prox(x - w, delta)
    again = np.average(x, axis=0, weights=weight) - np.average(theta, axis=0, weights=weight)
    np.testing.assert_allclose(again, w, rtol=0, atol=1e-7 * delta)


@both
@each("steps", [1, 2, 7])
def test_the_iteration_of_the_paper(kind, steps) -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(9, 4)), np.arange(1, 10)
    rule, prox = BOTH[kind]
    # the tolerance that makes it stop after just so many steps
    far = [iterated(x, weight, 0.5, prox, k) for k in range(steps + 1)]
    length = np.linalg.norm if kind == "geometric" else lambda v: np.abs(v).max()
    moved = length(far[steps] - far[steps - 1]) / 0.5
    done = combine(rule(0.5, tolerance=moved * (1 + 1e-9)), {"x": x}, weight)
    assert int(done.notes["iterations"]) == steps
    np.testing.assert_allclose(float(done.notes["moved"]), moved, rtol=1e-6)
    np.testing.assert_allclose(done.delta["x"], far[steps], rtol=1e-9, atol=1e-12)


@both
def test_a_large_delta_is_the_mean(kind) -> None:
    x = np.random.default_rng(0).normal(size=(8, 4))
    done = combine(BOTH[kind][0](1e3), {"x": x})
    np.testing.assert_allclose(done.delta["x"], x.mean(0), rtol=1e-9, atol=1e-12)
    assert int(done.notes["iterations"]) == 1


@both
def test_a_small_delta_is_the_median(kind) -> None:
    x = np.random.default_rng(0).normal(size=(9, 4))
    exact = np.median(x, axis=0) if kind == "coordinate" else plain.weiszfeld(x, np.ones(9), 1e-9)
    apart = [np.abs(vector(BOTH[kind][0](d), x) - exact).max() for d in (2.0, 0.5, 0.005)]
    assert apart[0] > max(apart[1:])
    assert apart[2] < 0.006


@both
@each("far", [1e12, 1e30])
def test_when_steps_of_delta_do_not_lead_back(kind, far) -> None:
    """From the mean it would take 10¹³ steps; the fixed point is found all the same."""
    x = np.random.default_rng(0).normal(size=(9, 4))
    x[:4] = far
    done = combine(BOTH[kind][0](0.1), {"x": x})
    assert float(done.notes["moved"]) <= 1e-6
    many = int(done.notes["iterations"])
    assert many > 1000 if kind == "geometric" else many < 1000  # which begins at the median at once
    w = done.delta["x"].numpy()
    x[:4] = 1e6  # the same direction, near enough for the arithmetic of the test
    step = (x - w) - BOTH[kind][1](x - w, 0.1)
    assert np.abs(step.mean(0)).max() < 1e-6


@pytest.mark.parametrize("n", [40, 41])
def test_outliers_cost_few_steps(n) -> None:
    """A quarter at 10⁶: the coordinate's iteration begins at the median."""
    x = np.random.default_rng(0).normal(size=(n, 50))
    x[:10] = 1e6
    for delta in (0.01, 0.1, 1.0):
        done = combine(agg.smoothed_coordinate_median(delta), {"x": x})
        assert float(done.notes["moved"]) <= 1e-6
        assert int(done.notes["iterations"]) < 300
        w = done.delta["x"].numpy()
        assert ((x[10:].min(0) < w) & (w < x[10:].max(0))).all()


def test_the_cap_is_kept_and_reported() -> None:
    x = np.random.default_rng(0).normal(size=(9, 4))
    done = combine(agg.smoothed_coordinate_median(0.01, tolerance=0.0, iterations=4), {"x": x})
    assert int(done.notes["iterations"]) == 8  # four from the mean, four from the median
    assert float(done.notes["moved"]) > 0


@both
@each("wrong", [0, -1.0, "1", None])
def test_delta_is_above_zero(kind, wrong) -> None:
    with pytest.raises(ValueError, match=r"aggregate delta=.*: expected a number above 0"):
        BOTH[kind][0](wrong)
