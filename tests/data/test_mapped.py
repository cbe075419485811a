"""Rows that stay in files: the same as in memory, read when they are asked for; and caches of datasets."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import partita as pt
from partita.core import check
from partita.data import FederatedData, cache, from_arrays, from_datasets, from_huggingface, from_npz
from partita.data.mapped import Mapped
from partita.engine.workers.wire import pack, unpack
from support import each

RNG = np.random.default_rng(0)
X = RNG.integers(0, 256, (30, 2, 4), dtype=np.uint8)
Y = RNG.integers(0, 3, 30)
CLIENT = RNG.integers(0, 4, 30)
Y6 = torch.arange(6) % 2


def mapped(folder: Path, x: np.ndarray = X) -> np.ndarray:
    np.save(folder / "x.npy", x)
    array: np.ndarray = np.load(folder / "x.npy", mmap_mode="r")
    return array


@each(
    "kind",
    [np.uint8, np.int8, np.uint16, np.int32, np.int64, np.float16, np.float32, np.float64, np.bool_],
)
def test_they_are_what_they_would_be_in_memory(tmp_path: Path, kind: Any) -> None:
    for array in (X.astype(kind), X.astype(kind)[:, 0]):
        x = mapped(tmp_path, array)
        for several in (False, True):
            inputs = [{"a": v, "b": Y} if several else v for v in (x, array)]
            there, here = (from_arrays(v, Y, CLIENT) for v in inputs)
            column = there.x["a"] if isinstance(there.x, dict) else there.x
            assert isinstance(column, Mapped)
            assert there.fingerprint() == here.fingerprint()
            for client in range(4):
                (a, _), (b, _) = there.client(client), here.client(client)
                for one, two in zip(*(v.values() if isinstance(v, dict) else [v] for v in (a, b))):
                    assert one.dtype == two.dtype
                    assert torch.equal(one, two)


def test_subset_hold_out_and_poisoned_labels_leave_them_there(tmp_path: Path) -> None:
    there = from_arrays(mapped(tmp_path), Y, CLIENT, validation=0)
    here = from_arrays(X, Y, CLIENT, validation=0)
    poison = pt.attack.label_flip().poison
    for one, two in (
        (there.subset([2, 0]), here.subset([2, 0])),
        (there.hold_out(0.3), here.hold_out(0.3)),
        (there.altered([1], poison), here.altered([1], poison)),
    ):
        assert isinstance(one.x, Mapped)
        for client in range(one.clients):
            for a, b in zip(one.client(client), two.client(client)):
                assert torch.equal(a, b)
    assert torch.equal(there.to("cpu").x, here.x)


def test_numbers_that_are_not_finite_are_found_in_files(tmp_path: Path) -> None:
    x = X.astype(np.float32)
    x[17, 1, 2] = np.nan
    with pytest.raises(check.Refused, match=r"x\[17\] of client"):
        from_arrays(mapped(tmp_path, x), Y, CLIENT)


def test_what_changes_features_refuses_files(tmp_path: Path) -> None:
    data = from_arrays(mapped(tmp_path), Y, CLIENT)
    with pytest.raises(check.Refused, match=r"data\.to\('cpu'\).* the model's forward"):
        pt.data.standardize(data)
    here = pt.data.standardize(from_arrays(X, Y, CLIENT))
    assert torch.equal(pt.data.standardize(data.to("cpu")).x, here.x)
    with pytest.raises(check.Refused, match="in memory"):
        data.shift(pt.data.negative(0.5))


def test_another_process_maps_the_file_and_gets_no_copy(tmp_path: Path) -> None:
    whole = mapped(tmp_path)
    for array in (whole, whole[7:], whole[3:20]):
        column = from_arrays(array, Y[: len(array)], CLIENT[: len(array)]).x
        sent = pack(column)
        assert sent.nbytes < 4000 < column.values.nbytes * 100
        again = unpack(sent)
        assert torch.equal(again.values, column.values)
        assert torch.equal(pickle.loads(pickle.dumps(column)).rows, column.rows)
    strided = from_arrays(whole[::2], Y[::2], CLIENT[::2]).x
    assert torch.equal(unpack(pack(strided)).values, strided.values)  # by a copy


def test_archives_are_mapped_unless_they_are_compressed(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"x": X, "mask": X[:, 0] > 9, "y": Y, "client": CLIENT}
    np.savez(tmp_path / "a.npz", **arrays)
    data = from_npz(tmp_path / "a.npz", mapped=True)
    assert isinstance(data.x, Mapped)
    assert data.fingerprint() == from_npz(tmp_path / "a.npz").fingerprint()
    both = from_npz(tmp_path / "a.npz", x=["x", "mask"], mapped=True)
    assert torch.equal(both.client(1)[0]["mask"], torch.from_numpy(X[:, 0] > 9)[CLIENT_ROWS(data, 1)])
    np.savez_compressed(tmp_path / "b.npz", **arrays)
    with pytest.raises(check.Refused, match="not compressed"):
        from_npz(tmp_path / "b.npz", mapped=True)
    with pytest.raises(check.Refused, match="key='z'"):
        from_npz(tmp_path / "a.npz", x="z", mapped=True)


def CLIENT_ROWS(data: FederatedData, client: int) -> torch.Tensor:
    """Return which rows of the file a client trains on."""
    assert isinstance(data.x, Mapped)
    start, length = data.train[client].tolist()
    return data.x.rows[start : start + length]


class Images(Dataset[Any]):
    """Samples that are decoded when they are read."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows, self.reads = rows, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        self.reads += 1
        return torch.from_numpy(X[self.rows[i]]), int(Y[self.rows[i]])


