"""Datasets are read once: who gives a random transform is told."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

import partita as pt
from support import each

X = torch.arange(40.0).reshape(20, 2)
SAID = "the same sample is drawn anew each time it is read"


class Transformed(Dataset):
    """Rows and labels through a function; it counts how often each row is read."""

    def __init__(self, change: Callable[[Tensor, int], Any], size: int = 20) -> None:
        self.change, self.size = change, size
        self.reads = [0] * size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[Any, int]:
        self.reads[i] += 1
        return self.change(X[i], i), i % 2


def flip_rarely(x: Tensor, _: int) -> Tensor:
    """As RandomHorizontalFlip with a small p: it draws each time, and hardly ever does anything."""
    return x.flip(0) if torch.rand(()) < 1e-6 else x


def seeded(x: Tensor, i: int) -> Tensor:
    """The same noise for a sample each time."""
    torch.manual_seed(i)
    return x + torch.rand(2)


OWN = np.random.default_rng(0)
RANDOM: dict[str, Callable[[Tensor, int], Any]] = {
    "torch": lambda x, _: x + torch.rand(2),
    "numpy": lambda x, _: x.numpy() + np.random.rand(2),
    "python": lambda x, _: x * random.random(),
    "own generator": lambda x, _: x + float(OWN.normal()),
    "lists": lambda x, _: [v + random.random() for v in x.tolist()],
    "rarely": flip_rarely,
}
STEADY: dict[str, Callable[[Tensor, int], Any]] = {
    "plain": lambda x, _: x,
    "arrays": lambda x, _: x.numpy().copy(),
    "lists": lambda x, _: x.tolist(),
    "seeded": seeded,
}


def quietly(call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call()


@each("name", RANDOM)
def test_a_random_transform_is_told(name: str) -> None:
    with pytest.warns(UserWarning, match=SAID) as told:
        pt.data.from_datasets({"a": Transformed(RANDOM[name]), "b": Transformed(RANDOM[name])})
    assert len(told) == 1
    assert told[0].filename == __file__


@each("name", STEADY)
def test_what_is_the_same_each_time_is_not(name: str) -> None:
    quietly(lambda: pt.data.from_datasets({"a": Transformed(STEADY[name])}))


def test_pairs_and_tensors_are_not() -> None:
    y = torch.arange(20) % 2
    quietly(
        lambda: pt.data.from_datasets(
            {"a": (X, y), "b": TensorDataset(X, y), "c": TensorDataset(X[:0], y[:0])}
        )
    )


def test_random_labels_are_told() -> None:
    class Mixed(Transformed):
        def __getitem__(self, i: int) -> tuple[Any, Any]:
            return X[i], torch.rand(())

    with pytest.warns(UserWarning, match=SAID):
        pt.data.from_datasets({"a": Mixed(STEADY["plain"])})


def test_only_a_few_are_read_again() -> None:
    parts = {str(i): Transformed(STEADY["plain"]) for i in range(8)}
    pt.data.from_datasets(parts)
    reads = np.array([part.reads for part in parts.values()])
    assert reads.min() == 1
    assert (reads > 1).sum() <= 9
    assert reads.max() == 3


def test_random_states_and_draws_stay_as_they_were() -> None:
    """What is read is what would be read without the look, and so is what the user draws next."""

    def seed() -> None:
        torch.manual_seed(1), np.random.seed(1), random.seed(1)

    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.rand()), random.random()

    def all_three(x: Tensor, _: int) -> Tensor:
        return x + sum(draw())

    seed()
    expected = torch.stack([Transformed(all_three)[i][0] for i in range(20)])
    after = draw()
    seed()
    with pytest.warns(UserWarning, match=SAID):
        data = pt.data.from_datasets({"a": Transformed(all_three)}, test=0.0, validation=0)
    assert torch.equal(data.x, expected)
    assert draw() == after


def test_what_can_be_read_only_once_is_read_once() -> None:
    class Stream(Transformed):
        def __getitem__(self, i: int) -> tuple[Any, int]:
            if self.reads[i]:
                raise RuntimeError("gone")
            return super().__getitem__(i)

    assert len(quietly(lambda: pt.data.from_datasets({"a": Stream(STEADY["plain"])}, test=0.0)).x) == 20


@pytest.mark.parametrize("chance", [True, False])
def test_a_transform_of_hugging_face(chance: bool) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict(
        {"pixels": X.tolist(), "label": [0, 1] * 10, "site": ["a", "b"] * 10}
    ).with_transform(
        lambda rows: {
            k: [[float(p) + (random.random() if chance else 0) for p in v] for v in values]
            if k == "pixels"
            else values
            for k, values in rows.items()
        }
    )

    def read() -> Any:
        return pt.data.from_huggingface(table, x="pixels", y="label", client="site")

    if chance:
        with pytest.warns(UserWarning, match=SAID):
            read()
    else:
        quietly(read)
