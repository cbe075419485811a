"""Samples that are read once into files, and mapped from there: for more than memory holds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partita.core import check
from partita.data import columns
from partita.data.columns import Column, Columns, Ragged

SAMPLES = 256  # that are read, and written, at a time
SHARE = 0.5  # of the machine's memory that samples may take without a cache
INDEX = "samples.json"


def cached(
    folder: str | PathLike[str],
    about: Mapping[str, Any],
    rows: int,
    blocks: Iterator[Sequence[Column]],
) -> list[NDArray[Any]]:
    """Return columns from the files of a folder, after writing them there unless they are.

    `about` tells samples from others: a folder that holds others is refused. A column becomes a file.
    """
    place = check.path("cache", folder)
    index = place / INDEX
    if not index.exists():
        unfinished = {path.name for path in place.iterdir()} if place.exists() else set()
        if not all(name.endswith(".partial") for name in unfinished):
            raise check.fail("cache", str(folder), "a new or empty folder, or one that holds a cache")
        place.mkdir(parents=True, exist_ok=True)
        count = _write(place, rows, blocks)
        partial = index.with_suffix(".partial")
        partial.write_text(json.dumps({"about": about, "columns": count}))
        os.replace(partial, index)
    content = json.loads(index.read_text())
    if content["about"] != json.loads(json.dumps(about)):
        raise check.fail("cache", str(folder), "another folder: this one holds other samples")
    return [np.load(_path(place, i), mmap_mode="r") for i in range(content["columns"])]


def _write(place: Path, rows: int, blocks: Iterator[Sequence[Column]]) -> int:
    """Write blocks of samples one after another, and return how many columns they have."""
    files: list[NDArray[Any]] = []
    at = 0
    for block in blocks:
        if any(isinstance(c, Ragged) and not bool((c.length == c.length[0]).all()) for c in block):
            raise _refusal(place)
        tensors = [columns.read(column, torch.arange(len(column))) for column in block]
        files = files or [_new_file(place, i, rows, tensor) for i, tensor in enumerate(tensors)]
        for file, tensor in zip(files, tensors, strict=True):
            if file.shape[1:] != tensor.shape[1:]:
                raise _refusal(place)
            file[at : at + len(tensor)] = tensor.numpy()
        at += len(tensors[0])
    count = len(files)
    del files  # written, and closed
    for i in range(count):
        os.replace(_path(place, i).with_suffix(".partial"), _path(place, i))
    return count


def _refusal(place: Path) -> check.Refused:
    allowed = "no cache, or samples that the Dataset pads to one length, with their attention_mask"
    reason = "sequences of different lengths are kept in memory"
    return check.fail("cache", str(place), allowed, reason)


def _path(place: Path, number: int) -> Path:
    return place / f"column-{number}.npy"


def _new_file(place: Path, number: int, rows: int, like: Tensor) -> NDArray[Any]:
    """Return a new file for so many rows, mapped for writing."""
    path, shape = _path(place, number).with_suffix(".partial"), (rows, *like.shape[1:])
    return np.lib.format.open_memmap(path, mode="w+", dtype=like.numpy().dtype, shape=shape)


def refuse_too_large(field: str, sample: Columns, rows: int) -> None:
    """Refuse to read more into memory than it can be expected to hold."""
    size = rows * sum(map(columns.row_bytes, columns.listed(sample)))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > SHARE * memory:
        allowed = "samples that fit into memory, or cache=FOLDER, where they are written once and mapped from"
        raise check.fail(field, f"about {size / 2**30:.1f} GiB", allowed)
