"""A client's own disk: the states of its turns, the models that stages begin with, the model at the end.

    FOLDER/RUN/state-STAGE-EVENT-NONCE      what it keeps after a turn
    FOLDER/RUN/stage-N                      the model that stage N of a pipeline begins with
    FOLDER/RUN/last                         what it needs for its own model, as the server told it last

Each file is written whole or not at all, can be read by its owner alone, and ends in a digest of itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from partita.core.types import ClientState, Tensors
from partita.deploy.wire import Body, Malformed, pack, part_of, unpack, within
from partita.engine.store.addresses import Address
from partita.engine.store.files import sync_folder

DIGEST_BYTES = 32
RUN = re.compile(r"[0-9a-f]{32}")
STATE = re.compile(r"state-(\d+)-(\d+)-(\d+)")
UNLIMITED = 1 << 62


class Missing(LookupError):
    """Raised where a file is not there, or is not whole."""


class States:
    """The files of one run at one client."""

    def __init__(self, folder: Path, run: str) -> None:
        if not RUN.fullmatch(run):
            raise Malformed("a run without its number")
        self.folder = folder / run
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in self.folder.glob(".*.tmp"):  # by a client that was killed
            left.unlink()

    # ---- states

    def load(self, address: Address) -> ClientState:
        """Return the state of an address."""
        _, tensors = self._read(_name(address))
        return ClientState(part_of(tensors, "personal"), part_of(tensors, "memory"))

    def save(self, address: Address, state: ClientState) -> None:
        """Write a state; it is on disk when this returns."""
        self._write(
            _name(address), {}, {**within("personal", state.personal), **within("memory", state.memory)}
        )

    def prune(self, kept: Iterable[Address], before: int) -> None:
        """Remove the states of events before this one, but for some that are kept."""
        names = {_name(address) for address in kept}
        for path in self.folder.glob("state-*"):
            found = STATE.fullmatch(path.name)
            if found and int(found[2]) < before and path.name not in names:
                path.unlink(missing_ok=True)

    # ---- stages

    def stage(self, number: int) -> Tensors:
        """Return the model that a stage begins with."""
        return part_of(self._read(f"stage-{number}")[1], "initial")

    def lacks(self, numbers: Iterable[int]) -> list[int]:
        """Return the stages of which the first model is not there."""
        lacking = []
        for number in numbers:
            try:
                self._read(f"stage-{number}")
            except Missing:
                lacking.append(number)
        return lacking

    def save_stage(self, number: int, initial: Mapping[str, Tensor]) -> None:
        """Write the model that a stage begins with."""
        self._write(f"stage-{number}", {}, within("initial", initial))

    # ---- the end

    def last(self) -> tuple[dict[str, Any], Tensors]:
        """Return what the server told last."""
        return self._read("last")

    def save_last(self, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Write what the server has told."""
        self._write("last", head, tensors)

    # ---- files

    def _read(self, name: str) -> tuple[dict[str, Any], Tensors]:
        path = self.folder / name
        try:
            blob = path.read_bytes()
        except FileNotFoundError:
            raise Missing(f"{name} is not on this client's disk") from None
        content, digest = blob[:-DIGEST_BYTES], blob[-DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            raise Missing(f"{name} on this client's disk is damaged")
        return unpack(content, UNLIMITED)

    def _write(self, name: str, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        content = pack(head, Body.of(tensors))
        write_private(self.folder / name, content + hashlib.sha256(content).digest())


def write_private(path: Path, content: bytes) -> None:
    """Replace a file in one step by one that its owner alone can read."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
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


def runs_in(folder: Path) -> list[str]:
    """Return the runs of which a client has files, the one that was written to last at the end."""
    found = [path for path in folder.glob("*") if path.is_dir() and RUN.fullmatch(path.name)]
    return [path.name for path in sorted(found, key=lambda path: path.stat().st_mtime_ns)]


def _name(address: Address) -> str:
    return f"state-{address.stage}-{address.event}-{address.nonce}"
