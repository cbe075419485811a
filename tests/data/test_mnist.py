"""Shifted MNIST: on a small file of the same form, and on the digits where they are at hand."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from partita.data import FederatedData, iid, mnist_shifted, real

with_data = pytest.mark.skipif(not os.environ.get("PARTITA_DATA"), reason="PARTITA_DATA is not set")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    np.savez_compressed(
        tmp_path / "mnist.npz",
        x_train=rng.integers(0, 256, (600, 4, 4), dtype=np.uint8),
        y_train=(np.arange(600) % 10).astype(np.uint8),
        writer_train=np.zeros(600, dtype=np.int16),
        x_test=rng.integers(0, 256, (100, 4, 4), dtype=np.uint8),
        y_test=(np.arange(100) % 10).astype(np.uint8),
    )
    return tmp_path


def plain(folder: Path, clients: int, seed: int = 0) -> FederatedData:
    return real("mnist", folder=folder, clients=clients, partition=iid(), test=0.5, validation=0, seed=seed)


def test_a_share_of_the_clients_sees_negatives(folder: Path) -> None:
    data, before = (
        mnist_shifted(10, negatives=0.2, standard=False, validation=0, folder=folder),
        plain(folder, 10),
    )
    assert data.sizes().tolist() == data.sizes("test").tolist() == [35] * 10
    assert data.x.dtype == torch.uint8
    assert torch.equal(data.y, before.y)
    changed = 0
    for i in range(10):
        pairs = [(data.client(i, s)[0], before.client(i, s)[0]) for s in ("train", "test")]
        same = [torch.equal(x, old) for x, old in pairs]
        assert same[0] == same[1]
        assert all(torch.allclose(x, old if same[0] else 1 - old) for x, old in pairs)
        changed += not same[0]
    assert changed == 2


def test_negatives_of_standardised_digits_change_their_sign(folder: Path) -> None:
    data, before = mnist_shifted(10, negatives=0.3, validation=0, folder=folder), plain(folder, 10)
    signs = []
    for i in range(10):
        expected = (before.client(i)[0] - 0.1307) / 0.3081
        signs.append(1 if torch.allclose(data.client(i)[0], expected) else -1)
        assert torch.allclose(data.client(i)[0], signs[-1] * expected)
    assert signs.count(-1) == 3
    assert [s["name"] for s in data.source["shift"]] == ["standard", "negative"]


@pytest.mark.parametrize("standard", [True, False])
def test_noise_is_on_two_classes_of_each_client(folder: Path, standard: bool) -> None:
    robust = mnist_shifted(7, standard=standard, folder=folder)
    noisy = mnist_shifted(7, noise=2.0, standard=standard, folder=folder)
    chosen = []
    for i in range(7):
        x, y = noisy.client(i)
        changed = (x != robust.client(i)[0]).flatten(1).any(1)
        chosen.append(tuple(sorted(set(y[changed].tolist()))))
        assert len(chosen[-1]) == 2
        assert changed.tolist() == torch.isin(y, torch.tensor(chosen[-1])).tolist()
    assert len(set(chosen)) > 1
    unit, scale = (1.0, 2.0 / 0.3081) if standard else (255.0, 2.0)
    difference = (noisy.x - robust.x / unit).flatten(1)
    size = float(difference[difference.any(1)].abs().mean())
    assert abs(size / scale - 1) < 0.1  # the mean of a Laplacian number without its sign is the scale
    made = noisy.source["shift"][-1]
    assert (made["name"], made["kind"], made["classes"]) == ("noise", "laplace", 2)
    assert made["scale"] == pytest.approx(scale)
    assert json.dumps(noisy.source)


def test_the_seed_decides(folder: Path) -> None:
    made = [mnist_shifted(5, noise=1.0, folder=folder, seed=s).fingerprint() for s in (1, 1, 2)]
    assert made[0] == made[1] != made[2]


def test_refusals(folder: Path) -> None:
    with pytest.raises(ValueError, match="negatives=2"):
        mnist_shifted(negatives=2, folder=folder)
    with pytest.raises(ValueError, match="noise=-1"):
        mnist_shifted(noise=-1, folder=folder)
    with pytest.raises(ValueError, match="classes=11"):
        mnist_shifted(classes=11, folder=folder)
    with pytest.raises(ValueError, match="standard='yes'"):
        mnist_shifted(standard="yes", folder=folder)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="clients=0"):
        mnist_shifted(0, folder=folder)
    with pytest.raises(ValueError, match=r"a folder with a file mnist\.npz"):
        mnist_shifted(folder=folder / "none")


@with_data
def test_all_digits_are_dealt() -> None:
    data = mnist_shifted(50, negatives=0.2, validation=0)
    assert data.sizes().tolist() == data.sizes("test").tolist() == [700] * 50
    # The corner of a digit is paper: dark in the standardised images, bright in their negatives.
    assert sum(float(data.client(i)[0][:, 0, 0].mean()) > 0 for i in range(50)) == 10
