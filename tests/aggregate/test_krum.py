"""Krum, Multi-Krum and centered clipping by their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partita import aggregate as agg
from partita.aggregate.gram import products, squared_distances
from partita.aggregate.stack import present
from reference import definitions as plain
from reference.definitions import combine, vector
from support import each

few = settings(deadline=None, max_examples=40)
seeds = st.integers(0, 2**32 - 1)


@few
@given(seed=seeds, n=st.integers(3, 12), f=st.integers(0, 8), m=st.integers(1, 5), far=st.floats(0, 1e4))
def test_krum(seed, n, f, m, far) -> None:
    rng = np.random.default_rng(seed)
    x, weight = rng.normal(size=(n, 5)) + far, rng.integers(1, 5, n)
    used = min(f, n - 3)
    scores = plain.krum_scores(x, used)
    one = combine(agg.krum(f), {"x": x}, weight)
    assert scores[int(one.notes["chosen"])] <= scores.min() * (1 + 1e-6)
    assert int(one.notes["f"]) == used
    np.testing.assert_array_equal(one.delta["x"], x[int(one.notes["chosen"])])
    several = combine(agg.multi_krum(f, m), {"x": x}, weight)
    chosen = several.notes["chosen"].numpy()
    assert len(set(chosen)) == int(several.notes["m"]) == min(m, n)
    assert scores[chosen].max() <= np.sort(scores)[min(m, n) - 1] * (1 + 1e-6)
    expected = np.average(x[chosen], axis=0, weights=weight[chosen])
    np.testing.assert_allclose(several.delta["x"], expected, rtol=1e-12)


@pytest.mark.parametrize("n", [1, 2])
def test_krum_of_one_or_two(n) -> None:
    x = np.arange(3.0 * n).reshape(n, 3)
    np.testing.assert_array_equal(vector(agg.krum(1), x), x[0])


def test_the_chosen_are_numbers_among_all_clients() -> None:
    x = np.random.default_rng(0).normal(size=(7, 3))
    x[[4, 6]] = x[5] + 1e-3
    done = combine(agg.krum(1), {"x": x}, [0, 0, 1, 1, 1, 1, 1])
    assert int(done.notes["chosen"]) in (4, 5, 6)


def test_attackers_that_agree_with_each_other() -> None:
    """Fewer than the neighbours that count: a distance of zero does not help them, however far they are."""
    for far in (1e3, 1e19, 1e30, 3e38):
        x = torch.randn(12, 50, generator=torch.Generator().manual_seed(0))
        x[:4] = far
        done = combine(agg.multi_krum(4, 5), {"x": x})
        assert done.notes["chosen"].min() >= 4
        assert done.delta["x"].abs().max() < 5


def test_close_clients_far_from_zero() -> None:
    """Distances of 1e-3 at 1e3: their squares are 1e-12 of those of the deltas."""
    x = 1e3 + 1e-3 * torch.randn(9, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for rows in (x, x.float()):
        done = combine(agg.krum(2), {"x": rows})
        assert int(done.notes["chosen"]) == plain.krum_scores(rows.double().numpy(), 2).argmin()


@each("case", ["apart", "far from zero", "huge", "some agree", "some absent"])
def test_distances_are_exact_whichever_way_they_are_found(case) -> None:
    x = torch.randn(9, 9000, generator=torch.Generator().manual_seed(0))
    weight = torch.ones(9)
    if case == "far from zero":
        x += 100
    elif case == "huge":
        x[2] *= 1e25
    elif case == "some agree":
        x[[1, 3, 4]] = x[1] + 1e-3 * x[[1, 3, 4]]
    elif case == "some absent":
        x[[1, 3, 4]], weight[[0, 2]] = x[1] + 1e-3 * x[[1, 3, 4]], 0
    exact = x[weight > 0].double()
    apart = squared_distances(products(present({"x": x}, weight)))
    torch.testing.assert_close(apart, squared_distances(exact @ exact.t()), rtol=1e-6, atol=0)


@few
@given(seed=seeds, n=st.integers(1, 12), tau=st.floats(0.01, 10), steps=st.integers(1, 6))
def test_centered_clipping(seed, n, tau, steps) -> None:
    rng = np.random.default_rng(seed)
    x, weight = rng.normal(size=(n, 5)), rng.integers(1, 5, n)
    expected = plain.clipped(x, weight, tau, steps, plain.weighted_median(x, weight))
    np.testing.assert_allclose(
        vector(agg.centered_clipping(tau, steps), x, weight), expected, rtol=1e-9, atol=1e-12
    )


def test_clipping_nothing_is_the_mean() -> None:
    x = np.random.default_rng(0).normal(size=(7, 3))
    np.testing.assert_allclose(vector(agg.centered_clipping(1e9, 1), x), x.mean(0), rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_are_as_far_apart_either_way(dtype) -> None:
    """To the last bit: of two who are each other's only neighbours the first is chosen, on every machine."""
    x = {"a": torch.randn(3, 17, generator=torch.Generator().manual_seed(1)).to(dtype)}
    x["a"][2] += 100
    weight = torch.ones(3, dtype=torch.float64)
    for size in (3, 40):
        many = torch.randn(size, 1234, dtype=dtype, generator=torch.Generator().manual_seed(size))
        g = products(present({"a": many}, torch.ones(size).double()))
        assert torch.equal(g, g.T)
    for order in ([0, 1, 2], [1, 0, 2], [2, 1, 0]):
        chosen = int(agg.krum(0).combine({"a": x["a"][order]}, weight, torch.tensor(0)).notes["chosen"])
        assert chosen == min(order.index(0), order.index(1))
