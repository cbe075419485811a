"""Aggregators of aggregators: bucketing, nearest-neighbour mixing, layerwise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partita import aggregate as agg
from partita.core.parts import Aggregator, Combined
from reference import definitions as plain
from reference.definitions import combine, vector
from support import each

few = settings(deadline=None, max_examples=30)
seeds = st.integers(0, 2**32 - 1)
ALSO = [agg.coordinate_median(), agg.trimmed_mean(1), agg.geometric_median(), agg.krum(1), agg.mean()]


def seen() -> tuple[Aggregator, list]:
    """An aggregator that remembers what it was given."""
    given: list = []

    def keep(deltas, weight, key) -> Combined:  # noqa: ARG001
        given.append((deltas, weight))
        return Combined({k: d[0] for k, d in deltas.items()}, {"n": torch.tensor(len(weight))})

    return Aggregator("seen", keep, {}), given


# ---- bucketing


@few
@given(seed=seeds, n=st.integers(1, 12), s=st.integers(1, 14))
def test_buckets(seed, n, s) -> None:
    rng = np.random.default_rng(seed)
    x, weight = rng.normal(size=(n, 4)), rng.integers(0, 4, n)
    weight[0] = 1
    inner, given = seen()
    done = combine(agg.bucketing(s, inner), {"x": x}, weight, key=seed)
    present = int((weight > 0).sum())
    rows, sums = given[0][0]["x"].numpy(), given[0][1].numpy()
    assert len(rows) == int(done.notes["buckets"]) == int(done.notes["inner.n"]) == -(-present // s)
    np.testing.assert_allclose(sums.sum(), 1)
    np.testing.assert_allclose(np.average(rows, axis=0, weights=sums), np.average(x, axis=0, weights=weight))
    if present % s == 0 and len(set(weight[weight > 0])) == 1:
        np.testing.assert_allclose(sums, 1 / len(rows))


@each("inner", ALSO, ids=lambda a: a.name)
def test_buckets_of_one_are_the_clients(inner) -> None:
    x, weight = np.random.default_rng(0).normal(size=(9, 4)), np.arange(1, 10)
    np.testing.assert_allclose(
        vector(agg.bucketing(1, inner), x, weight), vector(inner, x, weight), rtol=1e-9, atol=1e-12
    )


def test_one_bucket_is_the_mean() -> None:
    x = np.random.default_rng(0).normal(size=(9, 4))
    np.testing.assert_allclose(vector(agg.bucketing(20, agg.krum(2)), x), x.mean(0), rtol=1e-12)


def test_buckets_are_others_in_every_round_and_the_same_for_a_key() -> None:
    x = np.random.default_rng(0).normal(size=(9, 4))
    rule = agg.bucketing(2, agg.coordinate_median())
    assert len({vector(rule, x, key=k).tobytes() for k in range(20)}) > 10
    np.testing.assert_array_equal(vector(rule, x, key=5), vector(rule, x, key=5))


def test_everybody_shares_a_bucket_with_everybody_equally_often() -> None:
    inner, given = seen()
    x = np.eye(6)
    for k in range(600):
        combine(agg.bucketing(2, inner), {"x": x}, key=k)
    together = sum((d["x"].T @ (d["x"] > 0).double()).numpy() for d, _ in given)
    pairs = 2 * together[~np.eye(6, dtype=bool)] / 600
    assert np.abs(pairs - 1 / 5).max() < 0.07


# ---- nearest-neighbour mixing


@few
@given(seed=seeds, n=st.integers(1, 12), f=st.integers(0, 14))
def test_mixing(seed, n, f) -> None:
    rng = np.random.default_rng(seed)
    x, weight = rng.normal(size=(n, 4)), rng.integers(1, 4, n)
    inner, given = seen()
    done = combine(agg.nnm(f, inner), {"x": x}, weight)
    used = min(f, n - 1)
    assert int(done.notes["f"]) == used
    np.testing.assert_allclose(given[0][0]["x"], plain.neighbours(x, used, weight), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(given[0][1], weight / weight.sum())


def test_without_faults_everybody_is_the_mean() -> None:
    x, weight = np.random.default_rng(0).normal(size=(9, 4)), np.arange(1, 10)
    for inner in ALSO:
        got = vector(agg.nnm(0, inner), x, weight)
        np.testing.assert_allclose(got, np.average(x, axis=0, weights=weight), rtol=1e-6)


@each("far", [1e12, 1e30, 3e38])
def test_honest_clients_do_not_mix_with_attackers(far) -> None:
    x = torch.randn(11, 30, generator=torch.Generator().manual_seed(0))
    x[:4] = far
    inner, given = seen()
    combine(agg.nnm(4, inner), {"x": x})
    torch.testing.assert_close(given[0][0]["x"][4:], x[4:].mean(0).expand(7, 30))


def test_mixtures_of_counters_are_rounded_once() -> None:
    """Buckets of (0, 1) and (0, 1) are halves; rounded there, their mean would be 0."""
    rule = agg.bucketing(2, agg.mean())
    assert combine(rule, {"n": torch.tensor([0, 1, 1, 1])}).delta["n"] == 1
    assert combine(agg.nnm(0, agg.krum(1)), {"n": torch.tensor([0, 1, 1, 1])}).delta["n"] == 1


@each("wrong", [None, "krum", agg.krum, 3])
def test_inner_is_an_aggregator(wrong) -> None:
    for make in (agg.bucketing, agg.nnm):
        with pytest.raises(ValueError, match=r"aggregate inner=.*: expected an aggregator such as"):
            make(2, wrong)


# ---- layerwise


def layers() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"conv.weight": (3, 2), "conv.bias": (3,), "fc.weight": (4, 3), "fc.bias": ()}
    return {k: torch.randn(9, *s, generator=g) for k, s in shapes.items()}


def test_layerwise_is_each_on_its_own() -> None:
    x, weight = layers(), np.arange(9)
    done = combine(agg.layerwise({"fc.*": agg.krum(2), "*": agg.trimmed_mean(1)}), x, weight)
    fc = combine(agg.krum(2), {k: x[k] for k in ("fc.weight", "fc.bias")}, weight)
    conv = combine(agg.trimmed_mean(1), {k: x[k] for k in ("conv.weight", "conv.bias")}, weight)
    assert list(done.delta) == list(x)
    for k, v in (fc.delta | conv.delta).items():
        assert torch.equal(done.delta[k], v)
    assert set(done.notes) == {"fc.*.f", "fc.*.chosen", "*.f"}


def test_the_first_pattern_counts() -> None:
    x = layers()
    rule = agg.layerwise({"conv.bias": agg.krum(1), "conv.*": agg.mean(), "*": agg.coordinate_median()})
    got = combine(rule, x).delta
    assert torch.equal(got["conv.weight"], combine(agg.mean(), x).delta["conv.weight"])
    assert (x["conv.bias"] == got["conv.bias"]).all(1).any()


def test_a_name_that_no_pattern_matches() -> None:
    with pytest.raises(
        ValueError, match=r"'fc\.weight': expected one that matches 'conv\.\*'.*takes the rest"
    ):
        combine(agg.layerwise({"conv.*": agg.mean()}), layers())


@each("wrong", [None, {}, [], {"a": 1}, {1: agg.mean()}, agg.mean(), {"a": agg.mean}])
def test_patterns_are_a_dictionary_of_aggregators(wrong) -> None:
    with pytest.raises(ValueError, match=r"^aggregate patterns.*: expected"):
        agg.layerwise(wrong)


def test_all_of_them_at_once() -> None:
    inner = agg.nnm(1, agg.layerwise({"conv*": agg.trimmed_mean(1), "*": agg.geometric_median()}))
    done = combine(agg.bucketing(2, inner), layers())
    assert "inner.inner.conv*.f" in done.notes
    assert all(torch.isfinite(v).all() for v in done.delta.values())