def images() -> dict[str, Images]:
    return {str(i): Images(np.flatnonzero(i == CLIENT)) for i in range(4)}


def test_lazy_datasets_are_read_once_into_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SAMPLES", 4)
    monkeypatch.setattr("partita.data.datasets.SAMPLES", 4)
    first = from_datasets(images(), cache=tmp_path / "cache")
    assert isinstance(first.x, Mapped)
    assert first.fingerprint() == from_datasets(images()).fingerprint()
    again = images()
    assert from_datasets(again, cache=tmp_path / "cache").fingerprint() == first.fingerprint()
    assert sum(part.reads for part in again.values()) < 30  # a few, to see that they are the same
    fewer = {k: v for k, v in images().items() if k != "2"}
    with pytest.raises(check.Refused, match="holds other samples"):
        from_datasets(fewer, cache=tmp_path / "cache")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(check.Refused, match="a new or empty folder"):
        from_datasets(images(), cache=tmp_path / "full")


@each("width", [1, 3])
def test_sequences_of_different_lengths_are_refused_also_between_clients(tmp_path: Path, width: int) -> None:
    parts = {name: TensorDataset(torch.ones(6, n).long(), Y6) for name, n in (("a", 5), ("b", width))}
    with pytest.raises(
        check.Refused, match="sequences of different lengths are kept in memory; give no cache"
    ):
        from_datasets(parts, cache=tmp_path / "cache")
    labels = {name: (torch.ones(6, 5), torch.ones(6, n).long()) for name, n in (("a", 5), ("b", width))}
    with pytest.raises(check.Refused, match="kept in memory"):
        from_datasets(labels, cache=tmp_path / "labels")


def test_lists_of_one_length_are_cached(tmp_path: Path) -> None:
    samples = [{"input_ids": [i, i + 1], "labels": i % 2} for i in range(6)]
    there = from_datasets({"a": samples, "b": samples}, cache=tmp_path / "cache")
    column = there.x["input_ids"] if isinstance(there.x, dict) else None
    assert isinstance(column, Mapped)
    here = from_datasets({"a": samples, "b": samples})
    for client in range(2):
        assert torch.equal(there.client(client)[0]["input_ids"], here.client(client)[0]["input_ids"])


def test_an_interrupted_cache_is_written_anew(tmp_path: Path) -> None:
    class Broken(Images):
        def __getitem__(self, i: int) -> Any:
            if self.reads > 4:
                raise RuntimeError("the disk is gone")
            return super().__getitem__(i)

    with pytest.raises(RuntimeError, match="gone"):
        from_datasets({"0": Broken(np.arange(20))}, cache=tmp_path / "cache")
    whole = from_datasets({"0": Images(np.arange(20))}, cache=tmp_path / "cache")
    assert torch.equal(whole.to("cpu").x.sort(0)[0], torch.from_numpy(X[:20]).sort(0)[0])


def test_more_than_memory_asks_for_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SHARE", 1e-12)
    with pytest.raises(check.Refused, match="cache=FOLDER"):
        from_datasets(images())


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter([])


@each(
    ("samples", "message"),
    [
        (DataLoader(Images(np.arange(4))), r"loader\.dataset"),
        (Stream(), "write a stream to a file"),
    ],
)
def test_loaders_and_streams_are_refused_with_the_way_to_do_it(samples: Any, message: str) -> None:
    with pytest.raises(check.Refused, match=message):
        from_datasets({"a": samples})


class Table:
    """What `from_huggingface` needs of a datasets.Dataset."""

    features = None

    def __init__(self, columns: dict[str, Any]) -> None:
        self.columns, self.column_names = columns, list(columns)

    def __len__(self) -> int:
        return len(self.columns["who"])

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    def select(self, rows: range) -> Table:
        return Table({k: [v[i] for i in rows] for k, v in self.columns.items()})


def test_tables_are_read_into_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partita.data.readers.SAMPLES", 7)
    table = Table({"image": list(X), "kind": list(Y % 2), "y": list(Y), "who": list(CLIENT)})
    for x in ("image", ["image", "kind"]):
        there = from_huggingface(table, x=x, y="y", client="who", cache=tmp_path / str(len(x)))
        here = from_huggingface(table, x=x, y="y", client="who")
        assert there.fingerprint() == here.fingerprint()
        assert there.source == here.source
    sequences = Table({**table.columns, "ids": [[1] * (1 + i % 3) for i in range(30)]})
    with pytest.raises(check.Refused, match="kept in memory"):
        from_huggingface(sequences, x="ids", y="y", client="who", cache=tmp_path / "ids")
