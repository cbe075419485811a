"""What travels between driver and workers: a head of a few bytes, and the memory of tensors beside it.

The memory is never copied into the head: a process on the same machine reads it where it lies (`Region`), and
Ray's object store takes it as arrays.
"""

from __future__ import annotations

import importlib
import io
import mmap
import os
import pickle
import socket
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

ALIGNED = 64  # bytes that memory of a tensor begins at a multiple of
SHARED_MEMORY = Path("/dev/shm")
HEADROOM = 1.25  # by which a region that grows is larger than what it must hold


class Packed(NamedTuple):
    """A tree in the form in which it travels: pickled without the memory of its tensors, and that memory."""

    head: bytes
    buffers: Sequence[np.ndarray]

    @property
    def nbytes(self) -> int:
        """All bytes."""
        return len(self.head) + sum(b.nbytes for b in self.buffers)


def pack(tree: Any) -> Packed:
    """Return a tree of tensors, arrays and small values in the form in which it travels."""
    head, buffers = io.BytesIO(), list[np.ndarray]()
    _Numbers(head, protocol=5, buffer_callback=lambda b: buffers.append(_bytes(b))).dump(tree)
    return Packed(head.getvalue(), buffers)


def unpack(packed: Packed) -> Any:
    """Return the tree; its tensors are views of the buffers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # memory of Ray's is not writable, and nobody writes to it
        return pickle.loads(packed.head, buffers=packed.buffers)


class _Numbers(pickle.Pickler):
    """Pickles trees of numbers: fast, and the memory of tensors stays outside."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor:
            return NotImplemented
        here = value.detach().cpu().contiguous()
        if not here.numel():
            return _no_numbers, (here.dtype, tuple(here.shape))
        # a tensor of one number may have any stride, and counts as contiguous all the same
        memory = here.as_strided((here.numel(),), (1,)).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(memory.data), here.dtype, tuple(here.shape))


def _bytes(buffer: pickle.PickleBuffer) -> np.ndarray:
    return np.frombuffer(buffer.raw(), dtype=np.uint8)


def _tensor(buffer: Any, kind: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(buffer, dtype=kind).view(shape)


def _no_numbers(kind: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=kind)


# ---- what is not numbers: models, methods, functions of the user


def pickled(value: Any, outside: Mapping[str, Any]) -> bytes:
    """Return any value with its functions as bytes; objects that are `outside` are named in them."""
    import cloudpickle  # what computes alone needs no more than torch

    names = {id(v): k for k, v in outside.items()}
    head = io.BytesIO()

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, obj: Any) -> str | None:
            return names.get(id(obj))

        def reducer_override(self, obj: Any) -> Any:
            """Name modules of another kind: cloudpickle takes `form.classes` for `torch.classes`."""
            if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
                return importlib.import_module, (obj.__name__,)
            return super().reducer_override(obj)

    Pickler(head, protocol=5).dump(value)
    return head.getvalue()


def unpickled(content: bytes, outside: Callable[[str], Any]) -> Any:
    """Return what was `pickled`; `outside` finds the objects that are named in it."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, name: Any) -> Any:
            return outside(name)

    return Unpickler(io.BytesIO(content)).load()


# ---- memory that two processes share


class Region:
    """Memory in a file without a name: it ends with the last process that has it, however that one ends."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self._size = os.fstat(handle).st_size
        self._map = mmap.mmap(handle, self._size) if self._size else None

    @classmethod
    def new(cls, size: int) -> Region:
        """Return a region of so many bytes, in memory where the system has files in memory."""
        size = max(size, mmap.PAGESIZE)
        for folder in (SHARED_MEMORY, None):
            if folder is not None and not _has_room(folder, size):
                continue
            with tempfile.TemporaryFile(dir=folder) as file:
                _reserve(file.fileno(), size)
                return cls(os.dup(file.fileno()))
        raise AssertionError("a folder for temporary files is always there")

    @classmethod
    def received(cls, handles: Sequence[int], before: Region | None = None) -> Region | None:
        """Return the region whose handle came with a message; the one before if none came."""
        if not handles:
            return before
        region = cls(handles[0])
        region.close()  # what is mapped stays
        return region

    @property
    def size(self) -> int:
        """Bytes that it holds."""
        return self._size

    def view(self, start: int, length: int) -> np.ndarray:
        """Return a part of it as an array of bytes, without a copy."""
        assert self._map is not None
        return np.frombuffer(self._map, dtype=np.uint8, count=length, offset=start)

    def close(self) -> None:
        """Give the file back; memory that is still read stays until it is not."""
        os.close(self.handle)


