"""Federated data from files and from the Hugging Face library. Nothing is ever unpickled."""

from __future__ import annotations

import json
import math
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partita.core import check
from partita.data import arrays, columns
from partita.data.build import Rows, from_arrays
from partita.data.cache import SAMPLES, cached
from partita.data.chance import FEW, warn_about_chance
from partita.data.columns import Column
from partita.data.federated import FederatedData
from partita.data.validation import SHARE

Names = str | Sequence[str] | Mapping[str, str]
"""Of one input, of several by their own names, or by the names of a model's arguments."""
FRACTION = 0.2  # of each client's rows for testing, where nothing else is said


def from_npz(
    path: str | PathLike[str],
    *,
    x: Names = "x",
    y: str = "y",
    client: str = "client",
    test: str | float | None = None,
    validation: str | float = SHARE,
    mapped: bool = False,
    seed: int = 0,
) -> FederatedData:
    """Read a NumPy archive with an array of rows, one of labels and one of client ids.

    `x`, `y` and `client` are the keys of these arrays; for a model with several inputs x is a list of keys,
    which are the names of its arguments too, or a mapping from these to keys. `test` is the key of a boolean
    array, or the fraction of each client's rows (None: 0.2); `validation` is such a key, or the fraction of
    each client's training rows. `mapped` leaves x in the file, which must not be compressed (`numpy.savez`):
    rows are read when they are needed.
    """
    inputs = _inputs(x)
    keys = [y, client, *(part for part in (test, validation) if isinstance(part, str))]
    keys += [] if check.boolean("mapped", mapped) else inputs.values()
    read = read_npz(path, keys) | ({key: map_npz(path, key) for key in inputs.values()} if mapped else {})
    split: dict[str, Any] = {"test": FRACTION if test is None else test, "validation": validation}
    split |= {name: read[key] for name, key in split.items() if isinstance(key, str)}
    source = {"name": "from_npz", "path": str(path), "x": _plain(x), "y": y, "client": client, "test": test}
    source |= {"validation": validation} if isinstance(validation, str) else {}
    features = {name: read[key] for name, key in inputs.items()}
    return from_arrays(_one_or_all(x, features), read[y], read[client], **split, seed=seed, source=source)


def from_leaf(
    train: str | PathLike[str],
    test: str | PathLike[str] | float | None = None,
    *,
    validation: str | PathLike[str] | float = SHARE,
    shape: tuple[int, ...] | None = None,
    alphabet: str | None = None,
    seed: int = 0,
) -> FederatedData:
    """Read JSON as LEAF writes it: {"users": [...], "user_data": {user: {"x": [...], "y": [...]}}}.

    `train`, `test` and `validation` are files or folders of .json files; a number for `test` is the fraction
    of each user's samples (None: 0.2), and one for `validation` that of its training samples. `shape` is the
    shape of a sample that the file holds as a flat list, such as (28, 28). `alphabet` turns text into ids: a
    character becomes its place in it.

    Caldas et al. (2018), LEAF: a benchmark for federated settings. arXiv:1812.01097
    """
    if shape is not None:
        if isinstance(shape, str) or not isinstance(shape, Iterable):
            raise check.fail("shape", shape, "whole numbers from 1 such as (28, 28)")
        shape = tuple(check.integer("shape", n, low=1) for n in shape)
    parts = [("train", _users(train))]
    given: dict[str, Any] = {"test": FRACTION if test is None else test, "validation": validation}
    files = {split: part for split, part in given.items() if isinstance(part, str | PathLike)}
    parts += [(split, _users(part)) for split, part in files.items()]
    names = sorted({user for _, users in parts for user in users})
    place = {name: i for i, name in enumerate(names)}
    rows = Rows()
    for split, users in parts:
        for user, (texts, labels) in users.items():
            if len(texts) != len(labels):
                allowed = f"{len(texts)}, as many as x"
                raise check.fail(f"samples in y of user {user!r}", len(labels), allowed)
            if texts:
                x = _shaped(_encode(f"x of user {user!r}", texts, alphabet), user, shape)
                y = arrays.targets(_encode(f"y of user {user!r}", labels, alphabet))
                rows.add(place[user], x, y, split)
    if not rows.x:
        raise check.fail("train", str(train), "users with at least one sample")
    source = {"name": "from_leaf", "train": str(train), "test": given["test"]}
    source |= {split: str(part) for split, part in files.items()}
    joined = _joined("x", rows.x), _joined("y", rows.y)
    return rows.assembled(*joined, names, source, **(given | dict.fromkeys(files)), seed=seed)


