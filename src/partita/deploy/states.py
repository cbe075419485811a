"""A client's own disk: the states of its turns, the models that stages begin with, the model at the end.

    FOLDER/RUN/state-STAGE-EVENT-NONCE      what it keeps after a turn
    FOLDER/RUN/stage-N                      the model that stage N of a pipeline begins with
    FOLDER/RUN/last                         what it needs for its own model, as the server told it last

Each file is written whole or not at all, can be read by its owner alone, and ends in a digest of itself.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from partita.core.types import ClientState, Tensors
from partita.deploy.folder import LAST, RUN, new_run, write_private
from partita.deploy.heads import address_of
from partita.deploy.wire import HEAD, Body, Malformed, pack, part_of, unpack, within
from partita.engine.store.addresses import Address
from partita.schedule.clock import Event

DIGEST_BYTES = 32
STATE = re.compile(r"state-(\d+)-(\d+)-(\d+)")
UNLIMITED = 1 << 62
NEWEST = 2
"""States of a run that were written last, and stay whatever the server names."""
MOST_STATES = 16
"""States of a run that stay though nobody names them: those of turns that came too late, for example."""


class Missing(LookupError):
    """Raised where a file is not there, or is not whole."""


class States:
    """The files of one run at one client."""

    def __init__(self, folder: Path, run: str) -> None:
        if not RUN.fullmatch(run):
            raise Malformed("a run without its number")
        self.folder = folder / run

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

    def here(self) -> list[Address]:
        """Return the addresses of the states that are there, in the order in which they were written."""
        found = []
        for path in self.folder.glob("state-*"):
            if match := STATE.fullmatch(path.name):
                address = Address(*map(int, match.groups()))
                found.append((path.stat().st_mtime_ns, version_of(address), address))
        return [address for *_, address in sorted(found)]

    def require(self, address: Address) -> None:
        """Raise `Missing` unless there is a state of this address."""
        if address.exists and not (self.folder / _name(address)).is_file():
            raise Missing(_absent(_name(address)))

    def refuse_unknown(self, kept: Collection[Address]) -> None:
        """Refuse states to keep of versions that this client cannot have trained on yet."""
        newest = max(map(version_of, self.here()), default=-1)
        if (named := max(map(version_of, kept), default=-1)) > newest:
            raise Malformed(f"a state of version {named} to keep, where the newest is of version {newest}")

    def prune(self, kept: Collection[Address], saved: Address | None = None) -> None:
        """Remove what the run cannot go back to: older than what is kept, and neither named nor new.

        Versions of the model only grow; the numbers of events do not, where a client receives one again.
        """
        here = self.here()
        named = {*kept, self._of_last(), saved}
        before = max([version_of(address) for address in kept if address in here], default=0)
        for number, address in enumerate(here[:-NEWEST]):
            passed = version_of(address) < before or number < len(here) - MOST_STATES
            if passed and address not in named:
                (self.folder / _name(address)).unlink(missing_ok=True)

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
        return self._read(LAST)

    def save_last(self, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Write what the server has told."""
        self._write(LAST, head, tensors)

    def _of_last(self) -> Address | None:
        """Return the state that the client's own model is made of, if a run was told to be over."""
        try:
            with open(self.folder / LAST, "rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                return address_of(json.loads(json.loads(file.read(length))["__metadata__"][HEAD])["address"])
        except (OSError, ValueError, KeyError, TypeError, struct.error):  # not there, or damaged
            return None

    # ---- files

    def _read(self, name: str) -> tuple[dict[str, Any], Tensors]:
        path = self.folder / name
        try:
            blob = path.read_bytes()
        except FileNotFoundError:
            raise Missing(_absent(name)) from None
        content, digest = blob[:-DIGEST_BYTES], blob[-DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            raise Missing(f"{name} on this client's disk is damaged")
        return unpack(content, UNLIMITED)

    def _write(self, name: str, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        new_run(self.folder)
        content = pack(head, Body.of(tensors))
        write_private(self.folder / name, content + hashlib.sha256(content).digest())


def version_of(address: Address) -> int:
    """Return the version of the model with which the turn of a state began."""
    return Event.of(address.event).version


def _absent(name: str) -> str:
    return f"{name} is not on this client's disk"


def _name(address: Address) -> str:
    return f"state-{address.stage}-{address.event}-{address.nonce}"
