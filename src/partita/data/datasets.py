"""Federated data from datasets of single samples, a dataset for each client."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from numbers import Number
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from partita.core import check
from partita.data import arrays, columns
from partita.data.build import Rows
from partita.data.cache import SAMPLES, cached, refuse_too_large
from partita.data.chance import FEW, warn_about_chance
from partita.data.columns import Columns, Ragged
from partita.data.federated import FederatedData
from partita.data.validation import SHARE

LABELS = ("labels", "label")  # what the target is called where a sample is one dictionary
LOADER = "its dataset, such as loader.dataset: batches are drawn by federate, and what collate_fn does to a "
LOADER += "sample belongs into the Dataset"
STREAM = "a Dataset with a length: write a stream to a file first, with numpy.save or as an Arrow dataset"


class Part(NamedTuple):
    """The samples of a client for one of its splits, and their name in messages."""

    client: int
    split: str
    place: str
    samples: Any


def from_datasets(
    datasets: Mapping[Any, Any],
    *,
    test: Any = 0.2,
    validation: Any = SHARE,
    pad: float | Mapping[str | int, float] = 0,
    cache: str | PathLike[str] | None = None,
    seed: int = 0,
) -> FederatedData:
    """Return data from one torch Dataset of (x, y) pairs, or one pair of arrays, per client name.

    x of a sample may be a tuple or a dictionary, for models with several inputs; a sample may also be one
    dictionary with its target under "labels" or "label". Sequences may differ in length, see `from_arrays`.
    `test` is the fraction of each client's samples, or such a mapping for the clients that have a test set;
    `validation` is the fraction of each client's training samples that is held out, or such a mapping.
    Datasets are read once: a random transform is drawn once for each sample, which is said in a warning.
    `cache` is a folder for more samples than memory holds: they are written there, a few at a time, and stay
    in its files; another call with the same datasets reads those.
    """
    if not isinstance(datasets, Mapping) or not datasets:
        raise check.fail("datasets", datasets, "a mapping from client names to a Dataset or a pair (x, y)")
    names = {name: i for i, name in enumerate(datasets)}
    parts = [Part(i, "train", f"datasets[{name!r}]", datasets[name]) for name, i in names.items()]
    given = {"validation": validation, "test": test}
    for split, part in given.items():
        if isinstance(part, Mapping):
            for name in part:
                if name not in names:
                    raise check.fail(split, name, f"names of clients{check.meant(name, map(str, names))}")
            parts += [Part(names[name], split, f"{split}[{name!r}]", part[name]) for name in part]
            given[split] = None
    parts = [part for part in parts if _length(part)]
    if not parts:
        raise check.fail("datasets", datasets, "at least one sample")
    read = [part.samples for part in parts if not _is_pair(part.samples)][:FEW]
    rows = Rows()
    for part in parts:
        rows.add(part.client, None, range(_length(part)), part.split)
    if cache is None:
        blocks = list(_blocks(parts, large=False))
        x, y = columns.together([x for x, _ in blocks]), columns.joined([y for _, y in blocks])
    else:
        x, y = _cached(cache, parts, len(rows.owner), [*map(str, names)])
    warn_about_chance("datasets", [partial(_first, samples) for samples in read])
    x = arrays.padded_with(x, pad)
    return rows.assembled(x, y, [*map(str, names)], {"name": "from_datasets"}, seed=seed, **given)


def _length(part: Part) -> int:
    """Return how many samples there are; refuse what has no length, or gives batches."""
    samples = part.samples
    if isinstance(samples, DataLoader):
        raise check.fail(part.place, type(samples).__name__, LOADER)
    if isinstance(samples, IterableDataset):
        raise check.fail(part.place, type(samples).__name__, STREAM)
    if _is_pair(samples):
        return len(columns.listed(_pair(part)[0])[0])
    if hasattr(samples, "__len__") and hasattr(samples, "__getitem__"):
        return len(samples)
    raise check.fail(part.place, samples, "a Dataset with a length, or a pair (x, y)")


def _blocks(parts: list[Part], large: bool) -> Iterator[tuple[Columns, Tensor | Ragged]]:
    """Yield x and y of all samples in turn, all of one kind: of a client, or `large` ones a few at a time."""
    first: list[Columns] = []
    rows = sum(len(part.samples) for part in parts if not _is_pair(part.samples))
    for part in parts:
        n = _length(part)
        step = SAMPLES if large and not _is_pair(part.samples) else n
        for start in range(0, n, step):
            x, y = _read(part, range(start, min(start + step, n)), 0 if large or first else rows)
            first = first or [x, y]
            _check_like("x", part.place, x, first[0])
            _check_like("y", part.place, y, first[1])
            yield x, y


def _cached(
    cache: str | PathLike[str], parts: list[Part], rows: int, names: list[str]
) -> tuple[Columns, Tensor | Ragged]:
    """Return x from the files of a cache, and y."""
    blocks = ((*columns.listed(x), y) for x, y in _blocks(parts, large=True))
    *inputs, targets = cached(cache, _about(parts, names), rows, blocks)
    like = _read(parts[0], range(1))[0]
    several = isinstance(like, tuple | dict)
    read = [arrays.column("x", values, several=several) for values in inputs]
    return columns.rebuilt(like, read), arrays.targets(np.array(targets))


def _about(parts: list[Part], names: list[str]) -> dict[str, Any]:
    """Return what tells datasets from others: names, lengths, and the first and last sample of some."""
    digest = hashlib.sha256()
    for part in (*parts[:FEW], parts[-1]):
        for i in (0, _length(part) - 1):
            x, y = _read(part, range(i, i + 1))
            for column in (*columns.listed(x), y):
                kept = columns.read(column, torch.arange(1))
                digest.update(str((kept.dtype, kept.shape)).encode())
                digest.update(kept.contiguous().numpy().tobytes())
    lengths = [[part.client, part.split, _length(part)] for part in parts]
    return {"names": names, "parts": lengths, "samples": digest.hexdigest()}


def _is_pair(dataset: Any) -> bool:
    """Return whether it is two arrays x and y, and not a Dataset or a list of samples."""
    if not isinstance(dataset, tuple | list) or len(dataset) != 2:
        return False
    return not all(_is_sample(value, isinstance(dataset, list)) for value in dataset)


def _is_sample(value: Any, listed: bool) -> bool:
    """Return whether it is one sample: a dictionary, or (x, y) with a number for y or in a list of tuples."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        return isinstance(value, Mapping)
    x, y = value
    return not _is_number(x) and (_is_number(y) or (listed and isinstance(value, tuple)))


