"""Readers of the real datasets: on small files of the same form, and on the data where they are at hand."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from partita.data import FederatedData, dirichlet, iid, label_skew, real
from partita.data.federated import SPLITS

FOLDER = os.environ.get("PARTITA_DATA", "")
with_data = pytest.mark.skipif(not FOLDER, reason="PARTITA_DATA is not set")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    np.savez_compressed(
        tmp_path / "femnist.npz",
        x=rng.integers(0, 256, (20, 28, 28), dtype=np.uint8),
        y=rng.integers(0, 62, 20).astype(np.uint8),
        writer=np.repeat([0, 1, 2], [2, 6, 12]).astype(np.int16),
        is_test=np.arange(20) % 2 == 1,
        writer_name=np.array(["f0", "f1", "f2"]),
        class_name=np.array(list("0123456789")),
    )
    text = np.frombuffer(b"abcab" * 40 + b"ba" * 15 + b"abc\n" * 30, dtype=np.uint8)
    np.savez_compressed(
        tmp_path / "shakespeare.npz",
        text=text,
        offset=np.array([0, 200, 230, 350]),
        role=np.array(["KING", "PAGE", "KING"]),
        play=np.array([0, 0, 1], dtype=np.int16),
        play_name=np.array(["hamlet", "lear"]),
        alphabet=np.unique(text),
    )
    np.savez_compressed(
        tmp_path / "cifar10.npz",
        x_train=rng.integers(0, 256, (40, 4, 5, 3), dtype=np.uint8),
        y_train=np.repeat(np.arange(4), 10).astype(np.uint8),
        x_test=rng.integers(0, 256, (12, 4, 5, 3), dtype=np.uint8),
        y_test=np.repeat(np.arange(4), 3).astype(np.uint8),
    )
    x = rng.normal(size=(30, 3)).astype(np.float32)
    x[::3, 0] = np.nan
    x[:10, 1] = 0
    np.savez_compressed(
        tmp_path / "heart_disease.npz",
        x=x,
        y=np.arange(30, dtype=np.uint8) % 2,
        hospital=np.repeat([0, 1], [10, 20]).astype(np.int16),
        hospital_name=np.array(["A", "B"]),
        feature_name=np.array(["ca", "chol", "age"]),
    )
    return tmp_path


def test_femnist_of_a_small_file(folder: Path) -> None:
    data = real("femnist", folder=folder, validation=0)
    assert data.names == ("f0", "f1", "f2")
    assert data.sizes().tolist() == data.sizes("test").tolist() == [1, 3, 6]
    assert data.x.dtype == torch.uint8
    assert real("femnist", folder=folder, min_samples=6).names == ("f1", "f2")
    some = real("femnist", folder=folder, clients=2, seed=1)
    assert some.clients == 2
    assert some.fingerprint() == real("femnist", folder=folder, clients=2, seed=1).fingerprint()


def test_shakespeare_of_a_small_file(folder: Path) -> None:
    data = real("shakespeare", folder=folder, min_characters=100, length=10, validation=0)
    assert data.names == ("hamlet/KING", "lear/KING")
    # 160 and 96 characters to train on: windows of 10 and their successors; 40 and 24 to test on.
    assert data.sizes().tolist() == [15, 9]
    assert data.sizes("test").tolist() == [3, 2]
    x, y = data.client(0)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(y[:-1, -1], x[1:, 0])
    assert "".join("\nabc"[i] for i in x[0]) == "abcababcab"
    assert x.dtype == torch.int64
    tight = real("shakespeare", folder=folder, min_characters=100, length=10, stride=1, validation=0)
    assert tight.sizes().tolist() == [150, 86]
    with pytest.raises(ValueError, match="min_characters=2000: expected at most 200"):
        real("shakespeare", folder=folder)
    with pytest.raises(ValueError, match="no role has enough text"):
        real("shakespeare", folder=folder, min_characters=0, length=500)


def test_cifar10_of_a_small_file(folder: Path) -> None:
    data = real("cifar10", folder=folder, clients=4, partition=label_skew(2), test="file")
    assert data.x.shape == (52, 3, 4, 5)
    assert data.sizes("test").sum() == 12
    for i in range(4):
        assert set(data.client(i, "test")[1].tolist()) <= set(data.client(i)[1].tolist())
    whole = np.load(folder / "cifar10.npz")["x_train"]
    one = real("cifar10", folder=folder, clients=1, partition=iid(), test=0, validation=0)
    assert np.array_equal(one.x.numpy(), whole.transpose(0, 3, 1, 2))
    with pytest.raises(ValueError, match="clients=None"):
        real("cifar10", folder=folder)
    with pytest.raises(ValueError, match=r"test='flie'.*did you mean 'file'"):
        real("cifar10", folder=folder, clients=2, test="flie")


def test_heart_disease_of_a_small_file(folder: Path) -> None:
    data = real("heart_disease", folder=folder, validation=0)
    assert data.source["features"] == ["ca", "chol", "age", "ca missing", "chol missing"]
    train = torch.cat([data.client(i)[0] for i in range(2)])
    assert torch.allclose(train[:, :3].mean(0), torch.zeros(3), atol=1e-5)
    assert torch.allclose(train[:, :3].std(0, correction=0), torch.ones(3), atol=1e-5)
    assert set(data.x[:, 3:].flatten().tolist()) == {0.0, 1.0}
    assert data.client(0)[0][:, 4].min() == 1
    alone = real("heart_disease", folder=folder, clients=1, seed=3)
    assert alone.x.shape[1] == 5


def test_refusals(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"name='femnits'.*did you mean 'femnist'"):
        real("femnits", folder=folder)
    with pytest.raises(
        ValueError,
        match=r"min_sample=3: .*did you mean 'min_samples'.*min_samples, validation, clients, seed",
    ):
        real("femnist", folder=folder, min_sample=3)
    with pytest.raises(ValueError, match=r"a folder with a file mnist.npz"):
        real("mnist", folder=folder)
    with pytest.raises(ValueError, match="clients=4: expected a whole number from 1 up to 3"):
        real("femnist", folder=folder, clients=4)
    with pytest.raises(ValueError, match="min_samples=13: expected at most 12"):
        real("femnist", folder=folder, min_samples=13)
    monkeypatch.setenv("PARTITA_DATA", "")
    with pytest.raises(ValueError, match="environment variable PARTITA_DATA"):
        real("femnist")
    monkeypatch.setenv("PARTITA_DATA", str(folder))
    assert real("femnist").clients == 3
    np.savez(folder / "femnist.npz", x=np.ones(3))
    with pytest.raises(ValueError, match="no key 'y'; it has x"):
        real("femnist")


@with_data
@pytest.mark.parametrize(
    ("name", "options", "clients", "rows", "shape"),
    [
        ("femnist", {}, 300, 45_958, (28, 28)),
        ("femnist", {"min_samples": 100}, 272, 44_643, (28, 28)),
        ("mnist", {}, 539, 60_000, (28, 28)),
        ("mnist", {"clients": 10, "partition": iid(), "test": 0.5}, 10, 70_000, (28, 28)),
        ("cifar10", {"clients": 20, "partition": dirichlet(1.0)}, 20, 15_000, (3, 32, 32)),
        ("cifar10", {"clients": 20, "partition": dirichlet(1.0), "test": "file"}, 20, 19_000, (3, 32, 32)),
        ("free_spoken_digits", {}, 6, 3_000, (32, 32)),
        ("shakespeare", {"validation": 0}, 448, 47_406, (80,)),
        ("imdb", {}, 706, 19_515, (128,)),
        ("imdb", {"clients": 50, "partition": dirichlet(1.0)}, 50, 50_000, (128,)),
        ("parkinsons_telemonitoring", {}, 42, 5_875, (19,)),
        ("heart_disease", {}, 4, 920, (23,)),
    ],
)
def test_real_data(
    name: str, options: dict[str, Any], clients: int, rows: int, shape: tuple[int, ...]
) -> None:
    data: FederatedData = real(name, **options)
    assert data.clients == clients
    assert len(data.x) == sum(data.sizes(split).sum() for split in SPLITS) == rows
    assert data.x.shape[1:] == shape
    assert data.sizes("train").min() >= 1
    assert data.sizes("test").min() >= 1
    assert data.source["name"] == name
    assert json.dumps(data.source)
    x, _ = data.client(0)
    assert x.dtype == (torch.int64 if name in ("shakespeare", "imdb") else torch.float32)


@with_data
def test_parkinsons_features_are_standard_over_the_training_rows() -> None:
    data = real("parkinsons_telemonitoring", clients=5, target="motor_UPDRS", validation=0)
    train = torch.cat([data.client(i)[0] for i in range(5)])
    assert torch.allclose(train.mean(0), torch.zeros(19), atol=1e-4)
    assert data.y.shape[1:] == (1,)
    assert data.y.max() < 40
