"""What clients have answered and the server has not used yet, and the states that these answers are of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from partita.engine.pending import PendingUploads, Row
from partita.engine.store.addresses import ADDRESS, Address

NOTED = 3
"""Checkpoints that are remembered: two to which a run may go back, and one that is being written."""


class Answers(PendingUploads):
    """Uploads by client, as they wait to be used.

    A run that goes back to a checkpoint uses what had waited then, and goes on from the states of it. No
    store knows these yet, so they are remembered here.
    """

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[dict[int, Address]] = [{}] * NOTED

    def needed(self, client: int) -> list[Address]:
        """Return the states of a client that its answers now, and those at the last checkpoints, are of."""
        found = [addresses[client] for addresses in [*self._noted, self._addresses()] if client in addresses]
        return list(dict.fromkeys(found))

    def state(self) -> list[dict[str, Any]]:
        """Return what a checkpoint holds, and remember of which states that is."""
        self._noted = [*self._noted[1:], self._addresses()]
        return super().state()

    def load_state(self, state: Sequence[dict[str, Any]], device: str) -> None:
        """Restore what a checkpoint holds."""
        super().load_state(state, device)
        self._noted = [self._addresses()] * NOTED

    def _addresses(self) -> dict[int, Address]:
        return {client: _address(row) for client, row in self.items() if not row.rejection}


def _address(row: Row) -> Address:
    return Address(*row.memory[ADDRESS].tolist())
