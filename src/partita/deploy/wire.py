"""Messages between server and clients: safetensors with a JSON header in its metadata.

    length of the header, header, the memory of tensors one after another

What is unpacked may come from anybody. Its length is checked first, then the header: names, types and shapes
must account for every byte that follows. Only then are tensors made of it, of as many bytes as have come.
Nothing is unpickled, and no code travels.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from partita.core.types import Tensors

TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {kind: name for name, kind in TYPES.items()}
HEAD = "partita"
MOST_HEADER = 1 << 20
"""Bytes of a header."""
MOST_DIMENSIONS = 16
ALIGNED = 8


class Malformed(ValueError):
    """Raised for bytes that are no message of ours; it says why."""


class Body(NamedTuple):
    """Tensors as they are sent: what the header says of them, and their memory."""

    entries: dict[str, Any]
    data: bytes

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Body:
        """Return the body of named tensors."""
        entries: dict[str, Any] = {}
        pieces, at = [], 0
        for name, value in tensors.items():
            flat = value.detach().cpu().contiguous().reshape(-1)
            piece = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
            shape, end = list(value.shape), at + len(piece)
            entries[name] = {"dtype": NAMES[value.dtype], "shape": shape, "data_offsets": [at, end]}
            pieces.append(piece)
            at = end
        return cls(entries, b"".join(pieces))


EMPTY = Body({}, b"")


def segments(head: Mapping[str, Any], body: Body = EMPTY) -> tuple[bytes, bytes]:
    """Return a message as two buffers: its head, and the memory of its tensors, which many may share."""
    header = json.dumps({"__metadata__": {HEAD: json.dumps(head)}, **body.entries}).encode()
    header += b" " * (-len(header) % ALIGNED)
    return struct.pack("<Q", len(header)) + header, body.data


def pack(head: Mapping[str, Any], body: Body = EMPTY) -> bytes:
    """Return a message: its head, and tensors."""
    return b"".join(segments(head, body))


def unpack(message: bytes, limit: int) -> tuple[dict[str, Any], Tensors]:
    """Return the head and the tensors of a message of at most so many bytes, or raise `Malformed`."""
    if len(message) > limit:
        raise Malformed(f"a message of {len(message)} bytes, at most {limit} are allowed")
    if len(message) < ALIGNED:
        raise Malformed(f"{len(message)} bytes, which are no message")
    (length,) = struct.unpack_from("<Q", message)
    if length > MOST_HEADER or ALIGNED + length > len(message):
        raise Malformed("a header longer than its message, or than a header may be")
    start = ALIGNED + length
    try:
        about = json.loads(message[ALIGNED:start])
        head = json.loads(about.pop("__metadata__")[HEAD])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Malformed(f"no header of Partita ({type(error).__name__})") from None
    if not isinstance(head, dict):
        raise Malformed("a head that is no object")
    view = memoryview(message)[start:]
    ends = [0]
    tensors = {name: _tensor(name, entry, view, ends) for name, entry in about.items()}
    if ends[-1] != len(view):
        raise Malformed(f"{len(view)} bytes of tensors, of which {ends[-1]} are described")
    return head, tensors


def _tensor(name: str, entry: Any, view: memoryview, ends: list[int]) -> Tensor:
    """Return one tensor, which begins where the one before has ended."""
    fields = entry if isinstance(entry, dict) else {}
    kind, shape, offsets = (fields.get(k) for k in ("dtype", "shape", "data_offsets"))
    dtype = TYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None or not _whole(shape, MOST_DIMENSIONS) or not _whole(offsets, 2):
        raise Malformed(f"{printable(name)} without type, shape and place")
    assert isinstance(shape, list)
    assert isinstance(offsets, list)
    if offsets != [ends[-1], ends[-1] + math.prod(shape) * dtype.itemsize] or offsets[1] > len(view):
        raise Malformed(f"{printable(name)} at another place than its shape says")
    ends.append(offsets[1])
    raw = np.frombuffer(view[offsets[0] : offsets[1]], dtype=np.uint8)
    if dtype == torch.bool and raw.size and raw.max() > 1:  # neither true nor false
        raise Malformed(f"{printable(name)} with other values than true and false")
    if not raw.size:
        return _empty(name, shape, dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)


def _empty(name: str, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor without entries."""
    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError:  # the other axes are longer than any memory
        raise Malformed(f"{printable(name)} of an impossible shape") from None


def _whole(values: Any, most: int) -> bool:
    """Return whether it is a list of at most so many whole numbers from 0, none of them beyond any memory."""
    if not isinstance(values, list) or len(values) > most:
        return False
    return all(type(v) is int and 0 <= v < 1 << 48 for v in values)


def printable(value: object) -> str:
    """Return a few printable characters of what came from outside."""
    return "".join(c if c.isprintable() else "?" for c in str(value)[:60])


def as_tensor(data: bytes) -> Tensor:
    """Return bytes, there may be none, as a tensor of them."""
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


# ---- tensors of several parts


def within(part: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """Return tensors under the name of a part: 'shared/fc.weight'."""
    return {f"{part}/{name}": value for name, value in tensors.items()}


def part_of(tensors: Mapping[str, Tensor], part: str) -> Tensors:
    """Return the tensors of a part by their own names."""
    prefix = f"{part}/"
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
