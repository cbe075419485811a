"""Uploads that are computed and have not arrived yet.

Whoever is in flight has received its model already, so its training depends on nothing that is still to come.
When the first of those who have not trained yet reports, all of them train as one batch; what they computed
waits here until it arrives on the virtual clock. In synchronous rounds nothing ever waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from partita.core import tree
from partita.core.types import ClientState, Cohort, Group, Tensors, Upload


class Trained(NamedTuple):
    """What some clients send, their new states, and for each why that is unusable ('': it is usable)."""

    uploads: Upload
    states: ClientState
    rejections: list[str]


class Row(NamedTuple):
    """What one client computed, in the order of names that it had: it decides roundings."""

    delta: Tensors
    extra: Tensors
    sums: Tensors
    metrics: Tensors
    personal: Tensors
    memory: Tensors
    rejection: str = ""


class PendingUploads(dict[int, Row]):
    """By client, what it computed and has not sent yet."""

    def untrained(self, *cohorts: Cohort) -> Cohort:
        """Return all clients of these cohorts that have not trained yet, as one cohort."""
        clients: list[int] = []
        groups: dict[int | None, Group] = {}
        for cohort in cohorts:
            for group in cohort.groups:
                new = [i for i in group.positions if cohort.clients[i] not in self]
                if not new:
                    continue
                places = range(len(clients), len(clients) + len(new))
                clients += [cohort.clients[i] for i in new]
                before = groups[group.event].positions if group.event in groups else ()
                groups[group.event] = group._replace(positions=(*before, *places))
        return Cohort(tuple(clients), tuple(groups.values()), (0,) * len(clients), cohorts[0].time)

    def add(self, clients: Sequence[int], trained: Trained) -> None:
        """Keep what these clients computed until they report."""
        upload, states = trained.uploads, trained.states
        stacks = (*upload.payload, upload.metrics, states.personal, states.memory)
        columns = [_rows(stack, len(clients)) for stack in stacks]
        self.update(zip(clients, map(Row, *columns, trained.rejections)))

    def take(self, clients: Sequence[int]) -> Trained:
        """Return what these clients send now; it no longer waits."""
        rows = [self.pop(c) for c in clients]
        delta, extra, sums, metrics, personal, memory = (_stacked(parts) for parts in list(zip(*rows))[:-1])
        upload = Upload(delta, None, extra, sums, metrics)
        return Trained(upload, ClientState(personal, memory), [row.rejection for row in rows])

    def drop(self, clients: Iterable[int]) -> None:
        """Forget what these clients computed: whoever leaves again trains anew."""
        for client in clients:
            self.pop(client, None)

    def state(self) -> list[dict[str, Any]]:
        """What a checkpoint holds."""
        return [{"client": client, **row._asdict()} for client, row in self.items()]

    def load_state(self, state: Sequence[dict[str, Any]], device: str) -> None:
        """Restore what a checkpoint holds; metrics are read on the host."""
        self.clear()
        for entry in state:
            row = Row(**{k: v for k, v in entry.items() if k != "client"})
            self[entry["client"]] = tree.to(row, device)._replace(metrics=row.metrics)


def _rows(stack: Tensors, n: int) -> list[Tensors]:
    """Return its rows as copies: a view of one row would keep the whole batch alive."""
    columns = {k: [row.clone() for row in v.unbind(0)] for k, v in stack.items()}
    return [{k: column[i] for k, column in columns.items()} for i in range(n)]


def _stacked(rows: Sequence[Tensors]) -> Tensors:
    """Return the rows as a stack again; a single one is not copied."""
    if len(rows) == 1:
        return {k: v.unsqueeze(0) for k, v in rows[0].items()}
    return {k: torch.stack([row[k] for row in rows]) for k in rows[0]}
