"""Flat rows, ranges of clients, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from partita.data import FederatedData, from_arrays
from support import each


def images(n: int = 12) -> FederatedData:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (n, 4, 4), dtype=np.uint8)
    return FederatedData.make(x, np.arange(n) % 3, [(0, 5), (7, 2)], [(5, 2), (9, 3)], names=["ann", "bob"])


def test_gather_is_indexing_in_any_shape() -> None:
    data = images()
    for index in (torch.tensor(3), torch.tensor([1, 1, 11]), torch.randint(12, (2, 3, 5))):
        x, y = data.gather(index)
        assert torch.equal(x, data.x[index].float() / 255)
        assert torch.equal(y, data.y[index])
        assert x.dtype == torch.float32
        assert x.shape == (*index.shape, 4, 4)


@each(
    ("given", "stored", "gathered"),
    [
        (np.uint8, torch.uint8, torch.float32),
        (np.uint16, torch.int32, torch.int64),
        (np.int64, torch.int64, torch.int64),
        (np.float16, torch.float32, torch.float32),
        (np.float64, torch.float64, torch.float64),
        (np.dtype(">f4"), torch.float32, torch.float32),
        (np.bool_, torch.float32, torch.float32),
    ],
)
def test_dtypes_as_stored_and_as_gathered(
    given: np.dtype[np.generic], stored: torch.dtype, gathered: torch.dtype
) -> None:
    data = FederatedData.make(np.ones((3, 2), dtype=given), np.zeros(3, np.uint8), [(0, 3)])
    assert data.x.dtype == stored
    x, y = data.client(0)
    assert x.dtype == gathered
    assert y.dtype == torch.int64


def test_lists_of_numbers_become_float32() -> None:
    data = FederatedData.make([[0.5], [1.5]], [0.5, 2.0], [(0, 2)])
    assert (data.x.dtype, data.y.dtype) == (torch.float32, torch.float32)


def test_client_and_sizes() -> None:
    data = images()
    x, y = data.client(1, "test")
    assert torch.equal(x, data.x[9:12].float() / 255)
    assert y.tolist() == [0, 1, 2]
    assert data.clients == 2
    assert data.sizes("train").tolist() == [5, 2]
    assert data.sizes("test").tolist() == [2, 3]
    with pytest.raises(ValueError, match=r"split='tets'.*did you mean 'test'"):
        data.sizes("tets")
    with pytest.raises(ValueError, match="client=2"):
        data.client(2)


def test_empty_clients_single_samples_and_shared_pools_work() -> None:
    data = FederatedData.make(np.ones((4, 2)), np.zeros(4), [(4, 0), (3, 1), (0, 3), (0, 3)])
    assert data.client(0)[0].shape == (0, 2)
    assert data.client(1)[0].shape == (1, 2)
    assert torch.equal(data.client(2)[0], data.client(3)[0])
    assert data.sizes("test").sum() == 0
    assert "1 clients have none" in repr(data)
    nothing = data.subset([0])
    assert "no samples" in repr(nothing)
    assert nothing.fingerprint() != data.fingerprint()


def test_subset_keeps_only_its_rows() -> None:
    data = images()
    part = data.subset([1])
    assert len(part.x) == 5
    assert part.names == ("bob",)
    for split in ("train", "test"):
        assert all(
            torch.equal(a, b) for a, b in zip(part.client(0, split), data.client(1, split), strict=True)
        )
    both = data.subset([1, 0])
    assert torch.equal(both.client(1)[0], data.client(0)[0])
    with pytest.raises(ValueError, match="each once"):
        data.subset([0, 0])


def test_subset_of_a_shared_pool_and_of_empty_clients() -> None:
    data = FederatedData.make(
        np.arange(5.0), np.arange(5), [(5, 0), (2, 3), (3, 2)], [(0, 1), (0, 1), (5, 0)]
    )
    part = data.subset([0, 1, 2])
    assert len(part.x) == 4
    assert part.client(2)[1].tolist() == [3, 4]
    assert part.client(1, "test")[1].tolist() == [0]
    assert part.sizes().tolist() == [0, 3, 2]


def test_fingerprint_sees_content_labels_and_ranges() -> None:
    data = images()
    x = data.x.clone()
    x[3, 0, 0] ^= 1
    y = data.y.clone()
    y[0] = 2
    others = [
        FederatedData.make(x, data.y, data.train, data.test),
        FederatedData.make(data.x, y, data.train, data.test),
        FederatedData.make(data.x, data.y, [(0, 4), (7, 2)], data.test),
        FederatedData.make(data.x.float(), data.y, data.train, data.test),
    ]
    prints = {data.fingerprint(), *(o.fingerprint() for o in others)}
    assert len(prints) == 5
    assert data.fingerprint() == images().fingerprint() == data.to("cpu").fingerprint()
    assert len(data.fingerprint()) == 16


def test_repr_teaches() -> None:
    text = repr(images())
    for word in ("2 clients", "7 samples", "median 3.5", "uint8", "[4, 4]", "3 classes, 0 to 2"):
        assert word in text
    assert "numbers from 0 to 1" in repr(FederatedData.make(np.ones(2), [0.0, 1.0], [(0, 2)]))


def test_labels_that_do_not_count_are_no_class() -> None:
    data = from_arrays(np.ones((6, 1)), [0, 1, -100, 2, -100, 1], [0] * 6, test=0, validation=0)
    assert "3 classes, 0 to 2" in repr(data)


def test_source_is_json() -> None:
    data = from_arrays(np.ones((4, 1)), np.zeros(4), np.array([0, 0, 1, 1]))
    assert json.loads(json.dumps(data.source)) == {
        "name": "from_arrays", "test": 0.2, "validation": 0.1, "seed": 0,
    }  # fmt: skip


@each("bad", [np.nan, np.inf, -np.inf])
def test_unusable_numbers_are_named(bad: float) -> None:
    x = np.ones((6, 2))
    x[4, 1] = bad
    with pytest.raises(ValueError, match=rf"x\[4\] of client 'bob' \(test\)={bad}"):
        FederatedData.make(x, np.zeros(6), [(0, 2), (2, 2)], [(0, 0), (4, 2)], names=["ann", "bob"])
    with pytest.raises(ValueError, match=rf"x\[4\] of client 'b'={bad}"):
        from_arrays(x, np.zeros(6), ["b", "a", "a", "a", "b", "b"])
    with pytest.raises(ValueError, match=rf"y\[1\] of client 'a'={bad}"):
        from_arrays(np.ones(3), np.array([0, bad, 1]), ["a", "a", "a"])


@each(
    ("arguments", "message"),
    [
        ((np.ones(3), np.ones(2), [(0, 3)]), "rows of y=2: expected 3"),
        ((np.ones(3), np.ones(3), []), "clients=0"),
        ((np.ones(3), np.ones(3), [(0, 0)]), "training samples=0"),
        ((np.ones(3), np.ones(3), [(0, 3), (2, 2)]), r"train range of client '1'=\(2, 2\)"),
        ((np.ones(3), np.ones(3), [(-1, 2)]), "within 3 rows"),
        ((np.ones(3), np.ones(3), [(0.0, 2.0)]), "train="),
        ((np.ones(3), np.ones(3), [(0, 3)], [(0, 1), (1, 1)]), "clients in test=2"),
        ((["a", "b"], np.ones(2), [(0, 2)]), "dtype of x='<U1'"),
        (([[[1]], [[1, 2]]], np.ones(2), [(0, 2)]), "rows of one shape"),
        ((np.ones(2, complex), np.ones(2), [(0, 2)]), "dtype of x"),
    ],
)
def test_refusals(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FederatedData.make(*arguments)  # type: ignore[arg-type]


def test_names_must_be_different() -> None:
    with pytest.raises(ValueError, match="2 different names"):
        FederatedData.make(np.ones(2), np.ones(2), [(0, 1), (1, 1)], names=["a", "a"])
