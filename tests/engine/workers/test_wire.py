"""What travels between driver and workers arrives as it was, whatever it is."""

from __future__ import annotations

import os
import socket
import threading

import numpy as np
import torch

from partita.core.types import ClientState, Download, Group, Upload
from partita.engine.workers.wire import (
    ALIGNED,
    Channel,
    Outbox,
    Packed,
    Region,
    pack,
    pickled,
    unpack,
    unpickled,
)

TREES = {
    "types": {
        str(kind): torch.arange(6).reshape(2, 3).to(kind)
        for kind in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
    },
    "shapes": {
        "no axis": torch.tensor(3.5),
        "no numbers": torch.empty(0, 4, dtype=torch.float64),
        "rows of one": torch.arange(3.0).expand(4, 3),
        "columns": torch.arange(12.0).reshape(3, 4).t(),
        "a part": torch.arange(10)[3:7],
        "one number": torch.tensor(0.1).expand(1),
        "a column": torch.arange(6.0).reshape(3, 2)[:1, 1],
    },
    "nouns": Group((0, 1), Download({"w": torch.ones(2)}, {}, 7, None), statistics={3: {"m": torch.ones(1)}}),
    "nothing": (),
    "others": (Upload({}, None), ClientState({}, {}), np.arange(5), "words", None),
}


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))  # type: ignore[arg-type]
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else a == b  # type: ignore[arg-type]


def test_trees_arrive_as_they_were() -> None:
    for name, tree in TREES.items():
        assert same(tree, unpack(pack(tree))), name


def test_memory_of_tensors_is_not_in_the_head() -> None:
    packed = pack({"w": torch.zeros(100_000)})
    assert len(packed.head) < 1000
    assert [buffer.nbytes for buffer in packed.buffers] == [400_000]


def test_memory_of_tensors_is_not_copied() -> None:
    tensor = torch.zeros(1000)
    packed = pack((tensor,))
    tensor[3] = 7.0
    (found,) = unpack(packed)
    assert found[3] == 7.0


def test_a_region_is_written_again_and_grows() -> None:
    outbox, readers = Outbox(), []
    for size in (10, 1000, 10, 100_000, 5):
        tree = {"a": torch.full((size,), float(size)), "b": torch.arange(3)}
        placed = outbox.place(pack(tree))
        assert all(start % ALIGNED == 0 for start, _ in placed.places)
        handles = outbox.new_handle()
        if handles:
            readers.append(Region.received([os.dup(handles[0])]))
        assert same(tree, unpack(placed.packed(readers[-1])))
    assert len(readers) == 2  # the first, and the larger one
    outbox.close()


def test_messages_and_handles_pass_a_socket() -> None:
    ours, theirs = (Channel(sock) for sock in socket.socketpair())
    outbox = Outbox()
    placed = outbox.place(pack(torch.arange(1000)))
    large = os.urandom(3_000_000)
    sender = threading.Thread(
        target=lambda: [ours.send(("words", large)), ours.send(placed, outbox.new_handle()), ours.close()]
    )
    sender.start()
    assert theirs.receive() == (("words", large), [])
    message, handles = theirs.receive()
    assert torch.equal(unpack(message.packed(Region.received(handles))), torch.arange(1000))
    sender.join()
    try:
        theirs.receive()
    except EOFError:
        return
    raise AssertionError("the other side is gone, and it was not noticed")


def test_functions_and_what_is_outside() -> None:
    heavy = torch.zeros(100_000)
    factor = 3
    content = pickled((heavy, lambda x: factor * x), {"x": heavy})
    assert len(content) < 10_000
    other = torch.ones(2)
    found, function = unpickled(content, {"x": other}.__getitem__)
    assert found is other
    assert function(2) == 6


class Form:
    classes = 2


def test_functions_with_names_of_torchs_modules() -> None:
    """An attribute `classes` beside `torch` looks like the module `torch.classes`."""

    def count(form):
        return torch.tensor(form.classes) + len(torch.classes.__name__)

    again = unpickled(pickled(count, {}), {}.__getitem__)
    assert again(Form) == count(Form)


def test_packed_counts_its_bytes() -> None:
    assert Packed(b"abc", [np.zeros(5, dtype=np.uint8)]).nbytes == 8
