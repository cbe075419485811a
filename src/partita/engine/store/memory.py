"""Client states in memory (of the host or of the accelerator)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from partita.core import check, tree
from partita.core.device import put
from partita.core.types import ClientState, Tensors
from partita.engine.store.base import Snapshot, decode, encode
from partita.engine.store.layout import Clients, IntArray, Layout, indices


class MemoryStore:
    """Rows in a pool that doubles when it is full; only clients that were saved have one.

    Row 0 of the pool is the template, and the slot of every client that was never saved: a load is one
    gather, whoever is asked for.
    """

    def __init__(self, template: ClientState, clients: int, device: torch.device | str = "cpu") -> None:
        self._clients = check.integer("clients", clients, low=1)
        self._device = device
        self.layout = Layout.of(template)
        self._template = self._words(self.layout.pack(tree.expand(template, 1), 1))
        self._reset()

    @property
    def touched(self) -> IntArray:
        return np.flatnonzero(self._slots.numpy())

    def load(self, clients: Clients) -> ClientState:
        return self.layout.unpack(self._rows(indices(clients, self._clients)), self._device)

    def prefetch(self, clients: Clients) -> None:
        """Do nothing: all states are in memory."""

    def save(self, clients: Clients, states: ClientState) -> None:
        numbers = indices(clients, self._clients, distinct=True)
        self._write(numbers, self.layout.pack(states, len(numbers)))

    def snapshot(self, round: int) -> Tensors:
        touched = self.touched
        return encode(Snapshot(touched, self._rows(touched).cpu(), round), self.layout, self._clients)

    def committed(self) -> None:
        """Do nothing: each snapshot is complete in itself."""

    def restore(self, snapshot: Tensors) -> None:
        found = decode(snapshot, self.layout, self._clients)
        if found.in_file:
            raise ValueError("the snapshot needs the row file of a store on disk: resume with kind='disk'")
        self._reset()
        self._write(found.clients, found.rows)

    def _reset(self) -> None:
        self._slots = torch.zeros(self._clients, dtype=torch.int64)
        self._pool = self._template
        self._used = 1

    def _words(self, rows: Tensor) -> Tensor:
        return rows.to(self._device).view(torch.int64)  # gathers of wide items are faster than of bytes

    def _rows(self, clients: IntArray) -> Tensor:
        slots = self._slots.numpy()[clients]
        return self._pool.index_select(0, put(slots, self._device)).view(torch.uint8)

    def _write(self, clients: IntArray, rows: Tensor) -> None:
        index = torch.from_numpy(clients)
        new = index[self._slots[index] == 0]
        self._grow(self._used + len(new))
        self._slots[new] = torch.arange(self._used, self._used + len(new))
        self._used += len(new)
        self._pool.index_copy_(0, put(self._slots[index].numpy(), self._device), self._words(rows))

    def _grow(self, needed: int) -> None:
        if needed <= len(self._pool):
            return
        capacity = min(max(2 * len(self._pool), needed), self._clients + 1)
        pool = self._pool.new_empty(capacity, self._pool.shape[1])
        pool[: self._used] = self._pool[: self._used]
        self._pool = pool
