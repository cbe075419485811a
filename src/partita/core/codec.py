"""Bytes of messages: what a client sends, as it would cross a network.

    message → pack → bytes → unpack → message          bit for bit

The layout (names, types, shapes, bits of an entry) follows from the experiment, so that both sides know it
and nothing of it is sent: no header, no names. Tensors follow one another in the order of the message, each
from a whole byte on, little-endian. Whole numbers that need fewer bits than their type has are packed, the
lowest bit first.

What is unpacked may come from anybody: its length is checked before anything is made of it, whole numbers
must be below what their layout allows, and bits that fill up a last byte must be 0. Floating-point numbers
may be anything, NaN as well: the server screens them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from partita.core import check
from partita.core.types import Message, Tensors

CHUNK = 1 << 16
"""Entries that are packed at a time: a multiple of 8, so that each chunk begins with a whole byte."""


class Entry(NamedTuple):
    """One tensor of a message.

    path    its name, and `number` whether it is one of the message's numbers, or of the rest
    bits    how many an entry takes
    below   what each entry is less than (None: anything goes)
    """

    path: str
    number: bool
    dtype: torch.dtype
    shape: tuple[int, ...]
    bits: int
    below: int | None = None

    @property
    def entries(self) -> int:
        """How many entries the tensor has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes that it takes."""
        return -(-self.entries * self.bits // 8)

    @property
    def packed(self) -> bool:
        """Whether an entry takes fewer bits than its type has."""
        return self.bits < 8 * self.dtype.itemsize


Entries = tuple[Entry, ...]
"""The layout of a message: its tensors in the order in which they are sent."""


# ---- layouts


def layout_of(
    message: Message, bits: Mapping[str, int] | None = None, below: Mapping[str, int] | None = None
) -> Entries:
    """Return the layout of messages with these names, types and shapes.

    bits    how many an entry takes, by path, where they are fewer than those of its type
    below   what whole numbers are less than, by path, where that is less than their bits allow
    """
    bits, below = bits or {}, below or {}
    if twice := set(message.numbers) & set(message.rest):
        raise check.fail("message", min(twice), "each path once, in the numbers or in the rest")
    return tuple(
        _entry(path, number, value, bits.get(path), below.get(path))
        for number, part in ((True, message.numbers), (False, message.rest))
        for path, value in part.items()
    )


def _entry(path: str, number: bool, value: Tensor, bits: int | None, below: int | None) -> Entry:
    dtype, whole = value.dtype, not (value.is_floating_point() or value.is_complex())
    full = 8 * dtype.itemsize
    width = full if bits is None else check.integer(f"bits of {path}", bits, low=0, high=full)
    if not whole and (width < full or below is not None):
        raise check.fail(path, dtype, "whole numbers, where entries are packed or have a limit")
    if dtype == torch.bool:
        below = 2 if below is None else min(below, 2)
    elif below is not None:
        below = check.integer(f"limit of {path}", below, low=1, high=1 << width)
    elif width < full:
        below = 1 << width
    return Entry(path, number, dtype, tuple(value.shape), width, below)


def size(layout: Iterable[Entry]) -> int:
    """Return the bytes of a message with this layout."""
    return sum(entry.nbytes for entry in layout)


# ---- bytes of a message


def pack(message: Message, layout: Entries) -> bytes:
    """Return the bytes of a message; refuse one that its layout does not describe."""
    given = [(path, True) for path in message.numbers] + [(path, False) for path in message.rest]
    expected = [(entry.path, entry.number) for entry in layout]
    if sorted(given) != sorted(expected):
        odd = sorted({path for path, _ in set(given) ^ set(expected)})
        raise check.fail("message", odd, "the paths of its layout")
    parts = {**message.numbers, **message.rest}
    return b"".join(_bytes_of(parts[entry.path], entry) for entry in layout)


def unpack(
    data: bytes | bytearray | memoryview, layout: Entries, device: torch.device | str = "cpu"
) -> Message:
    """Return the message of these bytes; refuse what no message with this layout has as its bytes."""
    view = memoryview(data).cast("B")
    if len(view) != size(layout):
        raise check.fail("data", f"{len(view)} bytes", f"the {size(layout)} bytes of its layout")
    numbers: Tensors = {}
    rest: Tensors = {}
    at = 0
    for entry in layout:
        part = numbers if entry.number else rest
        part[entry.path] = _tensor_of(view[at : at + entry.nbytes], entry).to(device)
        at += entry.nbytes
    return Message(numbers, rest)


def _bytes_of(value: Tensor, entry: Entry) -> bytes:
    """Return the bytes of one tensor."""
    if value.dtype != entry.dtype or tuple(value.shape) != entry.shape:
        raise check.fail(
            entry.path,
            f"{value.dtype} of shape {tuple(value.shape)}",
            f"{entry.dtype} of shape {entry.shape}",
        )
    flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if entry.below is not None:
        _check_range(flat.numpy(), entry)
    if entry.packed:
        return _squeezed(flat.numpy(), entry.bits)
    return _little_endian(flat.view(torch.uint8).numpy(), entry.dtype).tobytes()


def _tensor_of(data: memoryview, entry: Entry) -> Tensor:
    """Return the tensor of its bytes."""
    if not entry.entries:
        return torch.empty(entry.shape, dtype=entry.dtype)
    raw = np.frombuffer(data, dtype=np.uint8)
    if entry.packed:
        values = _widened(raw, entry)
        _check_range(values, entry)
        return torch.from_numpy(values.astype(np.int64)).to(entry.dtype).reshape(entry.shape)
    own = bytearray(_little_endian(raw, entry.dtype).tobytes())
    if entry.dtype == torch.bool:  # a byte beyond 1 would be neither true nor false
        _check_range(np.frombuffer(own, dtype=np.uint8), entry)
    value = torch.frombuffer(own, dtype=entry.dtype).reshape(entry.shape)
    if entry.below is not None:
        _check_range(value.numpy(), entry)
    return value


def _check_range(values: np.ndarray, entry: Entry) -> None:
    """Refuse whole numbers beyond what the layout allows."""
    assert entry.below is not None
    if values.size and (int(values.min()) < 0 or int(values.max()) >= entry.below):
        worst = int(values.min()) if int(values.min()) < 0 else int(values.max())
        raise check.fail(entry.path, worst, f"whole numbers from 0 up to {entry.below - 1}")


def _little_endian(raw: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return the bytes of numbers with the lowest first, or such bytes as this machine has them."""
    word = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
    return raw if sys.byteorder == "little" else raw.reshape(-1, word)[:, ::-1]


