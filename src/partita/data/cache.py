"""Samples that are read once into files, and mapped from there: for more than memory holds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partita.core import check
from partita.data import arrays, columns
from partita.data.columns import Column, Columns, Ragged

SAMPLES = 256  # that are read, and written, at a time
SHARE = 0.5  # of the machine's memory that samples may take without a cache
INDEX = "samples.json"


def cached(
    folder: str | PathLike[str],
    about: Mapping[str, Any],
    rows: int,
    blocks: Iterator[tuple[Columns, Tensor | Ragged]],
) -> tuple[Columns, Tensor]:
    """Return x and y from the files of a folder, after writing them there unless they are.

    `about` tells samples from others: a folder that holds others is refused.
    """
    place = check.path("cache", folder)
    index = place / INDEX
    if not index.exists():
        if place.exists() and any(place.iterdir()):
            raise check.fail(
                "cache", str(folder), "a new or empty folder, or one that a cache was written to"
            )
        place.mkdir(parents=True, exist_ok=True)
        structure = _write(place, rows, blocks)
        partial = index.with_suffix(".partial")
        partial.write_text(json.dumps({"about": about, "inputs": structure}))
        os.replace(partial, index)
    content = json.loads(index.read_text())
    if content["about"] != json.loads(json.dumps(about)):
        raise check.fail("cache", str(folder), "another folder, or this one without its files: it has others")
    return _opened(place, content["inputs"]), torch.from_numpy(np.load(place / "y.npy"))


def _write(place: Path, rows: int, blocks: Iterator[tuple[Columns, Tensor | Ragged]]) -> Any:
    """Write blocks of samples one after another, and return the structure of the inputs."""
    files: list[NDArray[Any]] = []
    structure: Any = None
    at = 0
    for x, y in blocks:
        parts: list[Column] = [*columns.listed(x), y]
        if any(isinstance(part, Ragged) for part in parts):
            raise check.fail("cache", str(place), "None: sequences of different lengths are kept in memory")
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if not files:
            structure = list(x) if isinstance(x, dict) else len(x) if isinstance(x, tuple) else None
            files = [_file(place, i, rows, t, len(tensors) - 1) for i, t in enumerate(tensors)]
        for file, tensor in zip(files, tensors, strict=True):
            file[at : at + len(tensor)] = tensor.numpy()
        at += len(parts[-1])
    for file in files:
        file.flush()  # type: ignore[attr-defined]
    return structure


def _file(place: Path, number: int, rows: int, like: Tensor, last: int) -> NDArray[Any]:
    """Return a new file for so many rows, mapped for writing."""
    path = place / ("y.npy" if number == last else f"x{number}.npy")
    shape, kind = (rows, *like.shape[1:]), like.numpy().dtype
    return np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=shape)


def _opened(place: Path, structure: Any) -> Columns:
    count = 1 if structure is None else structure if isinstance(structure, int) else len(structure)
    several = structure is not None
    read = [np.load(place / f"x{i}.npy", mmap_mode="r") for i in range(count)]
    inputs = [arrays.column(f"x[{i}]", array, several=several) for i, array in enumerate(read)]
    if structure is None:
        return inputs[0]
    return dict(zip(structure, inputs)) if isinstance(structure, list) else tuple(inputs)


def refuse_too_large(field: str, sample: Columns, rows: int) -> None:
    """Refuse to read more into memory than it can be expected to hold."""
    size = rows * sum(map(columns.row_bytes, columns.listed(sample)))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > SHARE * memory:
        allowed = "samples that fit into memory, or cache=FOLDER, where they are written once and mapped from"
        raise check.fail(field, f"about {size / 2**30:.1f} GiB", allowed)
