"""Where a run keeps its clients' states, its checkpoints and its output files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from partita.core import check
from partita.core.types import ClientState
from partita.engine.store.base import Store
from partita.engine.store.disk import DiskStore
from partita.engine.store.layout import Clients, Layout
from partita.engine.store.memory import MemoryStore

__all__ = ["Clients", "DiskStore", "Layout", "MemoryStore", "Store", "open_store"]


def open_store(
    template: ClientState,
    clients: int,
    *,
    kind: str | Callable[..., Store] = "auto",
    folder: str | Path | None = None,
    device: torch.device | str = "cpu",
    limit: int = 1 << 30,
) -> Store:
    """Return the store of a run: `template` is the state of a client that was never saved.

    'auto' keeps states on disk when a folder is given and all clients together would exceed `limit` bytes.
    A function makes a store of another kind.
    """
    if not isinstance(kind, str):
        return kind(template, clients, folder, device)
    check.choice("kind", kind, ("auto", "memory", "disk"))
    if kind == "disk" and folder is None:
        raise check.fail("kind", kind, "a folder to keep the clients' states in")
    large = clients * Layout.of(template).width > limit
    if folder is not None and (kind == "disk" or (kind == "auto" and large)):
        return DiskStore(template, clients, folder, device)
    return MemoryStore(template, clients, device)
