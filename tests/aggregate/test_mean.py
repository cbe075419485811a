"""The weighted mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import partita as pt


def combine(deltas, weight):
    weights = torch.as_tensor(weight, dtype=torch.float64)
    return pt.aggregate.mean().combine(deltas, weights, torch.tensor(0)).delta


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_against_numpy(dtype) -> None:
    rng = np.random.default_rng(0)
    deltas = {"a": rng.normal(size=(5, 3, 2)), "b": rng.normal(size=5)}
    weight = rng.integers(1, 100, 5)
    got = combine({k: torch.as_tensor(d, dtype=dtype) for k, d in deltas.items()}, weight)
    for k, d in deltas.items():
        expected = np.average(d, axis=0, weights=weight)
        assert got[k].dtype == dtype
        np.testing.assert_allclose(got[k].numpy(), expected, rtol=1e-5, atol=1e-6)


def test_only_ratios_of_weights_count() -> None:
    d = {"a": torch.randn(3, 4, generator=torch.Generator().manual_seed(0))}
    torch.testing.assert_close(combine(d, [1, 2, 3])["a"], combine(d, [1e9, 2e9, 3e9])["a"])


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_weights_of_any_type(dtype) -> None:
    d = {"a": torch.randn(3, 4, generator=torch.Generator().manual_seed(0))}
    weight = torch.tensor([1, 2, 3], dtype=dtype)
    got = pt.aggregate.mean().combine(d, weight, torch.tensor(0)).delta["a"]
    torch.testing.assert_close(got, combine(d, [1, 2, 3])["a"])


def test_a_weight_of_zero_counts_for_nothing() -> None:
    d = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(combine({"a": d}, [2, 0, 1])["a"], (2 * d[0] + d[2]) / 3)


def test_nobody_has_weight() -> None:
    got = combine({"a": torch.ones(2, 3), "n": torch.ones(2, dtype=torch.int64)}, [0, 0])
    assert not got["a"].any()
    assert torch.isfinite(got["a"]).all()
    assert got["n"] == 0


def test_one_client() -> None:
    d = torch.randn(1, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(combine({"a": d}, [7])["a"], d[0])


def test_counters_stay_whole_numbers() -> None:
    steps = torch.tensor([-3, -4, -10])
    got = combine({"n": steps}, [1, 1, 1])["n"]
    assert got.dtype == torch.int64
    assert got == -6  # 17/3 rounded
    large = torch.tensor([2**40, 2**40 + 2])
    assert combine({"n": large}, [1, 1])["n"] == 2**40 + 1
    assert combine({"flag": torch.tensor([[4, 0], [0, 4]], dtype=torch.int32)}, [3, 1])["flag"].tolist() == [
        3,
        1,
    ]


def test_nothing_sent() -> None:
    assert combine({}, [1, 2]) == {}


def _data(sizes) -> pt.data.FederatedData:
    g = torch.Generator().manual_seed(0)
    n = sum(sizes)
    x, y = torch.randn(n, 4, generator=g), torch.randint(0, 2, (n,), generator=g)
    ends = np.cumsum(sizes)
    return pt.data.FederatedData.make(x, y, [(e - s, s) for e, s in zip(ends, sizes)])


def _after_one_step(sizes, weighting) -> dict[str, torch.Tensor]:
    method = pt.fedavg(lr=0.5, weighting=weighting)
    run = pt.federate(
        pt.models.logistic(4, 2), _data(sizes), method, rounds=1, executor="loop", baselines=False
    )
    return run.shared


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_weights_of_a_round(weighting) -> None:
    """One full-batch step from the same model: the mean of the gradients with the chosen weights."""
    sizes = [6, 2, 9]
    got = _after_one_step(sizes, weighting)
    model, data = pt.models.logistic(4, 2), _data(sizes)
    share = torch.tensor(sizes if weighting == "samples" else [1, 1, 1], dtype=torch.float64)
    share /= share.sum()
    total = sum(
        s * torch.nn.functional.cross_entropy(model(x), y)
        for s, (x, y) in zip(share, (data.client(i) for i in range(3)))
    )
    gradient = torch.autograd.grad(total, list(model.parameters()))
    for (k, p), g in zip(model.named_parameters(), gradient):
        torch.testing.assert_close(got[k], p - 0.5 * g)


def test_an_empty_client_does_not_pull_under_samples() -> None:
    """Its delta is zero: with weights by samples the others are as without it."""
    alone, beside = _after_one_step([5, 4], "samples"), _after_one_step([5, 4, 0], "samples")
    for k in alone:
        torch.testing.assert_close(alone[k], beside[k], rtol=1e-6, atol=1e-7)
