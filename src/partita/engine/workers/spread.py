"""An executor that cuts a cohort into shares and lets workers compute them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from partita.core import draws, tree
from partita.core.parts import Program
from partita.core.types import ClientState, Group, RoundContext, Upload
from partita.engine.cohorts import RunningSum
from partita.engine.execute.base import Executor
from partita.engine.execute.plan import BoundProblem
from partita.engine.pending import Trained
from partita.engine.workers.crew import KEYS, Crew, Team
from partita.engine.workers.messages import Call, Choices, Job, Reply, Samples, StageBlob, sent
from partita.engine.workers.share import Assignment, Summed, cut, summed
from partita.engine.workers.wire import Packed, pack

if TYPE_CHECKING:
    from collections.abc import Iterator

    from partita.engine.stage import Stage

NAMED = 5  # clients of a share that an error names
DECIDE = ("auto", "graph", "compiled")
"""Executors that measure before they decide; so may a user's own."""


@dataclass(frozen=True, eq=False)
class Spread:
    """Runs a program for the clients of a group, in shares; each share by an executor such as `inner`.

    inner    this process's own executor: for a single client, and when no workers are there
    bound    the problem of clients that hold the whole model: its phases say how much work there is
    team     the workers, and the terms that they compute on
    choices  what executors have decided; what one share decides holds for all
    decides  the name of the executor, or the function that makes it
    class_of the class of each client's device
    names    of all clients
    blob     makes what the stage is bound from, under a key; `samples` those of its run
    sent     what was sent last, and what has been decided
    """

    inner: Executor
    bound: BoundProblem
    team: Team
    choices: Choices
    decides: Any
    class_of: np.ndarray
    names: Sequence[str]
    blob: Callable[[int], StageBlob]
    samples: Callable[[Crew], Samples]
    key: int = field(default_factory=lambda: next(KEYS))
    sent: dict[str, Any] = field(default_factory=dict)
    name: str = "spread"

    def __call__(
        self, program: Program, clients: np.ndarray, group: Group, states: ClientState, context: RoundContext
    ) -> tuple[Upload, ClientState]:
        """Run the clients in shares; return their results in their order."""
        if len(clients) < 2:  # not worth a journey
            with self._as_share():
                one = self.inner(program, clients, group, states, context)
            return tree.map_tensors(torch.clone, one) if program.trains else one  # its memory is lent
        places = self._cut(program, clients, context)
        result = Joined(len(clients), places)
        self._compute(program, places, Assignment(clients, group, states, context), None, result.put)
        uploads, new = tree.to(result.tree, self.bound.data.device)
        return uploads, new

    def summed(self, stage: Stage, assignment: Assignment, key: Tensor) -> Summed:
        """Train clients in shares; only the sum of a share comes back, and what is known of each client."""
        program = stage.programs["training"]
        places = self._cut(program, assignment.clients, assignment.context)
        n, device = len(assignment.clients), self.bound.data.device
        each, total, bytes_up, rejections = Joined(n, places), RunningSum(device), 0, [""] * n

        def put(share: int, result: Summed) -> None:
            nonlocal bytes_up
            each.put(share, result.trained[:2])
            bytes_up += result.bytes_up
            for row, rejection in zip(places[share].tolist(), result.trained.rejections):
                rejections[row] = rejection
            total.add(share, result.sum)

        self._compute(program, places, assignment, key, put, stage)
        uploads, states = tree.to(each.tree, device)
        uploads = uploads._replace(client=uploads.client.cpu(), metrics=tree.to(uploads.metrics, "cpu"))
        return Summed(Trained(uploads, states, rejections), bytes_up, total.result())

    def prefetch(self, program: Program, clients: np.ndarray, context: RoundContext) -> None:
        """Do nothing: workers draw for themselves."""

    def release(self, kept: Any = ()) -> None:
        """Let this process's own executor use the memory of earlier results again."""
        release = getattr(self.inner, "release", None)
        if release is not None:
            release(kept)

    def _cut(self, program: Program, clients: np.ndarray, context: RoundContext) -> list[np.ndarray]:
        return cut(self.bound, program, clients, context, self.class_of[clients], self.team.terms.shares)

    def _compute(
        self,
        program: Program,
        places: Sequence[np.ndarray],
        assignment: Assignment,
        key: Tensor | None,
        put: Callable[[int, Any], None],
        stage: Stage | None = None,
    ) -> None:
        """Compute shares: `put` gets the number of each, and its result, which is lent to it."""
        keys = [None if key is None else draws.branch(key, "share", i) for i in range(len(places))]
        crew = self.team.present
        if crew is None:
            with self._as_share():
                for number, rows in enumerate(places):
                    own, share = keys[number], assignment.of(rows.tolist())
                    if own is None or stage is None:
                        put(number, self.inner(program, *share))
                    else:
                        put(number, summed(stage.in_this_process, share, own))
                    if program.trains:
                        self.release()
            return
        common = self._common(sent(assignment, None)[0])
        clients = [self._named(assignment.clients[rows]) for rows in places]

        def packed(number: int) -> Packed:  # when it is sent: others are at work already
            return pack(sent(assignment.of(places[number].tolist()), keys[number])[1])

        def run(numbers: Sequence[int]) -> None:
            def take(worker: int, share: int, reply: Reply, result: Any) -> bool:  # noqa: ARG001
                for role, choice in reply.choices.items():
                    self.choices.setdefault(role, choice)
                put(numbers[share], result)
                return True

            job = Job(
                self.samples(crew),
                self._blob(),
                Call(program.name, key is not None, self.choices),
                common,
                [functools.partial(packed, i) for i in numbers],
                [clients[i] for i in numbers],
            )
            crew.compute(job, take)

        rest = list(range(len(places)))
        for number in range(len(places)):
            if self._undecided(program, assignment.clients[places[number]]):
                rest.remove(number)
                run([number])  # alone: what it measures is not disturbed, and holds for the others
        if rest:
            run(rest)

    def _undecided(self, program: Program, clients: np.ndarray) -> bool:
        """Return whether this share has to decide something first, as far as it is the first of its kind."""
        asked = self.decides if isinstance(self.decides, str) else DECIDE[0]
        if asked not in DECIDE or (asked != DECIDE[0] and not program.trains):
            return False
        decided: set[tuple[str, int]] = self.sent.setdefault("decided", set())
        classes, counts = np.unique(self.class_of[clients], return_counts=True)
        new = {(program.name, int(k)) for k, n in zip(classes, counts) if n > 1} - decided
        decided |= new
        return bool(new)

    def _common(self, download: Any) -> Packed:
        """Return what all shares receive, packed; the last one again where it is the same."""
        tensors = [x for x in tree.leaves(download) if isinstance(x, Tensor)]
        version = [(id(x), x._version) for x in tensors]
        before = self.sent.get("common")
        if before is None or before[0] != version:
            self.sent["common"] = before = version, tensors, pack(download)  # those tensors stay: ids do
        packed: Packed = before[2]
        return packed

    def _blob(self) -> StageBlob:
        if "blob" not in self.sent:
            self.sent["blob"] = self.blob(self.key)
        blob: StageBlob = self.sent["blob"]
        return blob

    def _named(self, clients: np.ndarray) -> str:
        names = [repr(self.names[c]) for c in clients[:NAMED].tolist()]
        more = len(clients) - len(names)
        return ", ".join(names) + (f" and {more} more" if more > 0 else "")

    @contextmanager
    def _as_share(self) -> Iterator[None]:
        """Compute in this process as a worker would: with as many threads."""
        before, threads = torch.get_num_threads(), self.team.terms.threads
        if before == threads:
            yield
            return
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


class Joined:
    """The results of shares, side by side in the order of the cohort, as they come."""

    def __init__(self, n: int, places: Sequence[np.ndarray]) -> None:
        self._n, self._places = n, [torch.from_numpy(rows) for rows in places]
        self.tree: Any = None

    def put(self, share: int, result: Any) -> None:
        """Copy the rows of a share to their places."""
        if self.tree is None:
            self.tree = tree.map_tensors(self._room, result)
        tree.map_tensors(
            lambda whole, rows: whole.index_copy_(0, self._places[share], rows), self.tree, result
        )

    def _room(self, rows: Tensor) -> Tensor:
        return rows.new_empty((self._n, *rows.shape[1:]))
