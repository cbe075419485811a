"""Rows that stay in a file, which is mapped into memory."""

from __future__ import annotations

import mmap
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class FilePart(NamedTuple):
    """Where an array is in a file: its type and shape, rows one after another from this byte on."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, array: np.memmap[Any, Any]) -> FilePart | None:
        """Return where a mapped array is; None where its rows are not one after another."""
        if array.filename is None or not array.flags.c_contiguous or not array.size:
            return None
        mapped = np.frombuffer(array._mmap, np.uint8)  # type: ignore[attr-defined]
        begin = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY  # where the mapping begins
        offset = begin + array.ctypes.data - mapped.ctypes.data
        return cls(str(array.filename), array.dtype.str, array.shape, offset)

    def open(self) -> Tensor:
        """Return the array, mapped."""
        return not_writable(np.memmap(self.path, self.dtype, "r", self.offset, self.shape))


def not_writable(array: NDArray[Any]) -> Tensor:
    """Return an array that must not be written to as a tensor over its memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


@dataclass(frozen=True, eq=False)
class Mapped:
    """Rows of a file that is mapped into memory: each is read when it is asked for, and never all of them.

    Row i is `values[rows[i]]`, and has this `dtype` when it is read. `file` tells where the values are, so
    that another process maps them too, and gets no copy.
    """

    values: Tensor
    rows: Tensor
    dtype: torch.dtype
    file: FilePart | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __reduce__(self) -> Any:
        if self.file is None:
            return Mapped, (self.values, self.rows, self.dtype)
        return _mapped_again, (self.file, self.rows, self.dtype)

    @property
    def shape(self) -> torch.Size:
        """The shape that it has as a tensor."""
        return torch.Size((len(self), *self.values.shape[1:]))


def _mapped_again(file: FilePart, rows: Tensor, dtype: torch.dtype) -> Mapped:
    return Mapped(file.open(), rows, dtype, file)
