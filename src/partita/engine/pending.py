"""Clients that are at work at the same time train as one batch, although they report one by one.

Whoever is at work has received its model already, so its training depends on nothing that is still to come.
When the first of those who have not trained yet reports, all of them train, stacked; what they found waits
here until it arrives on the virtual clock. In step, everyone reports at once and nothing ever waits; there
the next cohort's samples are drawn while a GPU works.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from partita.core.device import HostCopy
from partita.core.sound import examined, lengths, sound
from partita.core.types import ClientState, Cohort, Group, Tensors, Upload

if TYPE_CHECKING:
    from partita.engine.federation import Federation

PARTS = ("delta", "extra", "sums", "metrics", "personal", "memory")
DEVICES = ("cuda",)  # that work while the host goes on


class Ahead:
    """What clients have computed and not sent yet: an upload and a new state for each."""

    def __init__(self) -> None:
        self.waiting: dict[int, tuple[Tensors, ...]] = {}  # a row for each client, in the order of PARTS
        self.why: dict[int, str] = {}  # those among them that are unusable

    def take(self, run: Federation, cohort: Cohort) -> tuple[Upload, ClientState, list[str]]:
        """What these clients send now, their new states and faults; whoever has not trained yet does."""
        if any(c not in self.waiting for c in cohort.clients):
            in_flight = run.schedule.in_flight()
            if not self.waiting and not in_flight.clients:
                return _trained(run, cohort)
            for part in run.parts(self._untrained(cohort, in_flight)):
                self._train(run, part)
        rows = [self.waiting.pop(c) for c in cohort.clients]
        delta, extra, sums, metrics, personal, memory = (_stacked(parts) for parts in zip(*rows))
        upload = run.signed(Upload(delta, None, extra, sums, metrics), cohort.clients)
        why = [self.why.pop(c, "") for c in cohort.clients]
        return upload, ClientState(personal, memory), why

    def forget(self, late: Sequence[int]) -> None:
        """What these clients computed is dropped: whoever leaves again trains anew."""
        for client in late:
            self.waiting.pop(client, None)
            self.why.pop(client, None)

    def _untrained(self, *cohorts: Cohort) -> Cohort:
        """All of them who have not trained yet, as one cohort."""
        clients: list[int] = []
        groups: dict[int | None, Group] = {}
        for cohort in cohorts:
            for group in cohort.groups:
                new = [i for i in group.positions if cohort.clients[i] not in self.waiting]
                if not new:
                    continue
                places = range(len(clients), len(clients) + len(new))
                clients += [cohort.clients[i] for i in new]
                before = groups[group.event].positions if group.event in groups else ()
                groups[group.event] = group._replace(positions=(*before, *places))
        return Cohort(tuple(clients), tuple(groups.values()), (0,) * len(clients), cohorts[0].time)

    def _train(self, run: Federation, cohort: Cohort) -> None:
        uploads, states, why = _trained(run, cohort)
        stacks = (*uploads.payload, uploads.metrics, states.personal, states.memory)
        parts = zip(*[_rows(stack, len(cohort.clients)) for stack in stacks])
        self.waiting.update(zip(cohort.clients, parts))
        self.why |= {c: w for c, w in zip(cohort.clients, why) if w}

    # ---- checkpoints

    def tensors(self) -> Tensors:
        """Everything that waits, by client."""
        return {
            f"{client}/{part}/{k}": v
            for client, parts in self.waiting.items()
            for part, tensors in zip(PARTS, parts)
            for k, v in tensors.items()
        }

    def facts(self) -> dict[str, Any]:
        """Who waits, with which fault, and the names of the tensors in their order: it decides roundings."""
        first = next(iter(self.waiting.values()), ())
        return {
            "who": [(client, self.why.get(client, "")) for client in self.waiting],
            "names": [list(tensors) for tensors in first],
        }

    def restore(self, facts: dict[str, Any], tensors: Tensors) -> None:
        """Be where the checkpoint was."""
        self.why = {client: why for client, why in facts["who"] if why}
        self.waiting = {
            client: tuple(
                [
                    {k: _at_home(part, tensors[f"{client}/{part}/{k}"]) for k in some}
                    for part, some in zip(PARTS, facts["names"])
                ]
            )
            for client, _ in facts["who"]
        }


def _at_home(part: str, x: Tensor) -> Tensor:
    return x.cpu() if part == "metrics" else x  # they are read on the host


def _trained(run: Federation, cohort: Cohort) -> tuple[Upload, ClientState, list[str]]:
    uploads, states = run.execute(cohort, run.load(cohort.clients))
    names, kept = list(uploads.metrics), (uploads.metrics, states)
    with run.phases("screening"):
        coming = HostCopy([*uploads.metrics.values(), *lengths(uploads, kept)])
    _draw(run, cohort)
    with run.phases("steps"):  # a device may be at work on them still
        here = coming.read()
    with run.phases("screening"):
        n = len(cohort.clients)
        why = [""] * n if sound(here[len(names) :]) else examined(uploads, kept, n)
    return uploads._replace(metrics=dict(zip(names, here))), states, why


def _draw(run: Federation, cohort: Cohort) -> None:
    """Which samples the next cohort sees, while a GPU is at work on this one."""
    version = run.server.version + 1
    last = version >= run.first + (run.stages[run.stage].rounds or 0)
    if run.data.x.device.type not in DEVICES or last:
        return
    with run.phases("cohort"):
        clients = np.asarray(run.upcoming(), dtype=np.int64)
    if len(clients) == len(cohort.clients):
        context = run.context()._replace(round=version, stage_round=version - run.first)
        with run.phases("steps"):
            run.execute_group.prefetch(run.algorithm.local, clients, context)


def _rows(stack: Tensors, n: int) -> list[Tensors]:
    """Its rows. Copies: a view of one row would keep the whole batch alive."""
    columns = {k: [row.clone() for row in v.unbind(0)] for k, v in stack.items()}
    return [{k: column[i] for k, column in columns.items()} for i in range(n)]


def _stacked(rows: Sequence[Tensors]) -> Tensors:
    """The rows as a stack again; a single one is not copied."""
    if len(rows) == 1:
        return {k: v.unsqueeze(0) for k, v in rows[0].items()}
    return {k: torch.stack([row[k] for row in rows]) for k in rows[0]}
