"""Client states in a file, for more of them than memory holds.

The file is changed only by rows that two checkpoints vouch for. Rows saved since the last checkpoint are
`recent`; a snapshot turns them into `sealed`; once it is committed they are `pending`, and the rows that
were pending before go to the file:

    save      recent[client] = row
    snapshot  sealed ∪= recent;   the checkpoint gets pending ∪ sealed
    committed file ∪= pending;    pending = sealed
    restore   pending = the snapshot

So let C_k be the newest checkpoint and C_j the one before. The file holds all rows up to C_j's predecessor,
perhaps some of C_j's (if killed half-way), and none of C_k's. Each checkpoint carries every row changed
since the predecessor of its predecessor, hence every row of the file that may be torn or too new for it:
C_k restores alone, and so does C_j should C_k be damaged. A checkpoint of the same round replaces the
former one, so its rows join those pending and the file stays as it is.

The file notes the last round whose rows began to be written. A snapshot knows the round up to which the
file was complete when it was taken. Restoring needs

    base of the snapshot  ≤  round of the file  ≤  round of the snapshot

and refuses anything else (a file of another run, a checkpoint too old for the file).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from partita import check, tree
from partita.store.base import NOTHING, Snapshot, decode, encode, indices
from partita.store.layout import Layout
from partita.store.rows import Row, RowFile
from partita.types import ClientState, Tensors

FILE = "rows.bin"


class DiskStore:
    """Rows in `folder/rows.bin`, those of the last two checkpoints and later in memory."""

    def __init__(
        self, template: ClientState, clients: int, folder: str | Path, device: torch.device | str = "cpu"
    ) -> None:
        self._clients = check.integer("clients", clients, low=1)
        self._device = device
        self.layout = Layout.of(template)
        self._template: Row = self.layout.pack(tree.expand(template, 1), 1).cpu().numpy()[0]
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._file = RowFile(Path(folder) / FILE, self.layout, self._clients)
        self._recent: dict[int, Row] = {}
        self._sealed: dict[int, Row] = {}
        self._pending: dict[int, Row] = {}
        self._sealing = NOTHING  # round of the snapshot that waits for `committed`
        self._round = NOTHING  # round of the last committed checkpoint, and so of `pending`
        self._base = NOTHING  # round up to which the file is complete
        self._ours = self._file.round == NOTHING

    @property
    def touched(self) -> list[int]:
        self._check_ours()
        return sorted({*self._recent, *self._sealed, *self._pending, *self._file.touched})

    @property
    def overlay_bytes(self) -> int:
        return (len(self._recent) + len(self._sealed)) * self.layout.width

    def load(self, clients: Sequence[int]) -> ClientState:
        self._check_ours()
        numbers = indices(clients, self._clients)
        return self.layout.unpack(self._stack(map(self._row, numbers), len(numbers)), self._device)

    def save(self, clients: Sequence[int], states: ClientState) -> None:
        self._check_ours()
        numbers = indices(clients, self._clients, distinct=True)
        rows = self.layout.pack(states, len(numbers)).cpu().numpy()
        # copies: a view would keep the whole cohort's rows alive for the sake of one
        self._recent.update((client, rows[i].copy()) for i, client in enumerate(numbers))

    def snapshot(self, round: int) -> Tensors:
        self._check_ours()
        self._sealing = check.integer("round", round, low=max(0, self._round))
        self._sealed |= self._recent
        self._recent = {}
        overlay = self._pending | self._sealed
        clients = sorted(overlay)
        rows = self._stack((overlay[client] for client in clients), len(clients))
        return encode(Snapshot(clients, rows, round, self._base), self.layout, self._clients)

    def committed(self) -> None:
        if self._sealing == NOTHING:
            raise RuntimeError("committed() without a snapshot()")
        if self._sealing != self._round and self._pending:
            self._file.apply(self._pending, self._round)
            self._base = self._round
            self._pending = {}
        self._pending |= self._sealed
        self._round, self._sealing = self._sealing, NOTHING
        self._sealed = {}

    def restore(self, snapshot: Tensors) -> None:
        found = decode(snapshot, self.layout, self._clients)
        self._check_base(found)
        rows = found.rows.numpy()
        self._recent, self._sealed = {}, {}
        self._pending = {client: rows[i] for i, client in enumerate(found.clients)}
        self._sealing, self._round, self._base = NOTHING, found.round, found.base
        self._ours = True

    def _stack(self, rows: Iterable[Row], count: int) -> Tensor:
        out = torch.empty(count, self.layout.width, dtype=torch.uint8)
        array = out.numpy()
        for i, row in enumerate(rows):
            array[i] = row
        return out

    def _row(self, client: int) -> Row:
        for layer in (self._recent, self._sealed, self._pending):
            if client in layer:
                return layer[client]
        row = self._file.read(client)
        return self._template if row is None else row

    def _check_base(self, found: Snapshot) -> None:
        if self._file.round < found.base:
            raise ValueError(
                f"{self._file.path} has rows up to round {self._file.round}, the checkpoint of round "
                f"{found.round} needs those up to {found.base}: the file was replaced by an older or new one"
            )
        if self._file.round > found.round:
            raise ValueError(
                f"{self._file.path} has rows up to round {self._file.round}, too new for the checkpoint of "
                f"round {found.round}: only the last two checkpoints can be resumed"
            )

    def _check_ours(self) -> None:
        if not self._ours:
            raise ValueError(
                f"{self._file.path} holds the clients of an earlier run (up to round {self._file.round}): "
                "resume it from its checkpoint, or choose an empty folder"
            )