def _is_number(value: Any) -> bool:
    return isinstance(value, Number | np.generic) or getattr(value, "ndim", 1) == 0


def _first(dataset: Any) -> list[Any]:
    """Return the first few samples."""
    return [dataset[i] for i in range(min(FEW, len(dataset)))]


def _pair(part: Part) -> tuple[Columns, Tensor | Ragged]:
    """Return x and y of two arrays."""
    x, y = arrays.features(part.samples[0], single=True), arrays.targets(part.samples[1], single=True)
    try:
        arrays.same_rows(x, y)
    except check.Refused as error:
        raise error.within(part.place) from None
    return x, y


def _read(part: Part, numbers: range, rows: int = 0) -> tuple[Columns, Tensor | Ragged]:
    """Return x and y of some samples of a client; refuse `rows` of them where that is too many."""
    dataset = part.samples
    if _is_pair(dataset):
        (x, y), chosen = _pair(part), torch.arange(numbers.start, numbers.stop)
        targets = columns.packed(y, chosen)
        return columns.each(lambda column: columns.select(column, chosen), x), targets
    samples = []
    for i in numbers:
        samples.append(_sample(part.place, dataset, dataset[i]))
        if rows and len(samples) == 1:
            refuse_too_large("datasets", _stacked(f"x of {part.place}", [samples[0][0]]), rows)
    x = _stacked(f"x of {part.place}", [s[0] for s in samples])
    y = arrays.targets(_stacked_column(f"y of {part.place}", [s[1] for s in samples]))
    return x, y


def _sample(field: str, dataset: Any, sample: Any) -> tuple[Any, Any]:
    """Return x and y of one sample."""
    if isinstance(sample, Mapping):
        label = next((name for name in LABELS if name in sample), None)
        if label is None or len(sample) < 2:
            names = ", ".join(map(repr, sample))
            raise check.fail(f"a sample of {field}", names, "inputs, and the target as 'labels' or 'label'")
        return {name: values for name, values in sample.items() if name != label}, sample[label]
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise check.fail(field, dataset, "samples that are pairs (x, y)")
    return sample[0], sample[1]


def _stacked(field: str, samples: list[Any]) -> Columns:
    """Return x of all samples; those of several inputs have the same ones."""
    first: Any = samples[0] if samples else None
    if not arrays.is_several(first):
        return arrays.features(_stacked_column(field, samples), single=True)
    keys = list(first) if isinstance(first, Mapping) else range(len(first))
    for sample in samples:
        theirs = list(sample) if isinstance(sample, Mapping) else range(len(sample))
        if type(sample) is not type(first) or theirs != keys:
            raise check.fail(f"inputs in {field}", theirs, f"{list(keys)} in every sample")
    inputs: dict[Any, Any] = {key: [sample[key] for sample in samples] for key in keys}
    kept = arrays.sequences(inputs) if isinstance(first, Mapping) else {}
    for key in keys:
        inputs[key] = inputs[key] if key in kept else _stacked_column(f"{field}[{key!r}]", inputs[key])
    return arrays.features(inputs if isinstance(first, Mapping) else tuple(inputs.values()), single=True)


def _stacked_column(field: str, values: list[Any]) -> Any:
    """Return one input of all samples; sequences of different lengths as they are."""
    return values if arrays.different_lengths(values) is not None else arrays.stack(field, values)


def _check_like(field: str, place: str, values: Columns, first: Columns) -> None:
    """Refuse what cannot stand under the first client's rows, so that no dtype changes silently."""
    ours, theirs = columns.named(first, field), columns.named(values, field)
    if [name for name, _ in ours] != [name for name, _ in theirs]:
        got, want = (", ".join(name for name, _ in named) for named in (theirs, ours))
        raise check.fail(f"{field} of {place}", got, f"{want} as of the first client")
    for (name, column), (_, other) in zip(theirs, ours):
        ragged = any(isinstance(c, Ragged) for c in (column, other)) or columns.is_ids(column)
        one, two = ((c.dtype, columns.sample_shape(c)[ragged:]) for c in (column, other))
        if one != two:
            got, want = (f"{kind} {shape}" for kind, shape in (one, two))
            raise check.fail(f"{name} of {place}", got, f"{want} as of the first client")
