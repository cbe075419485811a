"""The file of a store on disk: a description, and rows in places that are numbered from 0.

    | magic, length, layout (JSON) | round, twice | rows: width bytes each |

Whose row lies where is known to the store alone, as a number for each client: (slot + 1) << 32 | crc32 of the
row, seeded with the client's number so that a row in the wrong place is found too; 0 is a client without a
row. The round is that of the oldest checkpoint whose rows are all there. It is written to its two places in
turn: of a torn write, the other one remains.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from partita.core import check
from partita.engine.store.base import NOTHING
from partita.engine.store.files import failed, sync_folder
from partita.engine.store.layout import IntArray, Layout

Row = NDArray[np.uint8]

_MAGIC = b"partita2"
_HEAD = struct.Struct("<8sI")
_ROUND = struct.Struct("<q")
_CRC = struct.Struct("<I")
_SECTOR = 512
_PAGE = 4096
_BITS = 32  # of a checksum


def slots_of(places: IntArray) -> IntArray:
    """Return the slots of these places."""
    slots: IntArray = (places >> _BITS) - 1
    return slots


class RowFile:
    """The file. `oldest` is the round of the oldest checkpoint that it can restore; NOTHING without one."""

    def __init__(self, path: Path, layout: Layout, clients: int) -> None:
        self.path = path
        self._layout = layout
        self._clients = clients
        self._about = json.dumps({"clients": clients, "layout": layout.describe()}).encode()
        self._rounds_at = _pages(_HEAD.size + len(self._about))
        self._rows_at = self._rounds_at + _PAGE
        if not path.exists():
            self._create()
        # the states of a finished run may be looked at where they cannot be changed
        self._fd = os.open(path, os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY)
        weakref.finalize(self, os.close, self._fd)
        self._check_head()
        self.oldest, self._place = self._read_round()

    @property
    def extent(self) -> int:
        """How many places there are, counting one that was begun."""
        return -((self._rows_at - self._size) // self._layout.width)

    def read(self, clients: IntArray, places: IntArray, rows: Sequence[Row]) -> None:
        """Fill the rows with those of these clients, from these places."""
        for client, place, row in zip(clients.tolist(), places.tolist(), rows):
            count = os.preadv(self._fd, [row.data], self._row_at((place >> _BITS) - 1))
            if count != len(row) or place & 0xFFFFFFFF != _crc(client, row):
                raise ValueError(
                    f"{self.path}: the row of client {client} is damaged (its checksum differs); "
                    "restore the file from a copy, or start the run again"
                )

    def prefetch(self, slots: IntArray) -> None:
        """Let the system fetch rows from the disk that are likely to be read soon."""
        if not hasattr(os, "posix_fadvise"):
            return
        ordered = np.sort(slots)
        for run in np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1):
            if len(run):
                at, length = self._row_at(int(run[0])), len(run) * self._layout.width
                with contextlib.suppress(OSError):  # not every file system takes advice
                    os.posix_fadvise(self._fd, at, length, os.POSIX_FADV_WILLNEED)

    def write(self, clients: IntArray, slots: IntArray, rows: Row) -> IntArray:
        """Write rows of these clients to these slots, which are in order; return their places."""
        ends = np.flatnonzero(np.diff(slots) != 1) + 1
        try:
            for run, block in zip(np.split(slots, ends), np.split(rows, ends)):
                if len(run):
                    self._write(self._row_at(int(run[0])), block.reshape(-1).data)
        except OSError as e:
            raise self._failed(e) from e
        sums = np.array([_crc(c, row) for c, row in zip(clients.tolist(), rows)], dtype=np.int64)
        places: IntArray = (slots + 1 << _BITS) | sums
        return places

    def sync(self) -> None:
        """Wait until all that was written is on disk."""
        try:
            os.fsync(self._fd)
        except OSError as e:
            raise self._failed(e) from e

    def note(self, round: int) -> None:
        """Note that the rows of checkpoints before this round may be written over from now on."""
        if round == self.oldest:
            return
        try:
            self._write(self._rounds_at + (1 - self._place) * _SECTOR, memoryview(_sealed(round)))
        except OSError as e:
            raise self._failed(e) from e
        self._place, self.oldest = 1 - self._place, round

    def check_length(self, count: int) -> None:
        """Refuse a file that has fewer places: it was cut, or replaced by an older or new one."""
        if self._size < self._row_at(count):
            raise self._refused(f"{self._size} bytes long, expected {self._row_at(count)} or more")

    def _failed(self, e: OSError) -> OSError:
        return failed(e, f"cannot write client rows to {self.path} (the last checkpoint is intact)")

    def _read_round(self) -> tuple[int, int]:
        valid = []
        for place in (0, 1):
            data = os.pread(self._fd, _ROUND.size + _CRC.size, self._rounds_at + place * _SECTOR)
            (round,) = _ROUND.unpack(data[: _ROUND.size])
            if data == _sealed(round):
                valid.append((round, place))
        if not valid:
            raise self._refused("its header is damaged (the checksum differs)")
        return max(valid)

    def _create(self) -> None:
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        try:
            with open(temporary, "wb") as f:
                f.write(_HEAD.pack(_MAGIC, len(self._about)) + self._about)
                f.seek(self._rounds_at)
                f.write(_sealed(NOTHING))
                f.truncate(self._rows_at)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, self.path)
        except OSError as e:
            temporary.unlink(missing_ok=True)
            sizes = f"{self._clients} clients of {self._layout.width} bytes"
            raise failed(e, f"cannot create {self.path} for {sizes}") from e
        sync_folder(self.path.parent)

    def _check_head(self) -> None:
        head = os.pread(self._fd, _HEAD.size, 0)
        if head[: len(_MAGIC)] != _MAGIC or len(head) < _HEAD.size:
            raise self._refused("not a row file of this version of Partita")
        _, length = _HEAD.unpack(head)
        self._check_about(os.pread(self._fd, length, _HEAD.size))
        self.check_length(0)

    def _check_about(self, written: bytes) -> None:
        if written == self._about:
            return
        try:
            about = json.loads(written)
            clients, fields = about["clients"], about["layout"]
        except (ValueError, TypeError, KeyError):
            raise self._refused("its description is damaged") from None
        self._layout.check(fields, str(self.path))
        raise ValueError(f"{self.path} was written for {clients} clients, this run has {self._clients}")

    def _refused(self, reason: str) -> ValueError:
        return check.fail("rows.bin", str(self.path), f"the clients' states as the run wrote them: {reason}")

    @property
    def _size(self) -> int:
        return os.fstat(self._fd).st_size

    def _row_at(self, slot: int) -> int:
        return self._rows_at + slot * self._layout.width

    def _write(self, offset: int, data: memoryview) -> None:
        while data:  # a full disk shortens a write first and fails the next
            done = os.pwrite(self._fd, data, offset)
            data, offset = data[done:], offset + done


def _crc(client: int, row: Row) -> int:
    return zlib.crc32(row.data, client & 0xFFFFFFFF)


def _sealed(round: int) -> bytes:
    data = _ROUND.pack(round)
    return data + _CRC.pack(zlib.crc32(data))


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