def _squeezed(values: np.ndarray, bits: int) -> bytes:
    """Return whole numbers as a stream of so many bits each."""
    pieces = []
    for start in range(0, values.size, CHUNK):
        words = values[start : start + CHUNK].astype("<u8").view(np.uint8).reshape(-1, 8)
        each = np.unpackbits(words, axis=1, count=bits, bitorder="little")
        pieces.append(np.packbits(each.reshape(-1), bitorder="little").tobytes())
    return b"".join(pieces)


def _widened(raw: np.ndarray, entry: Entry) -> np.ndarray:
    """Return the whole numbers of a stream of bits."""
    values = np.zeros(entry.entries, dtype=np.uint64)
    for start in range(0, entry.entries if entry.bits else 0, CHUNK):
        count = min(CHUNK, entry.entries - start)
        begin = start * entry.bits // 8
        some = np.unpackbits(raw[begin : begin + -(-count * entry.bits // 8)], bitorder="little")
        if some[count * entry.bits :].any():
            raise check.fail(entry.path, "other bits", "bits of 0 after the last entry")
        words = np.zeros((count, 64), dtype=np.uint8)
        words[:, : entry.bits] = some[: count * entry.bits].reshape(count, entry.bits)
        values[start : start + count] = np.packbits(words, axis=1, bitorder="little").view("<u8")[:, 0]
    return values
