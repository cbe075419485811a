"""The door of a client process: a Unix socket of this machine, behind which it answers requests.

    8 bytes, little endian    how long what follows is
    so many bytes             a request; the reply comes in the same form, on the same connection

A connection that is closed without a reply was refused. Nothing is unpickled, and no memory is taken for more
than has come.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from partita.core import check
from partita.deploy.transport import Handler

LENGTH = struct.Struct("<Q")
PIECE = 1 << 20
LONGEST_PATH = 107
"""Bytes that the path of a Unix socket may have."""
SECONDS = 60.0
"""In which a request has to come, and a reply to be taken."""
LOOK = 0.5
"""Seconds between two looks at whether the process is to end."""


class Closed(ConnectionError):
    """Raised for a connection that is closed without a reply; it says why."""


class Door:
    """A socket at which `run(handler)` answers requests, one at a time, in the order in which they come.

    path     where the socket is; its folder is made for its owner alone
    largest  bytes of the largest request that is taken
    group    whose users may ask, too (None: the owner alone)
    """

    def __init__(
        self,
        path: str | Path,
        *,
        largest: int,
        group: str | None = None,
        notice: Callable[[str], None] = lambda text: None,  # noqa: ARG005
    ) -> None:
        self.path, self.largest, self.notice = check.path("socket", path), largest, notice
        self._stop = threading.Event()
        if len(os.fsencode(self.path)) > LONGEST_PATH:
            raise check.fail("socket", str(path), f"a path of at most {LONGEST_PATH} bytes")
        self._folder(group)
        self._replace()
        self._listener = self._bound(group)

    def run(self, handler: Handler) -> None:
        """Answer requests until `stop`; then the socket is removed."""
        try:
            while not self._stop.is_set():
                with contextlib.suppress(TimeoutError):
                    connection, _ = self._listener.accept()
                    with connection:
                        self._serve(connection, handler)
        finally:
            self._listener.close()
            self.path.unlink(missing_ok=True)

    def stop(self) -> None:
        """End `run` after the request that is worked now; for another thread."""
        self._stop.set()

    def _serve(self, connection: socket.socket, handler: Handler) -> None:
        """Answer one connection; whatever goes wrong with it ends nothing else."""
        try:
            end = time.monotonic() + SECONDS
            (length,) = LENGTH.unpack(received(connection, LENGTH.size, end))
            if length > self.largest:
                raise Closed(f"a request of {length} bytes, where at most {self.largest} may come")
            reply = handler.handle(received(connection, length, end))
            connection.settimeout(SECONDS)
            connection.sendall(LENGTH.pack(len(reply)))
            connection.sendall(reply)
        except OSError as error:
            self.notice(f"a connection ended without its reply: {check.reason(error)}")
        except Exception as error:
            self.notice(f"a request failed: {check.named_reason(error)}")

    def _folder(self, group: str | None) -> None:
        """Make the folder of the socket; refuse one in which others could put another socket."""
        folder = self.path.parent
        if not folder.is_dir():
            folder.mkdir(parents=True, mode=0o700)
            if group is not None:
                _give(folder, group, 0o710)
        if folder.stat().st_mode & 0o022:
            allowed = f"a folder that nobody else can write to (chmod go-w {folder})"
            raise check.fail("socket", str(self.path), allowed)

    def _replace(self) -> None:
        """Remove the socket of a process that has ended; refuse that of one that goes on, and other files."""
        try:
            kind = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(kind):
            raise check.fail("socket", str(self.path), "a path at which there is no other file")
        gone = contextlib.suppress(ConnectionRefusedError, FileNotFoundError)
        with socket.socket(socket.AF_UNIX) as probe, gone:
            probe.connect(str(self.path))
            raise check.fail("socket", str(self.path), "one process for each client: another is there")
        self.path.unlink(missing_ok=True)

    def _bound(self, group: str | None) -> socket.socket:
        """Return the listening socket, which others could open at no moment."""
        listener = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)
        try:
            listener.bind(str(self.path))
        finally:
            os.umask(before)
        if group is not None:
            _give(self.path, group, 0o660)
        listener.listen()
        listener.settimeout(LOOK)
        return listener


def received(connection: socket.socket, length: int, end: float) -> bytes:
    """Return so many bytes of a connection, which have to be there in time."""
    pieces, missing = list[bytes](), length
    while missing:
        connection.settimeout(max(1e-3, end - time.monotonic()))
        piece = connection.recv(min(PIECE, missing))
        if not piece:
            raise Closed(f"{length - missing} of {length} bytes have come")
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


def _give(path: Path, group: str, mode: int) -> None:
    """Let a group open a path."""
    try:
        shutil.chown(path, group=group)
    except (LookupError, PermissionError) as error:
        allowed = "a group of this machine that the user of this process is in"
        raise check.fail("group", group, allowed, check.reason(error)) from None
    path.chmod(mode)
