"""Arrays and datasets in memory: every row goes to its client, training or test."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

from partita.data import (
    digits,
    from_arrays,
    from_datasets,
    label_skew,
    negative,
    split,
)
from support import each


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-3, 5), min_size=2, max_size=60), st.floats(0, 0.99), st.integers(0, 3))
def test_every_row_is_in_one_place(ids: list[int], fraction: float, seed: int) -> None:
    n = len(ids)
    data = from_arrays(np.arange(n), np.arange(n), ids, test=fraction, validation=0, seed=seed)
    seen = []
    for i, name in enumerate(data.names):
        train, test = (data.client(i, s)[1].tolist() for s in ("train", "test"))
        own = [row for row in range(n) if str(ids[row]) == name]
        assert sorted(train + test) == own
        assert train == sorted(train)  # rows keep their order: series stay series
        assert train or not own
        if fraction > 0 and len(own) > 1:
            assert test
        if fraction == 0 or len(own) == 1:
            assert not test
        seen += own
    assert sorted(seen) == list(range(n))
    assert list(data.names) == [str(i) for i in sorted(set(ids))]


def test_strings_masks_and_clients_with_only_test_rows() -> None:
    client = np.array(["bob", "ann", "bob", "cat", "ann", "cat"])
    mask = np.array([False, False, True, True, False, True])
    data = from_arrays(np.arange(6, dtype=np.float32), np.arange(6), client, test=mask)
    assert data.names == ("ann", "bob", "cat")
    assert data.sizes("train").tolist() == [2, 1, 0]
    assert data.client(2, "test")[1].tolist() == [3, 5]
    same = from_arrays(torch.arange(6.0), torch.arange(6), client.astype(object), test=torch.from_numpy(mask))
    assert same.fingerprint() == data.fingerprint()


def test_test_rows_depend_on_the_seed_alone() -> None:
    x, client = np.arange(100), np.arange(100) % 4
    a, b, c = (from_arrays(x, x, client, seed=s) for s in (1, 1, 2))
    assert a.fingerprint() == b.fingerprint() != c.fingerprint()


def test_inputs_are_not_aliased() -> None:
    x = torch.zeros(4)
    data = from_arrays(x, np.zeros(4), [0, 0, 1, 1])
    x += 1
    assert data.x.sum() == 0


def test_split_keeps_empty_clients_and_drops_rows_without_one() -> None:
    def first_two(y: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        assert len(y) == 5
        assert isinstance(rng, np.random.Generator)
        return [np.array([0, 1])] + [np.zeros(0, dtype=np.int64)] * (clients - 1)

    data = split(np.arange(5.0), np.arange(5), 3, first_two)
    assert data.clients == 3
    assert len(data.x) == 2
    assert data.source["partition"] == {"name": "first_two"}


def test_digits() -> None:
    data = digits(clients=10, partition=label_skew(classes=3), seed=1)
    assert data.x.shape == (1797, 8, 8)
    assert data.x.dtype == torch.float32
    assert (data.x.min(), data.x.max()) == (0, 1)
    for i in range(10):
        assert len(torch.unique(torch.cat([data.client(i, s)[1] for s in ("train", "test")]))) == 3
    assert data.source["partition"] == {"name": "label_skew", "classes": 3}
    assert abs(data.sizes("test").sum() / 1797 - 0.25) < 0.01
    shifted = digits(clients=4, shift=negative(1.0))
    assert torch.equal(shifted.x, 1 - digits(clients=4).x)


class Pairs(Dataset[Any]):
    """Samples as a user's Dataset gives them: a nested list and a plain number."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, i: int) -> tuple[list[float], int]:
        return [self.values[i], 0.0], i


class Colours:
    """A stand-in for a PIL image."""

    mode = "RGB"

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.zeros((4, 5, 3), dtype=np.uint8)


