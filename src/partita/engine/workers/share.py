"""What a worker computes: a program for the clients of a share, or the sum of what they would send."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from partita.core import draws, tree
from partita.core.parts import Program
from partita.core.types import ClientState, Group, RoundContext, Upload
from partita.engine.cohorts import merged, subgroup
from partita.engine.execute.plan import BoundProblem, count_steps, work_of
from partita.engine.pending import Trained

if TYPE_CHECKING:
    from partita.engine.stage import Stage


class Assignment(NamedTuple):
    """Clients of a share, what they have received, what they keep, and when."""

    clients: np.ndarray
    group: Group
    states: ClientState
    context: RoundContext

    def of(self, rows: list[int]) -> Assignment:
        """Return the assignment of the clients in these rows."""
        group = subgroup(self.group, rows, range(len(rows)))
        return Assignment(self.clients[rows], group, tree.rows(self.states, rows), self.context.of(rows))


class Summed(NamedTuple):
    """What the clients of a share have sent, added up.

    trained   what is known of each client: metrics, its new state, why its upload was set aside
    bytes_up  bytes that they uploaded
    sum       what their usable uploads were combined to; None if none is usable
    """

    trained: Trained
    bytes_up: int
    sum: Upload | None


def summed(stage: Stage, assignment: Assignment, key: Tensor) -> Summed:
    """Train the clients of a share and add up what they send, as many at a time as their deltas fit."""
    n, most = len(assignment.clients), stage.limits.deltas_in_memory
    if n <= most:
        return _summed(stage, assignment, key)
    size = -(-n // -(-n // most))
    parts = [
        _summed(stage, assignment.of(list(range(a, min(a + size, n)))), draws.branch(key, "part", number))
        for number, a in enumerate(range(0, n, size))
    ]
    uploads, states = tree.cat([part.trained[:2] for part in parts])
    rejections = [rejection for part in parts for rejection in part.trained.rejections]
    sums = [part.sum for part in parts if part.sum is not None]
    return Summed(Trained(uploads, states, rejections), sum(part.bytes_up for part in parts), merged(sums))


def _summed(stage: Stage, assignment: Assignment, key: Tensor) -> Summed:
    n = len(assignment.clients)
    uploads, states = stage.executor(stage.programs["training"], *assignment)
    samples, device = stage.setup.data.train[:, 1], stage.setup.settings.device
    uploads = tree.with_sender(uploads, assignment.clients, samples, device)
    rejections = tree.faults(uploads, (uploads.metrics, states), n)
    bytes_up = stage.bytes_sent(uploads)
    usable = uploads
    if any(rejections):
        usable = tree.rows(uploads, [i for i, rejection in enumerate(rejections) if not rejection])
    accepted = stage.channel.accepted(usable, assignment.group.download.extra)
    combined = stage.aggregate(accepted, key) if rejections.count("") else None
    kept = uploads._replace(delta={}, extra={}, sums={})
    stage.release((combined, kept, states))
    return Summed(Trained(kept, states, rejections), bytes_up, combined)


def cut(
    bound: BoundProblem,
    program: Program,
    clients: np.ndarray,
    context: RoundContext,
    classes: np.ndarray,
    shares: int,
) -> list[np.ndarray]:
    """Cut clients into shares of about equal work: for each share, the places of its clients in order.

    The clients of each class of devices are dealt out by their work, there and back. It depends on nothing
    but the arguments, so that the same clients make the same share however many workers there are.
    """
    work = np.zeros(len(clients), dtype=np.int64)
    for phase in bound.bind(program).phases:
        amount = work_of(phase, context)
        samples = bound.data.ranges(amount.split)[clients, 1]
        steps = count_steps(samples, clients, amount, context)
        work += steps * np.minimum(samples, amount.batch or samples)
    order = np.lexsort((np.arange(len(clients)), -work, classes))
    count = min(shares, len(clients))
    lap, place = np.divmod(np.arange(len(clients)), count)
    owner = np.where(lap % 2 == 0, place, count - 1 - place)
    return [np.sort(order[owner == i]) for i in range(count)]