def from_huggingface(
    dataset: Any,
    *,
    x: Names,
    y: str,
    client: str,
    test: Any = None,
    validation: Any = SHARE,
    pad: float | Mapping[str | int, float] = 0,
    cache: str | PathLike[str] | None = None,
    seed: int = 0,
) -> FederatedData:
    """Read a loaded `datasets.Dataset` by the names of its columns of features, labels and client ids.

    For a model with several inputs x is a list of columns, which are the names of its arguments too, such as
    `x=["input_ids", "attention_mask"]`, or a mapping from these to columns. Sequences may differ in length;
    `pad` is that of `from_arrays`.
    `test` is the name of a boolean column, the fraction of each client's rows (None: 0.2), or a second
    Dataset with the same columns; `validation` is the same, a fraction of each client's training rows. Images
    become uint8 arrays with the colours first. Columns are read once: a random transform (`set_transform`) is
    drawn once for each sample, which is said in a warning. `cache` is a folder for more samples than memory
    holds: x is written there, a few rows at a time, and stays in its files.
    """
    given = {"test": FRACTION if test is None else test, "validation": validation}
    others = {split: part for split, part in given.items() if hasattr(part, "column_names")}
    parts = {"train": dataset, **others}
    inputs = _inputs(x)
    if cache is None:
        features = {key: _columns(parts.values(), name) for key, name in inputs.items()}
        rows = {} if isinstance(x, str) else {key: list(values) for key, values in features.items()}
        features |= {key: rows[key] for key in arrays.sequences(rows)}
    else:
        features = _cached(cache, [*parts.values()], inputs, several=not isinstance(x, str))
    ids = [np.asarray(list(_values(part, client))) for part in parts.values()]
    few = dataset.select(range(min(FEW, len(dataset)))) if hasattr(dataset, "select") else None
    reads = [] if few is None else [lambda: [list(_values(few, name)) for name in (*inputs.values(), y)]]
    warn_about_chance("dataset", reads)
    origin = np.repeat(list(parts), [len(rows) for rows in ids])
    for split, part in given.items():
        if split in others:
            given[split] = origin == split
        elif isinstance(part, str):
            marked = np.asarray(list(_values(dataset, part)))
            given[split] = np.append(marked, np.zeros(len(origin) - len(marked), dtype=marked.dtype))
    source = {"name": "from_huggingface", "x": _plain(x), "y": y, "client": client}
    joined, labels = np.concatenate(ids), _columns(parts.values(), y)
    given["pad"] = pad
    return from_arrays(_one_or_all(x, features), labels, joined, **given, seed=seed, source=source)


def _inputs(x: Any) -> dict[str, str]:
    """Return the names of columns by those of inputs."""
    names = {x: x} if isinstance(x, str) else dict(x) if isinstance(x, Mapping) else x
    names = names if isinstance(names, dict) else {n: n for n in names} if isinstance(names, Sequence) else {}
    if not names or not all(isinstance(name, str) for pair in names.items() for name in pair):
        raise check.fail("x", x, "a name, a list of names, or a mapping from arguments of the model to names")
    return names


def _one_or_all(x: Any, features: dict[str, Any]) -> Any:
    """Return the one input that a single name asks for, else all by their names."""
    return features[x] if isinstance(x, str) else features