def _reserve(handle: int, size: int) -> None:
    """Make a file so large. Where the room is not reserved, a full disk would end the process later."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)
    else:
        os.ftruncate(handle, size)


def _has_room(folder: Path, size: int) -> bool:
    if not folder.is_dir():
        return False
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize > 2 * size


class Placed(NamedTuple):
    """Where the buffers of something packed lie in a region."""

    head: bytes
    places: list[tuple[int, int]]

    def packed(self, region: Region | None) -> Packed:
        """Return it with its buffers, where they lie."""
        if not self.places:
            return Packed(self.head, [])
        assert region is not None
        return Packed(self.head, [region.view(*place) for place in self.places])


class Outbox:
    """A region that one process writes to, and others read: for one thing at a time."""

    def __init__(self) -> None:
        self.region: Region | None = None
        self.number = 0  # of the region: another one each time that it has to grow
        self._announced = 0

    def place(self, packed: Packed) -> Placed:
        """Copy the buffers into the region, over what was there before."""
        places, end = [], 0
        for buffer in packed.buffers:
            places.append((end, buffer.nbytes))
            end += -(-buffer.nbytes // ALIGNED) * ALIGNED
        if end and (self.region is None or self.region.size < end):
            if self.region is not None:
                self.region.close()
            self.region, self.number = Region.new(int(end * HEADROOM)), self.number + 1
        for (start, length), buffer in zip(places, packed.buffers):
            assert self.region is not None
            self.region.view(start, length)[:] = buffer
        return Placed(packed.head, places)

    def new_handle(self) -> list[int]:
        """Return the handle of the region if its only reader does not have it yet."""
        if self.region is None or self._announced == self.number:
            return []
        self._announced = self.number
        return [self.region.handle]

    def close(self) -> None:
        """Give the region back."""
        if self.region is not None:
            self.region.close()
            self.region = None


class Channel:
    """A socket to another process of this machine: messages, and handles of files beside them."""

    MAX_HANDLES = 8

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def fileno(self) -> int:
        """Return the number by which the system knows it, to wait for messages."""
        return self.sock.fileno()

    def send(self, message: Any, handles: Sequence[int] = ()) -> None:
        """Send a message of small values; a ConnectionError or OSError if the other side is gone."""
        content = pickle.dumps(message, protocol=5)
        head = len(content).to_bytes(8, "big") + len(handles).to_bytes(1, "big")
        socket.send_fds(self.sock, [head], list(handles))
        self.sock.sendall(content)

    def receive(self) -> tuple[Any, list[int]]:
        """Return the next message with its handles; an EOFError if the other side is gone."""
        try:
            head, handles, _, _ = socket.recv_fds(self.sock, 9, self.MAX_HANDLES)
        except ConnectionError as error:
            raise EOFError from error
        head += self._exactly(9 - len(head)) if head else b""
        if not head:
            raise EOFError
        return pickle.loads(self._exactly(int.from_bytes(head[:8], "big"))), handles

    def _exactly(self, count: int) -> bytes:
        content = bytearray(count)
        view, at = memoryview(content), 0
        while at < count:
            got = self.sock.recv_into(view[at:])
            if not got:
                raise EOFError
            at += got
        return bytes(content)

    def close(self) -> None:
        """Let the other side know that nothing more comes."""
        self.sock.close()
