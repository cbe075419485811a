"""Clients of different capacity in one cohort: each class of devices runs its own part of the model.

A class is a problem of its own. It receives its part of the server's tensors, trains on the samples or on
what frozen blocks made of them, and what it sends is put in its place in the whole model. Everything else is
as without classes: the same rules, the same draws, the same executors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from partita.core import tree
from partita.core.device import put
from partita.core.parts import Program
from partita.core.types import ClientState, Group, RoundContext, Tensors, Upload
from partita.data import FederatedData
from partita.engine.devices.record import passed, recorded
from partita.engine.execute.base import Executor, Runner
from partita.engine.execute.plan import work_of

TRIAL = 8  # samples that are tried before a run
TOGETHER = 512  # that pass through frozen blocks at a time: a device takes fewer, a simulation need not
Region = Mapping[str, tuple[slice, ...]]
"""By name, the leading part of a tensor that a class holds."""


@dataclass(frozen=True, eq=False)
class Part:
    """One class at work.

    region  what it holds of the whole model
    sent    what a client that holds everything would send
    pieces  frozen blocks in evaluation mode, and `open_pieces` the same by the statistics of the samples
    shapes  of the tensors of the whole model
    statistics  of this class's own model, where those of the whole one do not fit (norm="static")
    base    of those that nobody shares: what they were at the start
    """

    executor: Runner
    region: Region
    sent: Upload
    shapes: Mapping[str, torch.Size]
    pieces: tuple[nn.Module, ...] = ()
    open_pieces: tuple[nn.Module, ...] = ()
    base: Tensors = field(default_factory=dict)
    statistics: Tensors = field(default_factory=dict)
    static: bool = False
    disk: bool = False
    record_bytes: int = 0  # of a sample behind the frozen blocks
    budget: int = 1 << 62  # for the records of clients that train together
    name: str = "part"

    def __call__(
        self, program: Program, clients: np.ndarray, group: Group, states: ClientState, context: RoundContext
    ) -> tuple[Upload, ClientState]:
        """What clients of this class do, as many at a time as their records fit."""
        sizes = self._samples(program, clients, context) if self.pieces else np.zeros(len(clients))
        found = []
        for some in _fitting(sizes * self.record_bytes, self.budget):
            part = group if len(some) == len(clients) else _some(group, some)
            own = states if len(some) == len(clients) else tree.rows(states, some)
            found.append(self._together(program, clients[some], part, own, context.of(some)))
        return tree.cat(found)  # type: ignore[no-any-return]

    def _together(
        self, program: Program, clients: np.ndarray, group: Group, states: ClientState, context: RoundContext
    ) -> tuple[Upload, ClientState]:
        """Some of them, in the shapes of the whole model."""
        shared, extra = (self.held(x, group.stacked) for x in group.download[:2])
        own = group._replace(download=group.download._replace(shared=shared, extra=extra))
        if self.statistics and not program.trains:
            shared = {**shared, **{k: v for k, v in self.statistics.items() if k in shared}}
            own = own._replace(download=own.download._replace(shared=shared))
        held = ClientState(self.held(states.personal, True), self._remembered(states.memory))
        executor = self.executor
        if self.pieces:
            executor = executor.on(self._recorded(program, clients, group, context))
        upload, new = executor(program, clients, own, held, context)
        return self._whole(program, upload, len(clients)), self._kept(program, new, states, group)

    # ---- tensors

    def held(self, tensors: Tensors, stacked: bool) -> Tensors:
        """The part of these that the class holds, and what is no tensor of the model."""
        rows = (slice(None),) if stacked else ()
        found: Tensors = {}
        for name, value in tensors.items():
            if name in self.region:
                found[name] = value[rows + self.region[name]]
            elif name not in self.shapes:
                found[name] = value
        return found

    def _remembered(self, memory: Tensors) -> Tensors:
        """The same of clients' memories: an entry is about a tensor if it has its name, or ends in it.

        A method that keeps a second copy of `norm.weight` may call it `shared.norm.weight`.
        """
        found: Tensors = {}
        for name, value in memory.items():
            known = [k for k in _endings(name) if self.shapes.get(k) == value.shape[1:]]
            own = self.held({known[0] if known else name: value}, True)
            if own:
                (found[name],) = own.values()
        return found

    def _whole(self, program: Program, upload: Upload, n: int) -> Upload:
        """In the names and shapes of the whole model, zero where the class holds nothing.

        Only training is sent anywhere; a model stays what it is.
        """
        if not program.trains:
            return upload
        delta = self._placed(upload.delta, self.sent.delta, n)
        return upload._replace(delta=delta, sums=self._placed(upload.sums, self.sent.sums, n))

    def _placed(self, stacks: Tensors, like: Tensors, n: int) -> Tensors:
        found: Tensors = {}
        for name, whole in like.items():
            value = stacks.get(name)
            if value is not None and value.shape[1:] == whole.shape:
                found[name] = value
                continue
            found[name] = whole.new_zeros(n, *whole.shape)
            if value is not None:
                found[name][(slice(None), *self.region[name])] = value
        return found

    def _kept(self, program: Program, new: ClientState, old: ClientState, group: Group) -> ClientState:
        """What clients keep; of a personal copy of what they do not hold, what they received."""
        if not program.trains:
            return new
        shared = group.download.shared
        personal = {
            k: self._into(v, new.personal.get(k), shared.get(k), group.stacked)
            for k, v in old.personal.items()
        }
        memory = {k: self._into(v, new.memory.get(k), None, True) for k, v in old.memory.items()}
        return ClientState(personal, memory)

    @staticmethod
    def _into(old: Tensor, new: Tensor | None, received: Tensor | None, stacked: bool) -> Tensor:
        if new is not None and new.shape == old.shape:
            return new
        base = old if received is None else received if stacked else received.expand_as(old)
        if new is None:
            return base
        found = base.clone()
        found[tuple(slice(0, n) for n in new.shape)] = new
        return found

    # ---- samples

    def trial(self, data: FederatedData, tensors: Tensors) -> FederatedData:
        """A few samples of the largest client, as the frozen blocks let them through."""
        client = int(np.argmax(data.train[:, 1]))
        start, length = data.train[client].tolist()
        rows = torch.arange(start, start + min(length, TRIAL), device=data.x.device)
        x = self._pass(self.pieces, tensors, data, rows, TRIAL)
        train = np.zeros_like(data.train)
        train[client] = 0, len(rows)
        return replace(data, x=x, y=data.y.index_select(0, rows), train=train, test=np.zeros_like(train))

    def _splits(self, program: Program, context: RoundContext) -> tuple[str, ...]:
        """The parts of the data that the rule looks at."""
        phases = self.executor.bound.bind(program).phases
        return tuple(dict.fromkeys(work_of(phase, context).split for phase in phases))

    def _samples(self, program: Program, clients: np.ndarray, context: RoundContext) -> np.ndarray:
        """How many each client has there."""
        data, none = self.executor.bound.data, np.zeros(len(clients), dtype=np.int64)
        return sum([data.ranges(split)[clients, 1] for split in self._splits(program, context)], none)

    def _recorded(
        self, program: Program, clients: np.ndarray, group: Group, context: RoundContext
    ) -> FederatedData:
        """The samples that the rule will look at, as the frozen blocks let them through."""
        data, splits = self.executor.bound.data, self._splits(program, context)
        ranges = {split: np.zeros((data.clients, 2), dtype=np.int64) for split in ("train", "test")}
        rows: list[Tensor] = []
        at = 0
        for client in clients.tolist():
            mine = []
            for split in splits:
                start, length = data.ranges(split)[client].tolist()
                ranges[split][client] = at, length
                mine.append(torch.arange(start, start + length, device=data.x.device))
                at += length
            rows.append(torch.cat(mine) if mine else torch.arange(0, device=data.x.device))
        x = self._passed(program, data, rows, group)
        y = data.y.index_select(0, torch.cat(rows))
        return replace(data, x=x, y=y, train=ranges["train"], test=ranges["test"])

    def _passed(self, program: Program, data: FederatedData, rows: Sequence[Tensor], group: Group) -> Tensor:
        """All clients together where they have received the same model, else each on its own."""
        alone = self.static and program.trains
        pieces = self.open_pieces if alone else self.pieces
        shared = group.download.shared
        if not group.stacked and not alone:
            return self._pass(pieces, shared, data, torch.cat(list(rows)), TOGETHER)
        own = [tree.row(shared, i) if group.stacked else shared for i in range(len(rows))]
        size = len(data.x) if alone else TOGETHER
        parts = (self._pass(pieces, w, data, mine, size) for w, mine in zip(own, rows))
        return recorded(parts, sum(map(len, rows)), self.disk)

    def _pass(
        self, pieces: Sequence[nn.Module], shared: Tensors, data: FederatedData, rows: Tensor, size: int
    ) -> Tensor:
        if not len(rows):  # the shape of what comes out, by some sample
            return self._pass(pieces, shared, data, rows.new_zeros(1), 1)[:0]

        def batches() -> Iterator[Tensor]:
            for i in range(0, len(rows), size):
                yield data.gather(rows[i : i + size])[0]

        def fetch(names: Sequence[str]) -> Tensors:
            # a module may write to its statistics: a copy
            there = {k: shared.get(k, self.base.get(k)) for k in names}
            return {k: v.clone() if k in buffers else v for k, v in there.items() if v is not None}

        buffers = {k for piece in pieces for k, _ in piece.named_buffers()}
        return passed(pieces, fetch, batches(), len(rows), disk=self.disk, size=size)


@dataclass(frozen=True, eq=False)
class Classes:
    """An executor. `kinds` has the class of each client, -1: the whole model."""

    whole: Executor
    parts: Mapping[int, Part]
    kinds: np.ndarray
    name: str = "classes"

    def __call__(
        self, program: Program, clients: np.ndarray, group: Group, states: ClientState, context: RoundContext
    ) -> tuple[Upload, ClientState]:
        """A group for each class, and all of them in the cohort's order again."""
        kinds = self.kinds[clients]
        if program.whole_model or (kinds < 0).all():
            return self.whole(program, clients, group, states, context)
        found, order = [], []
        for kind in np.unique(kinds).tolist():
            places = np.flatnonzero(kinds == kind)
            some = places.tolist()
            run = self.whole if kind < 0 else self.parts[kind]
            found.append(
                run(program, clients[places], _some(group, some), tree.rows(states, some), context.of(some))
            )
            order.append(places)
        if len(found) == 1:
            return found[0]
        device = next(iter(self.parts.values())).executor.bound.data.x.device
        back = put(np.argsort(np.concatenate(order)), device)
        uploads, new = tree.rows(tree.cat(found), back)
        return uploads, new

    def prefetch(self, program: Program, clients: np.ndarray, context: RoundContext) -> None:
        """Do nothing: what a class does depends on what its samples have passed before."""

    def release(self) -> None:
        """Let the executors of all classes use the memory of earlier results again."""
        for executor in (self.whole, *[part.executor for part in self.parts.values()]):
            executor.release()


def _endings(name: str) -> Iterator[str]:
    """'a.b.c', 'b.c', 'c'."""
    while name:
        yield name
        name = name.partition(".")[2]


def _some(group: Group, places: list[int]) -> Group:
    """The group of some of its clients."""
    download = group.download
    if group.stacked:
        shared, extra = tree.rows(download[:2], places)
        download = download._replace(shared=shared, extra=extra)
    return group._replace(positions=tuple(range(len(places))), download=download)


def _fitting(sizes: np.ndarray, budget: int) -> list[list[int]]:
    """Places in groups whose sizes together fit the budget, as far as a single one does."""
    found: list[list[int]] = [[]]
    total = 0.0
    for place, size in enumerate(sizes.tolist()):
        if found[-1] and total + size > budget:
            found.append([])
            total = 0.0
        found[-1].append(place)
        total += size
    return found
