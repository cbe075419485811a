"""Synthetic problems: their shapes, their sizes and what each client's samples are drawn from."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from partita.data import FederatedData, synthetic, synthetic_regression


def rows(data: FederatedData, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All samples of a client, training and test."""
    parts = [data.client(i, split) for split in ("train", "test")]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def test_synthetic_has_the_shapes_and_sizes_of_the_paper() -> None:
    data = synthetic(1000, 10, validation=0)
    sizes = data.sizes() + data.sizes("test")
    assert data.clients == 30
    assert data.x.dtype == torch.float32
    assert data.x.shape[1:] == (60,)
    assert data.y.dtype == torch.int64
    assert set(data.y.tolist()) <= set(range(10))
    assert sizes.min() >= 50
    assert sizes.max() > 5 * np.median(sizes)
    assert np.abs(data.sizes("test") / sizes - 0.2).max() < 0.01
    assert data.source == {
        "name": "synthetic",
        "zeta": 1000,
        "beta": 10,
        "clients": 30,
        "features": 60,
        "classes": 10,
        "test": 0.2,
        "seed": 0,
    }
    assert json.dumps(data.source)


def test_synthetic_follows_its_seed_and_keeps_its_first_clients() -> None:
    one, few = synthetic(1, 1, 6, seed=3), synthetic(1, 1, 4, seed=3)
    assert one.fingerprint() == synthetic(1, 1, 6, seed=3).fingerprint()
    assert one.fingerprint() != synthetic(1, 1, 6, seed=4).fingerprint()
    assert one.subset(range(4)).fingerprint() == few.fingerprint()


def test_beta_moves_the_inputs_and_zeta_leaves_the_labels() -> None:
    near, far = (synthetic(0, beta, 40, features=4) for beta in (0, 10))
    spread = [np.std([rows(data, i)[0].mean().item() for i in range(40)]) for data in (near, far)]
    assert spread[0] < 1
    assert 7 < spread[1] < 13
    assert torch.equal(synthetic(0, 1, 5).y, synthetic(1000, 1, 5).y)


def test_inputs_have_their_deviations() -> None:
    data = synthetic(0, 0, 30, features=5)
    largest = int(data.sizes().argmax())
    assert np.allclose(rows(data, largest)[0].std(0), np.arange(1, 6) ** -0.6, rtol=0.1)


def test_regression_has_the_shapes_of_the_paper() -> None:
    data = synthetic_regression(validation=0)
    assert data.clients == 10
    assert data.sizes().tolist() == data.sizes("test").tolist() == [50] * 10
    assert data.x.shape == (1000, 1000)
    assert data.y.shape == (1000, 1)
    assert data.x.dtype == data.y.dtype == torch.float32
    assert torch.isfinite(data.x).all()
    assert data.source["name"] == "synthetic_regression"
    assert json.dumps(data.source)
    assert data.fingerprint() == synthetic_regression(validation=0).fingerprint()
    assert data.fingerprint() != synthetic_regression(seed=1).fingerprint()


def test_regression_is_linear_and_its_last_client_is_an_outlier() -> None:
    data = synthetic_regression(4, features=60, samples=2000, seed=1)
    weights = []
    for i in range(4):
        x, y = (t.double().numpy() for t in rows(data, i))
        w = np.linalg.lstsq(x, y[:, 0], rcond=None)[0]
        assert abs(np.var(y[:, 0] - x @ w) - 2) < 0.3
        weights.append(w)
    apart = [np.std(weights[0] - w) for w in weights]
    assert max(apart[1], apart[2]) < 2 < 5 < apart[3]


def test_regression_has_its_deviations_and_no_division_by_zero() -> None:
    x, _ = rows(synthetic_regression(2, features=100, samples=4000), 0)
    expected = np.array([*range(1, 51), *range(1, 51)]) ** -0.55
    assert np.allclose(x.std(0), expected, rtol=0.08)
    assert np.allclose(x.mean(0), float(x.mean()), atol=0.1)  # one mean for all features


def test_refusals() -> None:
    with pytest.raises(ValueError, match="zeta=-1"):
        synthetic(-1, 1)
    with pytest.raises(ValueError, match="beta='1'"):
        synthetic(1, "1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="clients=0"):
        synthetic(1, 1, 0)
    with pytest.raises(ValueError, match="classes=1"):
        synthetic(1, 1, classes=1)
    with pytest.raises(ValueError, match="seed=-1"):
        synthetic(1, 1, seed=-1)
    with pytest.raises(ValueError, match="samples=0"):
        synthetic_regression(samples=0)
    with pytest.raises(ValueError, match="features=0"):
        synthetic_regression(features=0)
    with pytest.raises(ValueError, match="test=1"):
        synthetic_regression(test=1)
