"""States that clients keep themselves: the server has an address of each, and never the state.

An address is (stage, event, nonce): the stage and the event in which the client computed the state, and a
number that tells two attempts at the same event apart. The client's next turn begins from the state of the
address that is saved here, which is that of its last upload that was used. So a rejected or late upload has
no effect on a client, whatever it has computed, and a resumed run goes on from the states of its checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from partita.core import check
from partita.core.types import ClientState, Tensors
from partita.engine.store.base import Store
from partita.engine.store.layout import Clients, IntArray, indices

ADDRESS = "address"
"""The name of an address in the memory that the loop saves as a client's new state."""


class Address(NamedTuple):
    """Where a client has a state: the stage and the event that it is of, and a number of this attempt."""

    stage: int = -1
    event: int = -1
    nonce: int = 0

    @property
    def exists(self) -> bool:
        """Whether there is a state: else the client is as one that was never seen."""
        return self.event >= 0

    def state(self) -> ClientState:
        """Return the address as the loop takes the new state of a client."""
        return ClientState({}, {ADDRESS: torch.tensor(self, dtype=torch.int64)})


class Addresses:
    """The addresses of all clients, and of those that the last checkpoints may still go back to."""

    def __init__(self, clients: int) -> None:
        self._now = np.tile(np.array(Address(), dtype=np.int64), (clients, 1))
        self._snapshot = self._now.copy()
        self._safe = [self._snapshot, self._snapshot]

    @classmethod
    def make(
        cls,
        template: ClientState,  # noqa: ARG003
        clients: int,
        folder: Path | None,  # noqa: ARG003
        device: Any,  # noqa: ARG003
    ) -> Addresses:
        """Make the store of a run, as `store=` does."""
        return cls(clients)

    def of(self, client: int) -> Address:
        """Return where the client has its state."""
        return Address(*self._now[client].tolist())

    def needed(self, client: int) -> list[Address]:
        """Return all addresses that the run may go back to, the newest last."""
        rows = [*[safe[client].tolist() for safe in self._safe], self._now[client].tolist()]
        found = [Address(*row) for row in rows]
        return [a for a in dict.fromkeys(found) if a.exists]

    @property
    def touched(self) -> IntArray:
        return np.flatnonzero(self._now[:, 1] >= 0)

    def load(self, clients: Clients) -> ClientState:  # noqa: ARG002
        allowed = "the client itself, which has it on its own disk: `partita deploy export` there"
        raise check.fail("client", check.MISSING, allowed, "the server never has a client's personal part")

    def prefetch(self, clients: Clients) -> None:
        """Do nothing: there is nothing to read."""

    def save(self, clients: Clients, states: ClientState) -> None:
        numbers = indices(clients, len(self._now), distinct=True)
        self._now[numbers] = states.memory[ADDRESS].numpy()

    def carry(self, before: Store) -> None:
        """Take the addresses of the stage before, of whose states clients make new ones when asked."""
        assert isinstance(before, Addresses)
        self._now, self._snapshot, self._safe = before._now.copy(), before._snapshot, before._safe

    def snapshot(self, round: int) -> Tensors:  # noqa: ARG002
        self._snapshot = self._now.copy()
        return {"addresses": torch.from_numpy(self._snapshot)}

    def committed(self) -> None:
        self._safe = [self._safe[1], self._snapshot]

    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        found = snapshot.get("addresses")
        if found is None or found.shape != self._now.shape or found.dtype != torch.int64:
            raise ValueError(f"snapshot: it is not of the addresses of {len(self._now)} clients")
        self._now = found.numpy().copy()
        self._snapshot = self._now.copy()
        self._safe = [self._snapshot, self._snapshot]


def are_addresses(snapshot: Mapping[str, Any]) -> bool:
    """Return whether the snapshot of a store is of states that clients keep themselves."""
    return "addresses" in snapshot