def test_from_datasets() -> None:
    data = from_datasets({"z": Pairs([1, 2, 3]), "a": Pairs([4]), "none": Pairs([])}, test=0.34)
    assert data.names == ("z", "a", "none")
    assert data.sizes().tolist() == [2, 1, 0]
    assert data.sizes("test").tolist() == [1, 0, 0]
    assert data.client(1)[0].tolist() == [[4.0, 0.0]]
    assert data.x.dtype == torch.float32


def test_from_datasets_with_test_sets() -> None:
    train = {1: TensorDataset(torch.ones(3, 2), torch.zeros(3)), 2: (np.ones((1, 2), np.float32), [1.0])}
    data = from_datasets(train, test={2: (np.zeros((2, 2), np.float32), [0.0, 0.0])})
    assert data.names == ("1", "2")
    assert data.sizes("test").tolist() == [0, 2]
    assert data.client(1, "test")[0].sum() == 0
    with pytest.raises(ValueError, match="test='3'"):
        from_datasets(train, test={"3": train[1]})


def test_images_come_with_colours_first() -> None:
    data = from_datasets({"a": [(Colours(), 0), (Colours(), 1), (Colours(), 1)]})
    assert data.x.shape == (3, 3, 4, 5)
    assert data.x.dtype == torch.uint8


IDS = np.array([1, 2])


@each(
    "samples",
    [
        [{"a": IDS, "label": 0}, {"a": IDS + 2, "label": 1}],
        [(IDS, 0), (IDS + 2, 1)],
        [[IDS, 0], [IDS + 2, torch.tensor(1)]],
        [([1, 2], np.int64(0)), ([3, 4], np.int64(1))],
        [(IDS, IDS % 2), (IDS + 2, IDS % 2)],
        (np.stack([IDS, IDS + 2]), [0, 1]),
        [np.stack([IDS, IDS + 2]), [0, 1]],
        [[[1, 2], [3, 4]], [0, 1]],
    ],
)
def test_two_samples_in_a_list_are_no_pair_of_arrays(samples: Any) -> None:
    x, y = from_datasets({"a": samples}, test=0, validation=0).client(0)
    x = x["a"] if isinstance(x, dict) else x
    assert x.tolist() == [[1, 2], [3, 4]]
    assert y.tolist() in ([0, 1], [[1, 0], [1, 0]])


@each(
    ("datasets", "message"),
    [
        ({}, "datasets={}"),
        ([(1, 2)], "a mapping from client names"),
        ({"a": Pairs([])}, "at least one sample"),
        ({"a": (np.ones((2, 2)), [0, 1]), "b": (np.ones((2, 3)), [0, 1])}, r"x of datasets\['b'\]"),
        ({"a": (np.ones(2, np.uint8), [0, 1]), "b": (np.ones(2), [0, 1])}, "torch.uint8"),
        ({"a": (np.ones(2), [0, 1, 2])}, "rows of y"),
        ({"a": 3}, "a Dataset with a length"),
        ({"a": [1, 2, 3]}, "pairs"),
    ],
)
def test_refused_datasets(datasets: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_datasets(datasets)


@each(
    ("options", "message"),
    [
        ({"client": [0, 1]}, "ids in client=2: expected 4"),
        ({"client": [0.5, 1.0, 1.0, 1.0]}, "client="),
        ({"client": [[0, 1], [1, 1]]}, "client="),
        ({"y": [1, 2]}, "rows of y=2"),
        ({"test": 1.0}, "test=1.0: expected a fraction below 1"),
        ({"test": -0.1}, "test=-0.1"),
        ({"test": None}, "test=None"),
        ({"test": np.array([0, 1, 0, 1])}, "test='int64"),
        ({"test": np.array([True])}, "for each of the 4 rows"),
        ({"test": np.ones(4, bool)}, "training samples=0"),
        ({"names": ["a"]}, "2 names"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_refused_arrays(options: dict[str, Any], message: str) -> None:
    good = {"x": np.ones(4), "y": np.zeros(4), "client": [0, 0, 1, 1]}
    with pytest.raises(ValueError, match=message):
        from_arrays(**(good | options))