def _plain(x: Any) -> Any:
    """Return names in JSON terms."""
    return x if isinstance(x, str) else dict(x) if isinstance(x, Mapping) else list(x)


def read_npz(path: str | PathLike[str], keys: Iterable[str]) -> dict[str, NDArray[Any]]:
    """Return arrays of an archive; refuse a file that is missing, damaged, pickled or without a key."""
    file = path_of("path", path)
    if not file.is_file():
        raise check.fail("path", str(path), "a file that exists")
    with open(file, "rb") as opened:
        return _arrays(file, _archive(file, opened), tuple(keys))


def map_npz(path: str | PathLike[str], key: str) -> NDArray[Any]:
    """Return an array of an archive where it lies in the file, mapped into memory."""
    file = path_of("path", path)
    try:
        with zipfile.ZipFile(file) as archive, open(file, "rb") as opened:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            entry = archive.getinfo(f"{check.choice('key', key, names)}.npy")
            if entry.compress_type != zipfile.ZIP_STORED:
                raise check.fail("path", str(file), "an archive that is not compressed (numpy.savez)")
            opened.seek(entry.header_offset + 26)  # of the entry's own header: the lengths of name and extra
            name, extra = struct.unpack("<HH", opened.read(4))
            opened.seek(name + extra, 1)
            version = np.lib.format.read_magic(opened)
            read = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            shape, fortran, dtype = read(opened)
            order: Any = "F" if fortran else "C"
            if dtype.hasobject:
                raise check.fail("path", str(file), f"numbers under the key {key!r}, not pickled objects")
            return np.memmap(file, dtype, "r", opened.tell(), shape, order)
    except (OSError, zipfile.BadZipFile, EOFError, struct.error) as error:
        raise check.fail("path", str(path), f"a NumPy archive (.npz) that is whole ({error})") from None


def _archive(file: Path, opened: BinaryIO) -> np.lib.npyio.NpzFile:
    head = opened.read(6)
    opened.seek(0)
    if head == np.lib.format.MAGIC_PREFIX:
        raise check.fail("path", str(file), "an archive of named arrays (.npz), not a single array")
    if not head.startswith(b"PK"):  # NumPy would call it pickled
        raise check.fail("path", str(file), "a NumPy archive (.npz), not another kind of file")
    try:
        archive: np.lib.npyio.NpzFile = np.load(opened, allow_pickle=False)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise check.fail("path", str(file), f"a NumPy archive (.npz) that is whole ({error})") from None
    return archive


