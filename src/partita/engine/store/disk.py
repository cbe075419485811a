"""Client states in a file, for more of them than memory holds.

A state is never written over one that a checkpoint needs. Every save goes to free places of the file, and a
table in memory, 8 bytes for each client, says where the newest row of each one lies:

    save      rows to free places; the table points to them; the places that it pointed to are left
    snapshot  the rows are synced; the checkpoint gets the table
    committed places that were left before the oldest checkpoint on disk was taken are free again
    restore   the table of the snapshot; all other places of the file are left

So let C_k be the newest checkpoint and C_j the one before. A place that one of their tables points to was
current at that snapshot, or is still; it is left later than C_j was taken, if at all, and becomes free when
a checkpoint of a later round replaces C_j. Hence C_k restores alone, and so does C_j should C_k be damaged,
whatever was being written when the run was killed. A checkpoint of the same round replaces the former one,
so C_j remains and nothing becomes free. After a restore the other checkpoint's table is not known: then
rows go to the end of the file, until a commit.

A round costs its cohort's rows, written once, and memory and checkpoints cost 8 and 16 bytes for each client
that was saved; the file holds a row for each of them and those that changed since C_j.

The file notes the round of C_j, and refuses to restore a checkpoint that is older.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from partita.core import check, tree
from partita.core.types import ClientState, Tensors
from partita.engine.store.base import NOTHING, Snapshot, decode, encode
from partita.engine.store.layout import Clients, IntArray, Layout, indices
from partita.engine.store.rows import RowFile, slots_of
from partita.engine.store.slots import Slots

FILE = "rows.bin"


class DiskStore:
    """Rows in `folder/rows.bin`, and where each client's lies."""

    def __init__(
        self, template: ClientState, clients: int, folder: str | Path, device: torch.device | str = "cpu"
    ) -> None:
        self._clients = check.integer("clients", clients, low=1)
        self._device = device
        self.layout = Layout.of(template)
        self._template = self.layout.pack(tree.expand(template, 1), 1).cpu().numpy()[0]
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._file = RowFile(Path(folder) / FILE, self.layout, self._clients)
        self._places: IntArray = np.zeros(self._clients, dtype=np.int64)  # 0: never saved
        self._new = np.zeros(self._clients, dtype=bool)  # saved since the last snapshot
        self._slots = Slots()
        self._taken = 0  # snapshots so far
        self._oldest = 0  # the number of the oldest that may still be on disk; 0: one that is not known
        self._newest = 0  # the number of the last that was committed; 0: none
        self._round = NOTHING  # its round
        self._sealing = NOTHING  # round of the snapshot that waits for `committed`
        self._ours = self._file.oldest == NOTHING  # rows without a checkpoint are of no use to anybody

    @property
    def touched(self) -> IntArray:
        self._check_ours()
        return np.flatnonzero(self._places)

    def load(self, clients: Clients) -> ClientState:
        self._check_ours()
        numbers = indices(clients, self._clients)
        rows = torch.empty(len(numbers), self.layout.width, dtype=torch.uint8)
        places, array = self._places[numbers], rows.numpy()
        array[places == 0] = self._template
        there = np.flatnonzero(places)
        self._file.read(numbers[there], places[there], [array[i] for i in there])
        return self.layout.unpack(rows, self._device)

    def prefetch(self, clients: Clients) -> None:
        places = self._places[indices(clients, self._clients)]
        self._file.prefetch(slots_of(places[places > 0]))

    def save(self, clients: Clients, states: ClientState) -> None:
        self._check_ours()
        numbers = indices(clients, self._clients, distinct=True)
        rows = self.layout.pack(states, len(numbers)).cpu().numpy()
        slots = self._slots.take(len(numbers))
        try:
            places = self._file.write(numbers, slots, rows)
        except OSError:
            self._slots.give(slots)
            raise
        self._leave(numbers)
        self._places[numbers] = places
        self._new[numbers] = True

    def snapshot(self, round: int) -> Tensors:
        self._check_ours()
        sealing = check.integer("round", round, low=max(0, self._round))
        self._file.sync()
        self._sealing = sealing
        self._taken += 1
        self._new[:] = False
        clients = self.touched
        places = torch.from_numpy(self._places[clients])
        return encode(Snapshot(clients, places, round, in_file=True), self.layout, self._clients)

    def committed(self) -> None:
        if self._sealing == NOTHING:
            raise RuntimeError("committed() without a snapshot()")
        oldest, round = self._oldest, max(self._file.oldest, 0)
        if self._newest and self._sealing > self._round:
            oldest, round = self._newest, self._round
        self._file.note(round)
        self._slots.release(oldest)
        self._oldest, self._newest = oldest, self._taken
        self._round, self._sealing = self._sealing, NOTHING

    def restore(self, snapshot: Tensors) -> None:
        found = decode(snapshot, self.layout, self._clients)
        extent = self._file.extent
        self._slots = Slots(extent)
        if found.in_file:
            self._check_fits(found)
            places: IntArray = found.rows.numpy()
        else:
            slots = self._slots.take(len(found.clients))
            places = self._file.write(found.clients, slots, found.rows.numpy())
        self._places[:], self._new[:] = 0, False
        self._places[found.clients] = places
        others = np.ones(self._slots.extent, dtype=bool)
        others[slots_of(places)] = False
        self._slots.leave(np.flatnonzero(others), 0)
        self._taken, self._oldest, self._newest = 1, 0, 1
        self._round, self._sealing = found.round, NOTHING
        self._ours = True

    def _leave(self, clients: IntArray) -> None:
        """The places of these clients' rows are needed by snapshots only, or by nobody."""
        there = clients[self._places[clients] > 0]
        slots, new = slots_of(self._places[there]), self._new[there]
        self._slots.give(slots[new])
        self._slots.leave(slots[~new], self._taken)

    def _check_fits(self, found: Snapshot) -> None:
        if found.round < self._file.oldest:
            raise ValueError(
                f"{self._file.path} has the rows of checkpoints from round {self._file.oldest} on, it is too "
                f"new for the checkpoint of round {found.round}: only the last two checkpoints can be resumed"
            )
        slots = slots_of(found.rows.numpy())
        self._file.check_length(int(slots.max(initial=-1)) + 1)

    def _check_ours(self) -> None:
        if not self._ours:
            raise ValueError(
                f"{self._file.path} holds the clients of an earlier run (up to round {self._file.oldest} or "
                "later): resume it from its checkpoint, or choose an empty folder"
            )
