"""The file of a store on disk: a description, a tag per client, a row per client.

    | magic, length, layout (JSON) | round, twice | tags: clients x 8 bytes | rows: clients x width |

The file is sparse: it costs the rows that were written, not the clients there are. The tags lie apart from
the rows so that opening the file reads them in one go. A tag of zero is a client without a row, any other
is 2**32 + crc32 of the row, seeded with the client's number so that a row in the wrong place is found too.
The round is written to its two places in turn: of a torn write, the other one remains.
"""

from __future__ import annotations

import json
import os
import struct
import weakref
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from partita import check
from partita.store.base import NOTHING
from partita.store.files import failed, sync_folder
from partita.store.layout import Layout

Row = NDArray[np.uint8]

_MAGIC = b"partita1"
_HEAD = struct.Struct("<8sI")
_ROUND = struct.Struct("<q")
_CRC = struct.Struct("<I")
_SECTOR = 512
_TAG = np.dtype("<u8")
_PAGE = 4096


class RowFile:
    """`round` is the last round whose rows began to be written; NOTHING in a new file."""

    def __init__(self, path: Path, layout: Layout, clients: int) -> None:
        self.path = path
        self._layout = layout
        self._clients = clients
        self._about = json.dumps({"clients": clients, "layout": layout.describe()}).encode()
        self._rounds_at = _pages(_HEAD.size + len(self._about))
        self._tags_at = self._rounds_at + _PAGE
        self._rows_at = self._tags_at + _pages(clients * _TAG.itemsize)
        if not path.exists():
            self._create()
        # the states of a finished run may be looked at where they cannot be changed
        self._fd = os.open(path, os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY)
        weakref.finalize(self, os.close, self._fd)
        self._check_head()
        self.round, self._place = self._read_round()
        tags = os.pread(self._fd, clients * _TAG.itemsize, self._tags_at)
        self._tags = np.frombuffer(tags, dtype=_TAG).copy()

    @property
    def touched(self) -> list[int]:
        """Clients that have a row."""
        numbers: list[int] = np.flatnonzero(self._tags).tolist()
        return numbers

    def read(self, client: int) -> Row | None:
        """The row of a client, None if it has none."""
        tag = int(self._tags[client])
        if tag == 0:
            return None
        row = os.pread(self._fd, self._layout.width, self._row_at(client))
        if tag != _tag(client, row):
            raise ValueError(
                f"{self.path}: the row of client {client} is damaged (its checksum differs); "
                "restore the file from a copy, or start the run again"
            )
        return np.frombuffer(row, dtype=np.uint8)

    def apply(self, rows: Mapping[int, Row], round: int) -> None:
        """Write the rows of a round and wait until they are on disk. Doing it twice is the same as once."""
        try:
            self._begin(round)
            for client in sorted(rows):
                row = rows[client].tobytes()
                tag = _tag(client, row)
                self._write(self._row_at(client), row)
                self._write(self._tags_at + client * _TAG.itemsize, tag.to_bytes(_TAG.itemsize, "little"))
                self._tags[client] = tag
            os.fsync(self._fd)
        except OSError as e:
            raise failed(e, f"cannot write client rows to {self.path} (the last checkpoint is intact)") from e

    def _begin(self, round: int) -> None:
        self._place = 1 - self._place
        self._write(self._rounds_at + self._place * _SECTOR, _sealed(round))
        self.round = round

    def _read_round(self) -> tuple[int, int]:
        found = []
        for place in (0, 1):
            data = os.pread(self._fd, _ROUND.size + _CRC.size, self._rounds_at + place * _SECTOR)
            (round,) = _ROUND.unpack(data[: _ROUND.size])
            if data == _sealed(round):
                found.append((round, place))
        if not found:
            raise self._refused("its header is damaged (the checksum differs)")
        return max(found)

    def _create(self) -> None:
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        try:
            with open(temporary, "wb") as f:
                f.write(_HEAD.pack(_MAGIC, len(self._about)) + self._about)
                f.seek(self._rounds_at)
                f.write(_sealed(NOTHING))
                f.truncate(self._size)
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
        size = os.fstat(self._fd).st_size
        if size != self._size:
            raise self._refused(f"{size} bytes long, expected {self._size}")

    def _check_about(self, found: bytes) -> None:
        if found == self._about:
            return
        try:
            about = json.loads(found)
            clients, fields = about["clients"], about["layout"]
        except (ValueError, TypeError, KeyError):
            raise self._refused("its description is damaged") from None
        self._layout.check(fields, str(self.path))
        raise ValueError(f"{self.path} was written for {clients} clients, this run has {self._clients}")

    def _refused(self, reason: str) -> ValueError:
        return check.fail("rows.bin", str(self.path), f"the clients' states as the run wrote them: {reason}")

    @property
    def _size(self) -> int:
        return self._row_at(self._clients)

    def _row_at(self, client: int) -> int:
        return self._rows_at + client * self._layout.width

    def _write(self, offset: int, data: bytes) -> None:
        while data:  # a full disk shortens a write first and fails the next
            done = os.pwrite(self._fd, data, offset)
            data, offset = data[done:], offset + done


def _tag(client: int, row: bytes) -> int:
    return 1 << 32 | zlib.crc32(row, client & 0xFFFFFFFF)


def _sealed(round: int) -> bytes:
    data = _ROUND.pack(round)
    return data + _CRC.pack(zlib.crc32(data))


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
