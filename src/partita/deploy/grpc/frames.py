"""The frames of a stream: what a server and a client say to each other, in pieces of at most a megabyte.

    client                      server
    HELLO version, has    ->              who it is says its certificate
                          <-    WELCOME   session, the largest reply
                          <-    BEGIN id  a request and its first piece; MORE for each further one
    BEGIN id, MORE        ->              the reply
                          <-    DONE id   the reply has arrived, or is not wanted any more
                          <-    BYE why   the run is over, or another process has the same key

A frame is its kind (1 byte), the length of its header (4 bytes), a header in JSON, and a piece of a message.
All pieces of a message but its last are as long as a piece may be, and MORE has an empty header: so what is
kept of a message is what was announced, and little more.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

VERSION = 1
METHOD = "/partita.v1/Work"
PIECE = 1 << 20
HEADER = 1 << 12
LARGEST = 5 + HEADER + PIECE
"""The largest frame. gRPC refuses a larger one by its length, before it is received."""
AHEAD = 2
"""Requests that a client may have before it answers: the next one travels while the first is worked."""

HELLO, WELCOME, BEGIN, MORE, DONE, BYE = b"HWBMDE"


class Broken(ValueError):
    """Raised for bytes that are no frame, or a frame that may not come now."""


class Frame(NamedTuple):
    """One frame: its kind, its header and a piece of a message."""

    kind: int
    head: dict[str, Any]
    piece: memoryview = memoryview(b"")


def packed(kind: int, head: dict[str, Any] | None = None, piece: bytes | memoryview = b"") -> bytes:
    """Return a frame as bytes."""
    text = json.dumps(head or {}, separators=(",", ":")).encode()
    return b"".join((struct.pack("<BI", kind, len(text)), text, piece))


def unpacked(data: bytes) -> Frame:
    """Return the frame that bytes are; refuse anything else."""
    if len(data) < 5:
        raise Broken(f"a frame of {len(data)} bytes")
    kind, length = struct.unpack_from("<BI", data)
    if length > min(HEADER, len(data) - 5):
        raise Broken(f"a frame with a header of {length} bytes")
    try:
        head = json.loads(data[5 : 5 + length])
    except (ValueError, RecursionError):
        raise Broken("a frame whose header is not JSON") from None
    if not isinstance(head, dict):
        raise Broken("a frame whose header has no fields")
    if kind == MORE and head:
        raise Broken("a further piece with a header, which nobody would read")
    return Frame(kind, head, memoryview(data)[5 + length :])


def message(name: str, *segments: bytes) -> Iterator[bytes]:
    """Yield the frames of a request or a reply, whose bytes are those of these buffers."""
    pieces = _pieces(segments)
    yield packed(BEGIN, {"id": name, "size": sum(map(len, segments))}, next(pieces, b""))
    for piece in pieces:
        yield packed(MORE, None, piece)


def _pieces(segments: Sequence[bytes]) -> Iterator[bytes]:
    """Cut buffers that follow one another into pieces, all but the last as long as a piece may be."""
    piece: list[memoryview] = []
    room = PIECE
    for segment in segments:
        rest = memoryview(segment)
        while rest:
            piece.append(rest[:room])
            rest, room = rest[room:], room - len(piece[-1])
            if not room:
                yield b"".join(piece)
                piece, room = [], PIECE
    if piece:
        yield b"".join(piece)


class Assembly:
    """A message that is being received. Its memory grows with what has come, not with what was announced."""

    def __init__(self, head: dict[str, Any]) -> None:
        name, size = head.get("id"), head.get("size")
        if not isinstance(name, str) or type(size) is not int or size < 0:
            raise Broken("a message without a name or a size")
        self.name, self.size, self.received = name, size, 0
        self._pieces: list[memoryview] | None = []

    def add(self, piece: memoryview) -> None:
        """Take the next piece: as much of what is left as a piece may be."""
        due = min(PIECE, self.size - self.received)
        if len(piece) != due:
            raise Broken(f"a piece of {len(piece)} bytes where {due} are due")
        self.received += due
        if self._pieces is not None:
            self._pieces.append(piece)

    def forget(self) -> None:
        """Keep nothing of it, neither what has come nor what will."""
        self._pieces = None

    @property
    def complete(self) -> bool:
        """Tell whether all of it has come."""
        return self.received == self.size

    @property
    def body(self) -> bytes | None:
        """What has come; None if nothing is kept."""
        return None if self._pieces is None else b"".join(self._pieces)
