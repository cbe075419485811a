"""Messages as bytes: back bit for bit, as long as the layout says, and nothing else is taken."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from partita.core import check, codec
from partita.core.types import Message
from support import each

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64)
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Return a tensor of any bits: NaN of all kinds, infinities, the smallest numbers."""
    dtype, shape = draw(st.sampled_from((*FLOATS, *WHOLE, torch.bool))), draw(SHAPES)
    count = math.prod(shape)
    if dtype == torch.bool:
        flags = draw(st.lists(st.booleans(), min_size=count, max_size=count))
        return torch.tensor(flags, dtype=torch.bool).reshape(shape)
    size = count * dtype.itemsize
    raw = bytearray(draw(st.binary(min_size=size, max_size=size)))
    return torch.frombuffer(raw, dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)


@st.composite
def packed(draw: st.DrawFn) -> tuple[Tensor, int, int | None]:
    """Return whole numbers of a few bits, and below what they are."""
    dtype = draw(st.sampled_from((torch.uint8, torch.int32, torch.int64)))
    bits = draw(st.integers(1, min(8 * dtype.itemsize, 40) - 1))
    below = draw(st.none() | st.integers(1, 1 << bits))
    shape = draw(SHAPES)
    values = st.integers(0, (below or 1 << bits) - 1)
    numbers = draw(st.lists(values, min_size=math.prod(shape), max_size=math.prod(shape)))
    return torch.tensor(numbers, dtype=dtype).reshape(shape), bits, below


def bits_of(x: Tensor) -> bytes:
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(one: Message, other: Message) -> None:
    for a, b in zip(one, other):
        assert list(a) == list(b)
        for k, x in a.items():
            assert (x.dtype, x.shape) == (b[k].dtype, b[k].shape)
            assert bits_of(x) == bits_of(b[k]), k


# ---- there and back


@given(st.lists(tensors(), max_size=4), st.lists(packed(), max_size=4))
def test_every_message_comes_back_bit_for_bit(numbers: list[Tensor], whole: list) -> None:
    rest = {f"r{i}": x for i, (x, _, _) in enumerate(whole)}
    message = Message({f"n{i}": x for i, x in enumerate(numbers)}, rest)
    bits = {f"r{i}": b for i, (_, b, _) in enumerate(whole)}
    below = {f"r{i}": n for i, (_, _, n) in enumerate(whole) if n is not None}
    layout = codec.layout_of(message, bits, below)
    data = codec.pack(message, layout)
    expected = sum(x.numel() * x.element_size() for x in numbers)
    expected += sum(math.ceil(x.numel() * b / 8) for x, b, _ in whole)
    assert len(data) == codec.size(layout) == expected
    for given_as in (bytes, bytearray, memoryview):
        assert_same(codec.unpack(given_as(data), layout), message)


@each("bits", [1, 2, 3, 7, 8, 13, 31, 33, 63])
@each("entries", [1, 7, 8, codec.CHUNK - 1, codec.CHUNK, codec.CHUNK + 3])
def test_packed_bits_are_a_stream_from_the_lowest_bit_on(bits: int, entries: int) -> None:
    """The whole numbers as one large number in base 2^bits; several chunks are one stream."""
    rng = np.random.default_rng(bits)
    values = rng.integers(0, 2**bits, entries, dtype=np.uint64)
    message = Message({}, {"x": torch.from_numpy(values.astype(np.int64))})
    data = codec.pack(message, codec.layout_of(message, {"x": bits}))
    digits = ((values[:, None] >> np.arange(bits, dtype=np.uint64)) & np.uint64(1)).astype(np.uint8).ravel()
    digits = np.pad(digits, (0, -len(digits) % 8)).reshape(-1, 8)
    assert data == (digits << np.arange(8)).sum(1).astype(np.uint8).tobytes()


def test_numbers_are_little_endian_and_in_order() -> None:
    message = Message({"b": torch.tensor([1.0, -2.0])}, {"a": torch.tensor(258, dtype=torch.int16)})
    expected = np.array([1, -2], dtype="<f4").tobytes() + b"\x02\x01"
    assert codec.pack(message, codec.layout_of(message)) == expected


def test_strides_views_and_conjugates_are_what_they_show() -> None:
    x = torch.randn(4, 6, dtype=torch.complex64)
    shown = {"t": x.T[::2], "c": x.conj(), "i": x.imag, "n": x.conj().imag, "e": torch.ones(1).expand(5)}
    message = Message(shown, {})
    back = codec.unpack(codec.pack(message, codec.layout_of(message)), codec.layout_of(message))
    assert all(torch.equal(back.numbers[k], v) for k, v in shown.items())


