"""What a store offers to a run, and the snapshots it puts into checkpoints."""

from __future__ import annotations

import json
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from partita.core.types import ClientState, Tensors
from partita.engine.store.layout import Clients, IntArray, Layout

NOTHING = -1
"""The round of a store without any checkpoint."""


class Store(Protocol):
    """The states of all clients of a run; a client that was never saved has the template's state.

    A checkpoint of round r is taken in three steps, in this order:

        tensors = store.snapshot(r)   # what goes into the checkpoint
        ...                           # write it, until it is safe on disk
        store.committed()             # it is

    If writing fails, `committed` is not called, and the next snapshot covers what the failed one held. A run
    may save states between the three. To resume, `restore` takes the snapshot out of the checkpoint.
    """

    @property
    def touched(self) -> IntArray:
        """The clients that were ever saved, in order."""
        ...

    def load(self, clients: Clients) -> ClientState:
        """Return the states of these clients, stacked in this order. No later call changes them."""
        ...

    def prefetch(self, clients: Clients) -> None:
        """Prepare to load these clients next; this changes nothing but the speed."""
        ...

    def save(self, clients: Clients, states: ClientState) -> None:
        """Replace the states of these (distinct) clients by the rows of `states`."""
        ...

    def snapshot(self, round: int) -> Tensors:
        """Return what the checkpoint of this round has to hold, as CPU tensors."""
        ...

    def committed(self) -> None:
        """Note that the checkpoint with the last snapshot is safe on disk."""
        ...

    def restore(self, snapshot: Tensors) -> None:
        """Restore the states of a snapshot."""
        ...


class Snapshot(NamedTuple):
    """The rows of some clients as of `round`, or (`in_file`) for each its place in the row file."""

    clients: IntArray
    rows: Tensor
    round: int
    in_file: bool = False


def encode(snapshot: Snapshot, layout: Layout, clients: int) -> Tensors:
    """Return a snapshot as named tensors, with its description, so that a foreign one can be refused."""
    about = {
        "clients": clients,
        "layout": layout.describe(),
        "round": snapshot.round,
        "in_file": snapshot.in_file,
    }
    return {
        "clients": torch.from_numpy(snapshot.clients),
        "rows": snapshot.rows,
        "about": torch.from_numpy(np.frombuffer(json.dumps(about).encode(), dtype=np.uint8).copy()),
    }


def decode(tensors: Tensors, layout: Layout, clients: int) -> Snapshot:
    """Invert `encode`, for a store of this layout and number of clients."""
    missing = {"clients", "rows", "about"} - set(tensors)
    if missing:
        raise ValueError(f"snapshot: {', '.join(sorted(missing))} missing, so it is not of a client store")
    try:
        about = json.loads(tensors["about"].numpy().tobytes())
        about = {key: about[key] for key in ("clients", "layout", "round", "in_file")}
    except (ValueError, KeyError, TypeError):
        raise ValueError("snapshot: its description is not of a client store") from None
    layout.check(about["layout"], "the snapshot")
    if about["clients"] != clients:
        raise ValueError(f"the snapshot was written for {about['clients']} clients, this run has {clients}")
    return Snapshot(tensors["clients"].numpy(), tensors["rows"], about["round"], about["in_file"])
