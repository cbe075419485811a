"""What holds for all aggregators, or for all that a minority cannot move."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partita import aggregate as agg
from reference.definitions import combine, vector
from support import each

MEDIANS = {
    "coordinate_median": agg.coordinate_median(),
    "geometric_median": agg.geometric_median(nu=1e-9),
    "smoothed_coordinate_median": agg.smoothed_coordinate_median(0.05),
    "smoothed_geometric_median": agg.smoothed_geometric_median(0.05),
    "trimmed_mean": agg.trimmed_mean(4),
    "krum": agg.krum(4),
    "multi_krum": agg.multi_krum(4, 3),
    "centered_clipping": agg.centered_clipping(2.0),
    "nnm median": agg.nnm(4, agg.coordinate_median()),
    "layerwise": agg.layerwise({"a": agg.geometric_median(nu=1e-9), "*": agg.coordinate_median()}),
}
ALL = {"mean": agg.mean(), **MEDIANS}
every = each("name", ALL)
medians = each("name", MEDIANS)
every_drawn = pytest.mark.parametrize("name", ALL)  # hypothesis draws by the name of the test
BY_COORDINATE = ("coordinate_median", "trimmed_mean", "smoothed_coordinate_median")


def rows(seed: int, n: int, d: int = 6, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, d)) * scale


seeds = st.integers(0, 2**32 - 1)
few = settings(deadline=None, max_examples=15)


def test_every_exported_aggregator_is_tested_here() -> None:
    tested = {name.split()[0] for name in ALL} | {"bucketing"}  # random: it has a file of its own
    assert tested == set(agg.__all__)


@every_drawn
@few
@given(seed=seeds, n=st.integers(1, 12), weighted=st.booleans())
def test_the_order_of_clients_does_not_matter(name, seed, n, weighted) -> None:
    rng = np.random.default_rng(seed)
    x, order = rows(seed, n), rng.permutation(n)
    weight = rng.integers(1, 5, n) if weighted else np.ones(n)
    got, again = vector(ALL[name], x, weight), vector(ALL[name], x[order], weight[order])
    if "krum" in name and n < 8:  # a single neighbour each: whoever is nearest to each other ties
        return
    np.testing.assert_allclose(again, got, rtol=1e-7, atol=1e-9)


@every_drawn
@few
@given(seed=seeds, n=st.integers(8, 14), shift=st.floats(-1e3, 1e3))
def test_a_shift_of_all_shifts_the_aggregate(name, seed, n, shift) -> None:
    x, by = rows(seed, n), shift * rows(seed + 1, 1)[0]
    np.testing.assert_allclose(vector(ALL[name], x + by), vector(ALL[name], x) + by, rtol=1e-6, atol=2e-6)


SCALED = {
    "centered_clipping": lambda s: agg.centered_clipping(2.0 * s),
    "geometric_median": lambda s: agg.geometric_median(nu=1e-9 * s),
    "layerwise": lambda s: agg.layerwise(
        {"a": agg.geometric_median(nu=1e-9 * s), "*": agg.coordinate_median()}
    ),
    "smoothed_coordinate_median": lambda s: agg.smoothed_coordinate_median(0.05 * s),
    "smoothed_geometric_median": lambda s: agg.smoothed_geometric_median(0.05 * s),
}


@every_drawn
@few
@given(seed=seeds, n=st.integers(4, 12), power=st.integers(-20, 20))
def test_scaling_all_scales_the_aggregate(name, seed, n, power) -> None:
    """Together with the options that are lengths."""
    x, s = rows(seed, n), 2.0**power
    scaled = SCALED.get(name, lambda s: ALL[name])(s)  # noqa: ARG005
    np.testing.assert_allclose(vector(scaled, s * x) / s, vector(ALL[name], x), rtol=1e-7, atol=1e-9)


@every
def test_everybody_agrees(name) -> None:
    x = np.tile(rows(0, 1), (9, 1))
    np.testing.assert_allclose(vector(ALL[name], x), x[0], rtol=1e-12)
    np.testing.assert_allclose(vector(ALL[name], x, np.arange(9)), x[0], rtol=1e-12)


@every
def test_equal_weights_are_no_weights(name) -> None:
    x = rows(0, 9)
    for equal in (7.0, 1e-300, 1e300):
        np.testing.assert_allclose(vector(ALL[name], x, [equal] * 9), vector(ALL[name], x), rtol=1e-12)


@every
def test_a_client_without_weight_is_absent(name) -> None:
    x, weight = rows(0, 9), np.array([1, 2, 0, 1, 1, 0, 3, 1, 1.0])
    weight = weight if name != "mean" else np.array([1, 1, 0, 1, 1, 0, 1, 1, 1.0])
    x[2] = 1e30
    got = vector(ALL[name], x, weight)
    np.testing.assert_allclose(got, vector(ALL[name], x[weight > 0], weight[weight > 0]), rtol=1e-12)


@every
def test_nobody_has_weight(name) -> None:
    done = combine(ALL[name], {"a": torch.ones(3, 2), "n": torch.ones(3, dtype=torch.int64)}, [0, 0, 0])
    assert not done.delta["a"].any()
    assert done.delta["a"].shape == (2,)
    assert done.delta["n"] == 0
    assert done.delta["n"].dtype == torch.int64


@every
@each("n", [1, 2, 3])
def test_few_clients(name, n) -> None:
    x = rows(1, n)
    got = vector(ALL[name], x)
    assert np.isfinite(got).all()
    assert (got >= x.min(0) - 1e-9).all()
    assert (got <= x.max(0) + 1e-9).all()


@every
def test_nothing_sent(name) -> None:
    assert combine(ALL[name], {}, [1, 1]).delta == {}
    assert combine(ALL[name], {"a": torch.zeros(3, 0)}).delta["a"].shape == (0,)


@every
@each("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_types_and_shapes_are_kept(name, dtype) -> None:
    g = torch.Generator().manual_seed(0)
    deltas = {
        "a": torch.randn(9, 3, 2, generator=g).to(dtype),
        "scalar": torch.randn(9, generator=g).to(dtype),
        "count": torch.tensor([-5, -7, -5, -6, -5, -4, -5, -5, -5]),
        "turned": torch.randn(4, 9, generator=g).to(dtype).t(),
    }
    before = {k: d.clone() for k, d in deltas.items()}
    done = combine(ALL[name], deltas)
    for k, d in deltas.items():
        assert done.delta[k].dtype == d.dtype
        assert done.delta[k].shape == d.shape[1:]
        assert torch.equal(d, before[k])
    assert -7 <= int(done.delta["count"]) <= -4
    assert all(isinstance(v, torch.Tensor) for v in done.notes.values())


def test_counters_are_no_part_of_a_distance() -> None:
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    count = torch.tensor([10**6, 1, 1, 1, 1, 1, 10**9])
    alone = combine(agg.krum(2), {"a": x}).notes["chosen"]
    assert combine(agg.krum(2), {"a": x, "n": count}).notes["chosen"] == alone


# ---- a minority of attackers


@pytest.mark.parametrize("name", MEDIANS)
@few
@given(
    seed=seeds,
    n=st.integers(11, 15),
    size=st.sampled_from([1e3, 1e12, 1e30, 1e38]),
    dtype=st.sampled_from([np.float32, np.float64]),
    mixed=st.booleans(),
)
def test_a_minority_does_not_carry_it_away(name, seed, n, size, dtype, mixed) -> None:
    rng = np.random.default_rng(seed)
    x = rows(seed, n)
    bad = rng.permutation(n)[:4]
    sign = rng.choice([-1, 1], size=(4, x.shape[1])) if mixed else 1
    x[bad] = sign * size * rng.uniform(0.5, 1, size=(4, x.shape[1]))
    x = x.astype(dtype)
    honest = np.delete(x, bad, axis=0).astype(float)
    got = vector(MEDIANS[name], x).astype(float)
    assert np.isfinite(got).all()
    if name in BY_COORDINATE:
        slack = 0.05 + 1e-6 if name.startswith("smoothed") else 1e-6
        assert (got >= honest.min(0) - slack).all()
        assert (got <= honest.max(0) + slack).all()
    spread = max(np.linalg.norm(a - b) for a in honest for b in honest)
    assert np.linalg.norm(got - honest.mean(0)) <= 4 * spread


@each("size", [1e12, 1e30])
@each("name", ["coordinate_median", "geometric_median", *SCALED])
def test_just_less_than_half(name, size) -> None:
    x = rows(3, 21)
    x[:10] = size
    got = vector(MEDIANS[name], x.astype(np.float32)).astype(float)
    apart = np.linalg.norm(got - x[10:], axis=1).max()
    assert apart < 25 * np.linalg.norm(x[10:], axis=1).max()
    if name == "coordinate_median":
        assert (got <= x[10:].max(0).astype(np.float32)).all()


@each("name", [k for k in MEDIANS if k != "centered_clipping"])
def test_squares_that_float64_cannot_hold(name) -> None:
    x = rows(3, 11)
    x[:3] = 1e300
    got = vector(MEDIANS[name], x)
    assert np.isfinite(got).all()
    assert np.abs(got).max() < 10


@medians
def test_weight_of_attackers_counts(name) -> None:
    """Two clients with most of the weight carry away what goes by weight, and not what goes by number."""
    x, weight = rows(5, 11), np.ones(11)
    x[:2], weight[:2] = 1e6, 100
    got = np.abs(vector(MEDIANS[name], x, weight)).max()
    by_number = ("trimmed_mean", "krum", "multi_krum")
    assert got < 10 if name in by_number else got > 10


# ---- precision


@every
def test_float64_stays_precise(name) -> None:
    """Far from zero: what float32 cannot tell apart. Options that are lengths and limits are made small."""
    x = rows(7, 9) + 1e3
    exact = {"geometric_median": agg.geometric_median(1e-15, 5000, 1e-9)}.get(name, ALL[name])
    shifted = vector(exact, x) - 1e3
    near = vector(exact, x - 1e3)
    tolerance = 2e-6 if "smoothed" in name or name == "layerwise" else 2e-12
    np.testing.assert_allclose(shifted, near, rtol=0, atol=1e3 * tolerance)


@every
def test_float32_agrees_with_float64(name) -> None:
    x = rows(7, 9).astype(np.float32)
    np.testing.assert_allclose(vector(ALL[name], x), vector(ALL[name], x.astype(float)), rtol=1e-4, atol=1e-5)


@every
def test_threads_do_not_change_it(name) -> None:
    g = torch.Generator().manual_seed(0)
    deltas = {"a": torch.randn(9, 5000, generator=g), "b": torch.randn(9, 3, 1500, generator=g)}
    one = combine(ALL[name], deltas)
    try:
        torch.set_num_threads(3)
        several = combine(ALL[name], deltas)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)
    if name == "mean":
        torch.testing.assert_close(several.delta, one.delta)
    else:
        assert all(torch.equal(several.delta[k], one.delta[k]) for k in deltas)
        assert several.notes.keys() == one.notes.keys()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@every
def test_a_gpu_finds_the_same(name) -> None:
    x = torch.randn(9, 5000, generator=torch.Generator().manual_seed(0))
    weight = torch.arange(1.0, 10, dtype=torch.float64)
    here = ALL[name].combine({"x": x}, weight, torch.tensor(0)).delta["x"]
    there = ALL[name].combine({"x": x.cuda()}, weight.cuda(), torch.tensor(0, device="cuda")).delta["x"]
    torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-5)
