"""A client's folder: which process writes to it, whose it is, and the runs in it.

    FOLDER/owner        the name of the client
    FOLDER/RUN/         one run: see `states`

One process at a time writes, and holds a lock on the folder while it lives. Who only reads needs none.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
import weakref
from pathlib import Path

from partita.core import check
from partita.engine.store.files import locked, sync_folder

OWNER = "owner"
RUN = re.compile(r"[0-9a-f]{32}")
LAST = "last"
MOST_RUNS = 100
"""Runs that have files in one folder: a server can begin new ones as it likes, and each takes room."""

_HELD: weakref.WeakValueDictionary[tuple[int, Path], Hold] = weakref.WeakValueDictionary()
_GUARD = threading.Lock()


class Hold:
    """The right of this process to write to a folder, in the name of one client; it ends with the object."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        make_private(folder)
        try:
            handle = locked(folder)
        except BlockingIOError:
            reason = "a client runs there already: end it first, or give this one a folder= of its own"
            raise check.fail(
                "folder", str(folder), "a folder that no other process writes to", reason
            ) from None
        release = weakref.finalize(self, _close, handle)
        try:
            _owned(folder, name)
            for left in folder.glob("*/.*.tmp"):  # by a client that was killed
                left.unlink(missing_ok=True)
        except BaseException:
            release()
            raise


def _close(handle: int | None) -> None:
    if handle is not None:
        os.close(handle)


def hold(folder: Path, name: str) -> Hold:
    """Return the right to write to a folder; refuse one that another process or another client has."""
    key = os.getpid(), folder.resolve()  # a fork of a process is another one
    with _GUARD:
        here = _HELD.get(key)
        if here is None:
            here = _HELD[key] = Hold(key[1], name)
    if here.name != name:
        raise _of_another(folder, here.name, name)
    return here


def _owned(folder: Path, name: str) -> None:
    """Write down whose folder it is, or refuse it where that is somebody else."""
    file = folder / OWNER
    if not file.is_file():
        write_private(file, f"{name}\n".encode())
    elif (owner := file.read_text().strip()) != name:
        raise _of_another(folder, owner, name)


def _of_another(folder: Path, owner: str, name: str) -> check.Refused:
    reason = f"it has the states of client {owner!r}: give {name!r} a folder= of its own"
    return check.fail("folder", str(folder), "a folder of one client alone", reason)


# ---- runs


def runs_in(folder: Path, file: str = "") -> list[str]:
    """Return the runs of which a client has files, or one with this name, the newest last."""
    found = [path for path in folder.glob("*") if RUN.fullmatch(path.name) and (path / file).exists()]
    return [path.name for path in sorted(found, key=lambda path: (path / file).stat().st_mtime_ns)]


def run_of(folder: Path, run: str | None) -> str:
    """Return the run that these first characters name, or the newest that has ended (None)."""
    ended = runs_in(folder, LAST)
    found = [name for name in ended if name.startswith(run or "")]
    if run is not None and len(found) != 1:
        raise check.fail("run", run, f"one of the runs that have ended here: {', '.join(ended) or 'none'}")
    if not found:
        allowed = "the folder of a client that was there when its run ended"
        reason = "start this client, then the server again with --resume" if runs_in(folder) else ""
        raise check.fail("folder", str(folder), allowed, reason)
    return found[-1]


def new_run(folder: Path) -> None:
    """Make the folder of a run, unless there are too many."""
    if folder.is_dir():
        return
    if (runs := len(runs_in(folder.parent))) >= MOST_RUNS:
        reason = f"it has {runs}: move those away that you do not need"
        raise check.fail("folder", str(folder.parent), f"at most {MOST_RUNS} runs", reason)
    make_private(folder)


# ---- files


def make_private(folder: Path, mode: int = 0o700) -> None:
    """Make a folder that its owner alone can open, and those above it; all are on disk when this returns."""
    if not folder.is_dir():
        make_private(folder.parent, 0o777)
        folder.mkdir(mode=mode, exist_ok=True)
        sync_folder(folder.parent)


def new_file(field: str, path: Path) -> Path:
    """Return the path of a file that is to be written; refuse one that is there, or that has no folder."""
    if path.exists() or path.is_symlink():
        raise check.fail(field, str(path), "a file that does not exist yet: move this one away first")
    if not path.parent.is_dir():
        reason = f"make it first: mkdir -p {path.parent}"
        raise check.fail(field, str(path), "a file in a folder that exists", reason)
    return path


def write_private(path: Path, content: bytes) -> None:
    """Replace a file in one step by one that its owner alone can read, whatever lies in that folder."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    handle = os.open(temporary, flags, 0o600)
    try:
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
