"""Messages: what is packed comes back, and what does not add up is refused before anything is made of it."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from partita.deploy.wire import EMPTY, TYPES, Body, Malformed, as_tensor, pack, part_of, unpack, within
from support import each

LIMIT = 1 << 20
ABOUT = {"__metadata__": {"partita": "{}"}}


def some(dtype: torch.dtype) -> Tensor:
    return torch.arange(6).reshape(2, 3).to(dtype)


def test_what_is_packed_comes_back() -> None:
    tensors = {str(dtype): some(dtype) for dtype in TYPES.values()}
    tensors |= {"number": torch.tensor(2.5), "nothing": torch.zeros(3, 0), "turned": some(torch.float32).T}
    head = {"kind": "train", "event": 1 << 60, "list": [1, None, "é"], "score": float("nan")}
    found, back = unpack(pack(head, Body.of(tensors)), LIMIT)
    assert found["event"] == 1 << 60
    assert found["list"] == [1, None, "é"]
    assert list(back) == list(tensors)
    for name, value in tensors.items():
        assert back[name].dtype == value.dtype
        assert torch.equal(back[name], value)
    assert unpack(pack({}, EMPTY), LIMIT) == ({}, {})


def test_it_is_safetensors() -> None:
    tensors = {"a": some(torch.float32), "b": some(torch.int64), "none": torch.zeros(0)}
    theirs = load(pack({"kind": "x"}, Body.of(tensors)))
    assert all(torch.equal(theirs[name], value) for name, value in tensors.items())
    head, ours = unpack(save({"a": tensors["a"]}, {"partita": json.dumps({"kind": "y"})}), LIMIT)
    assert head == {"kind": "y"}
    assert torch.equal(ours["a"], tensors["a"])


def test_tensors_are_copies() -> None:
    message = bytearray(pack({}, Body.of({"a": some(torch.float32)})))
    _, back = unpack(bytes(message), LIMIT)
    back["a"].zero_()
    assert float(unpack(bytes(message), LIMIT)[1]["a"].sum()) == 15.0


def made(about: Any, data: bytes = b"", length: int | None = None) -> bytes:
    header = about if isinstance(about, bytes) else json.dumps(about).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> Any:
    return {**ABOUT, "x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}, **more}


WRONG: dict[str, bytes] = {
    "too long": bytes(LIMIT + 1),
    "too short": b"1234567",
    "a header beyond the end": made(ABOUT, length=1 << 40),
    "a header that is too long": made(b" " * (LIMIT + 1))[:LIMIT],
    "no JSON": made(b"{"),
    "no object": made([1]),
    "no metadata": made({}),
    "no head": made({"__metadata__": {}}),
    "a head of another kind": made({"__metadata__": {"partita": "[1]"}}),
    "depth": made(b"[" * 100_000),
    "digits": made(b"9" * 100_000),
    "another type": made(entry("C64"), bytes(8)),
    "a type that is no word": made(entry(["F32"]), bytes(8)),
    "a negative axis": made(entry(shape=(-2,)), bytes(8)),
    "an axis of half an entry": made(entry(shape=(0.5,)), bytes(8)),
    "a shape that is true": made(entry(shape=(True, 2)), bytes(8)),
    "more entries than bytes": made(entry(shape=(1 << 40,), offsets=(0, 1 << 42)), bytes(8)),
    "an overflow": made(entry(shape=(1 << 47, 1 << 47, 1 << 47), offsets=(0, 8)), bytes(8)),
    "an impossible empty one": made(entry(shape=(1 << 47, 1 << 47, 0), offsets=(0, 0))),
    "many axes": made(entry(shape=(1,) * 17, offsets=(0, 4)), bytes(4)),
    "a gap": made(entry(offsets=(4, 12)), bytes(12)),
    "an overlap": made(entry(y={"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}), bytes(12)),
    "bytes of nobody": made(entry(), bytes(9)),
    "too few bytes": made(entry(), bytes(7)),
    "three offsets": made(entry(offsets=(0, 8, 8)), bytes(8)),
    "no entry": made({**ABOUT, "x": 7}),
    "neither true nor false": made(entry("BOOL", (2,), (0, 2)), b"\x00\x02"),
}


@each("name", WRONG)
def test_what_does_not_add_up_is_refused(name: str) -> None:
    with pytest.raises(Malformed) as error:
        unpack(WRONG[name], LIMIT)
    assert len(str(error.value)) < 300
    assert str(error.value).isprintable()


def test_parts_of_tensors() -> None:
    tensors = {**within("shared", {"a/b": some(torch.int8)}), **within("extra", {"a": some(torch.int8)})}
    assert list(tensors) == ["shared/a/b", "extra/a"]
    assert list(part_of(tensors, "shared")) == ["a/b"]
    assert as_tensor(b"").numel() == 0
    assert as_tensor(b"\x01\xff").tolist() == [1, 255]