def _arrays(file: Path, archive: np.lib.npyio.NpzFile, keys: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    read = {}
    for key in keys:
        if key not in archive.files:
            keys_there = ", ".join(archive.files) or "no keys"
            allowed = f"an archive with the key {key!r}: no key {key!r}; it has {keys_there}"
            raise check.fail("path", str(file), allowed + check.meant(key, archive.files))
        try:
            read[key] = archive[key]
        except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            reason = f"key {key!r} is damaged or pickled ({error})"
            raise check.fail("path", str(file), f"an archive of whole arrays of numbers: {reason}") from None
    return read


def path_of(field: str, value: Any) -> Path:
    """Return the value as a path, if it is one."""
    if not isinstance(value, str | PathLike):
        raise check.fail(field, value, "a path")
    return Path(value)


def _users(path: str | PathLike[str]) -> dict[str, tuple[list[Any], list[Any]]]:
    place = path_of("path", path)
    files = sorted(place.glob("*.json")) if place.is_dir() else [place]
    if not files or not all(file.is_file() for file in files):
        raise check.fail("path", str(path), "a .json file, or a folder of them")
    users: dict[str, tuple[list[Any], list[Any]]] = {}
    for file in files:
        try:
            content = json.loads(file.read_bytes())
            for user in content["users"]:
                x, y = users.setdefault(str(user), ([], []))
                x += _list(content["user_data"][user]["x"])
                y += _list(content["user_data"][user]["y"])
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise check.fail(
                "path", str(file), f"LEAF's users and user_data with x and y ({reason})"
            ) from None
    return users


def _list(values: Any) -> list[Any]:
    if not isinstance(values, list):
        raise TypeError(f"{type(values).__name__} where a list of samples should be")
    return values


def _encode(field: str, values: list[Any], alphabet: str | None) -> Any:
    words = [value for value in values if isinstance(value, str)]
    if not words:
        return values
    if len(words) < len(values):
        raise check.fail(field, words[0], "text in all samples, or in none")
    if alphabet is None:
        raise check.fail(field, values[0], "numbers (text needs alphabet=...)")
    place = {letter: i for i, letter in enumerate(alphabet)}
    strange = {letter for text in values for letter in text} - set(alphabet)
    if strange:
        raise check.fail(field, "".join(sorted(strange)), "only characters of the alphabet")
    ids = [[place[letter] for letter in text] for text in values]
    return [i[0] for i in ids] if all(len(i) == 1 for i in ids) else ids


def _shaped(values: Any, user: str, shape: tuple[int, ...] | None) -> Column:
    x = arrays.column("x", values)
    if shape is None:
        return x
    if not isinstance(x, Tensor) or x[0].numel() != math.prod(shape):
        numbers = x[0].numel() if isinstance(x, Tensor) else "different"
        raise check.fail("shape", shape, f"{numbers} numbers in all, as the samples of user {user!r} have")
    return x.reshape(len(x), *shape)


def _joined(field: str, parts: list[Column]) -> Column:
    try:
        return columns.joined(parts)
    except RuntimeError as error:
        shapes = list(dict.fromkeys(str(columns.sample_shape(part)) for part in parts))
        raise check.fail(
            f"shapes of {field}", ", ".join(shapes[:3]), f"samples of one shape for all users ({error})"
        ) from None


def _values(dataset: Any, name: str) -> Any:
    columns = getattr(dataset, "column_names", None)
    if not isinstance(columns, list):
        raise check.fail("dataset", type(dataset).__name__, "a loaded Dataset (of a DatasetDict, one split)")
    check.choice("column", name, columns)
    return dataset[name]


def _cached(
    cache: str | PathLike[str], parts: list[Any], inputs: dict[str, str], several: bool
) -> dict[str, Any]:
    """Return columns from the files of a cache, each by the name of its input."""
    rows = [len(part) for part in parts]

    def blocks() -> Iterator[list[Column]]:
        for part, count in zip(parts, rows):
            for start in range(0, count, SAMPLES):
                some = part.select(range(start, min(start + SAMPLES, count)))
                yield [arrays.column(n, _column(some, n), several=several) for n in inputs.values()]

    versions = [str(getattr(part, "_fingerprint", "")) for part in parts]
    about = {"columns": [*inputs.values()], "rows": rows, "versions": versions}
    return dict(zip(inputs, cached(cache, about, sum(rows), blocks())))


def _columns(parts: Iterable[Any], name: str) -> Any:
    """Return a column of several datasets as one: a list, where sequences differ in length."""
    read = [_column(part, name) for part in parts]
    if all(isinstance(values, Tensor) for values in read) and len({v.shape[1:] for v in read}) == 1:
        return torch.cat(read)
    return [row for values in read for row in values]


def _column(dataset: Any, name: str) -> Any:
    """Return a column: a tensor, or a list of arrays where sequences differ in length."""
    values = _values(dataset, name)
    feature: Any = (getattr(dataset, "features", None) or {}).get(name)
    while hasattr(feature, "feature"):  # a list of ... of values
        feature = feature.feature
    dtype = str(getattr(feature, "dtype", ""))
    kept = dtype if dtype in ("uint8", "int8", "int16", "uint16", "int32", "float16", "float32") else None
    rows = list(values)
    if arrays.different_lengths(rows) is None:
        return arrays.stack(f"column {name!r}", rows, kept)
    return [np.asarray(row, kept) if kept and not isinstance(row, Tensor) else row for row in rows]
