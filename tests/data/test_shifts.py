"""Shifts touch all rows of a client alike and leave the original alone."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from partita.data import (
    FederatedData,
    from_arrays,
    negative,
    noise,
    rotation,
    standard,
)


def images(clients: int = 8, dtype: type = np.uint8, rows: int = 5) -> FederatedData:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (clients * rows, 6, 6), dtype=np.uint8)
    x = x if dtype is np.uint8 else (x / 255).astype(dtype)
    y = np.arange(len(x)) % 3
    return from_arrays(x, y, np.arange(len(x)) % clients)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_rotation_turns_client_by_client(dtype: type) -> None:
    data = images(dtype=dtype)
    before = data.x.clone()
    turned = data.shift(rotation())
    for i in range(data.clients):
        for split in ("train", "test"):
            x, y = data.client(i, split)
            assert torch.equal(turned.client(i, split)[0], torch.rot90(x, i % 4, dims=(-2, -1)))
            assert torch.equal(turned.client(i, split)[1], y)
    assert torch.equal(data.x, before)
    assert turned.x.dtype == data.x.dtype
    assert turned.source["shift"] == [{"name": "rotation", "degrees": [0, 90, 180, 270], "seed": 0}]
    assert json.dumps(turned.source)


def test_other_angles_are_close_to_the_quarters_beside_them() -> None:
    y, x = np.mgrid[:21, :21] / 20
    smooth = from_arrays(np.stack([x + y * y] * 4).astype(np.float32) / 2, np.zeros(4), np.zeros(4, int))
    near, exact = (smooth.shift(rotation((angle,))).x[:, 5:-5, 5:-5] for angle in (89.9, 90))
    assert torch.allclose(near, exact, atol=0.01)
    half = images().shift(rotation((45,)))
    assert half.x.dtype == torch.uint8


def test_colour_images_turn_in_the_plane() -> None:
    x = np.arange(2 * 3 * 4 * 4, dtype=np.uint8).reshape(2, 3, 4, 4)
    data = from_arrays(x, [0, 1], [0, 1])
    turned = data.shift(rotation((90,)))
    assert torch.equal(turned.x[0, 1], torch.rot90(data.x[0, 1]))


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_negative_for_a_fraction(dtype: type) -> None:
    data = images(dtype=dtype)
    shifted = data.shift(negative(0.25), seed=3)
    changed = [not torch.equal(data.client(i)[0], shifted.client(i)[0]) for i in range(data.clients)]
    assert sum(changed) == 2
    i = changed.index(True)
    for split in ("train", "test"):
        assert torch.allclose(shifted.client(i, split)[0], 1 - data.client(i, split)[0])
    assert shifted.fingerprint() == data.shift(negative(0.25), seed=3).fingerprint()
    assert torch.equal(data.shift(negative(0)).x, data.x)


def test_standardised_images_and_their_negatives() -> None:
    data = images()
    shifted = data.shift(standard(0.5, 0.25))
    assert shifted.x.dtype == torch.float32
    assert torch.allclose(shifted.x, (data.x.float() / 255 - 0.5) / 0.25)
    assert torch.allclose(shifted.shift(negative(1, centre=0)).x, -shifted.x)
    assert torch.allclose(data.shift(negative(1, centre=0)).x, -data.x.float() / 255)
    assert shifted.source["shift"] == [{"name": "standard", "mean": 0.5, "deviation": 0.25, "seed": 0}]


@pytest.mark.parametrize(("kind", "deviation"), [("gaussian", 0.5), ("laplace", 0.5 * 2**0.5)])
def test_noise_has_its_scale(kind: str, deviation: float) -> None:
    data = images(clients=2, rows=200)
    shifted = data.shift(noise(0.5, kind))
    assert shifted.x.dtype == torch.float32
    difference = shifted.x - data.x.float() / 255
    assert abs(float(difference.std()) - deviation) < 0.02
    assert abs(float(difference.mean())) < 0.02


def test_noise_grows_and_differs_between_clients() -> None:
    data = images(clients=4, rows=100)
    shifted = data.shift(noise(0.4, growing=True))
    deviations = [float((shifted.client(i)[0] - data.client(i)[0]).std()) for i in range(4)]
    assert np.allclose(deviations, [0.1, 0.2, 0.3, 0.4], atol=0.02)
    one, two = (shifted.client(i)[0] - data.client(i)[0] for i in (0, 1))
    assert abs(float((one[:70] * two[:70]).mean())) < 0.001


def test_noise_on_some_classes_only() -> None:
    data = images(clients=5, rows=30)
    shifted = data.shift(noise(1.0, "laplace", classes=2))
    for i in range(5):
        noisy = {}
        for split in ("train", "test"):
            x, y = data.client(i, split)
            changed = (shifted.client(i, split)[0] != x).flatten(1).all(1)
            for label in y.unique().tolist():
                noisy.setdefault(label, set()).update(changed[y == label].tolist())
        assert all(len(v) == 1 for v in noisy.values())
        assert sum(v == {True} for v in noisy.values()) == 2


def test_float64_and_empty_clients_pass() -> None:
    data = FederatedData.make(torch.zeros(3, 2, dtype=torch.float64), np.zeros(3), [(0, 3), (3, 0)])
    assert data.shift(noise(1.0)).x.dtype == torch.float64


def test_shifts_add_up() -> None:
    data = images().shift(negative(0.5)).shift(rotation())
    assert [s["name"] for s in data.source["shift"]] == ["negative", "rotation"]


def test_shared_rows_are_refused() -> None:
    data = FederatedData.make(np.ones((4, 2, 2)), np.zeros(4), [(0, 3), (2, 2)])
    with pytest.raises(ValueError, match=r"rotation.*: some rows belong to several clients"):
        data.shift(rotation())


def test_refusals() -> None:
    flat = from_arrays(np.ones((4, 9)), np.zeros(4), np.zeros(4, int))
    with pytest.raises(ValueError, match="shape of x"):
        flat.shift(rotation())
    with pytest.raises(ValueError, match="square images"):
        from_arrays(np.ones((4, 2, 3)), np.zeros(4), np.zeros(4, int)).shift(rotation((90,)))
    with pytest.raises(ValueError, match="range of x"):
        from_arrays(np.full((4, 2), 2.0), np.zeros(4), np.zeros(4, int)).shift(negative(1))
    with pytest.raises(ValueError, match="not ids"):
        from_arrays(np.ones((4, 2), int), np.zeros(4), np.zeros(4, int)).shift(noise(1))
    with pytest.raises(ValueError, match="classes=1"):
        flat.shift(noise(1, classes=1))
    with pytest.raises(ValueError, match=r"kind='gausian'.*did you mean 'gaussian'"):
        noise(1, "gausian")
    with pytest.raises(ValueError, match="deviation=0"):
        standard(0, 0)
    with pytest.raises(ValueError, match="fraction=2"):
        negative(2)
    with pytest.raises(ValueError, match="shift='rotation'"):
        flat.shift("rotation")  # type: ignore[arg-type]