def test_what_is_unpacked_has_memory_of_its_own() -> None:
    message = Message({"x": torch.ones(3)}, {"n": torch.arange(3)})
    layout = codec.layout_of(message, {"n": 2})
    data = bytearray(codec.pack(message, layout))
    back = codec.unpack(data, layout)
    data[:] = bytes(len(data))
    back.numbers["x"] += 1
    assert torch.equal(back.numbers["x"], torch.full((3,), 2.0))
    assert torch.equal(back.rest["n"], torch.arange(3))


# ---- from anybody


@st.composite
def layouts(draw: st.DrawFn) -> codec.Entries:
    some = draw(st.lists(packed(), max_size=3)), draw(st.lists(tensors(), max_size=3))
    message = Message(
        {f"n{i}": x for i, x in enumerate(some[1])}, {f"r{i}": x for i, (x, _, _) in enumerate(some[0])}
    )
    bits = {f"r{i}": b for i, (_, b, _) in enumerate(some[0])}
    return codec.layout_of(
        message, bits, {f"r{i}": n for i, (_, _, n) in enumerate(some[0]) if n is not None}
    )


@given(layouts(), st.data())
def test_any_bytes_are_refused_or_are_those_of_the_message_that_they_make(layout, data) -> None:
    size = codec.size(layout)
    raw = data.draw(st.binary(min_size=size, max_size=size) | st.binary(max_size=40))
    try:
        message = codec.unpack(raw, layout)
    except check.Refused:
        return
    assert len(raw) == size
    assert codec.pack(message, layout) == raw
    for entry in layout:
        value = (message.numbers if entry.number else message.rest)[entry.path]
        assert tuple(value.shape) == entry.shape
        if entry.below is not None and value.numel():
            assert 0 <= int(value.min()) <= int(value.max()) < entry.below


@each("length", [0, 1, 6, 8, 100])
def test_another_length_is_refused(length: int) -> None:
    layout = codec.layout_of(Message({"x": torch.zeros(1)}, {"n": torch.zeros(3, dtype=torch.uint8)}))
    with pytest.raises(check.Refused) as caught:
        codec.unpack(bytes(length), layout)
    assert caught.value.field == "data"


@each(
    ("data", "bits", "below", "dtype"),
    [
        (b"\x07", 3, 7, torch.uint8),  # an index that is not there
        (b"\x08", 3, None, torch.uint8),  # bits after the last entry
        (b"\x07", 8, 7, torch.uint8),
        (b"\xff" * 8, None, 100, torch.int64),  # −1
        (b"\x02", None, None, torch.bool),
    ],
)
def test_what_no_client_sends_is_refused(data: bytes, bits, below, dtype: torch.dtype) -> None:
    message = Message({}, {"x": torch.zeros(1, dtype=dtype)})
    options = ({"x": v} if v is not None else None for v in (bits, below))
    with pytest.raises(check.Refused) as caught:
        codec.unpack(data, codec.layout_of(message, *options))
    assert caught.value.field == "x"


# ---- what has another layout


@each(
    "message",
    [
        Message({"x": torch.zeros(3)}, {}),
        Message({"x": torch.zeros(2, dtype=torch.float64)}, {}),
        Message({"y": torch.zeros(2)}, {}),
        Message({}, {"x": torch.zeros(2)}),
        Message({"x": torch.zeros(2), "y": torch.zeros(2)}, {}),
        Message({}, {}),
    ],
)
def test_another_message_is_refused(message: Message) -> None:
    layout = codec.layout_of(Message({"x": torch.zeros(2)}, {}))
    with pytest.raises(check.Refused):
        codec.pack(message, layout)


@each("value", [-1, 8, 7])
def test_whole_numbers_beyond_their_limit_are_refused(value: int) -> None:
    message = Message({}, {"x": torch.tensor([0, value])})
    with pytest.raises(check.Refused) as caught:
        codec.pack(message, codec.layout_of(message, {"x": 3}, {"x": 7}))
    assert caught.value.field == "x"


@each(
    ("value", "bits", "below"),
    [
        (torch.zeros(2), 8, None),
        (torch.zeros(2), None, 3),
        (torch.zeros(2, dtype=torch.uint8), 9, None),
        (torch.zeros(2, dtype=torch.uint8), 2, 5),
        (torch.zeros(2, dtype=torch.uint8), -1, None),
    ],
)
def test_a_layout_that_cannot_be_is_refused(value: Tensor, bits, below) -> None:
    options = ({"x": v} if v is not None else None for v in (bits, below))
    with pytest.raises(check.Refused):
        codec.layout_of(Message({}, {"x": value}), *options)


def test_a_path_is_there_once() -> None:
    with pytest.raises(check.Refused):
        codec.layout_of(Message({"x": torch.zeros(2)}, {"x": torch.zeros(2)}))
