"""Clients of different capacity in one cohort: each class of devices runs its own part of the model.

A class is a problem of its own. It receives its part of the server's tensors, trains on the samples or on
what frozen blocks made of them, and what it sends is put in its place in the whole model. Everything else is
as without classes: the same rules, the same draws, the same executors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from partita.core import check, tree
from partita.core.device import put
from partita.core.inputs import single
from partita.core.parts import Program
from partita.core.types import ClientState, Group, RoundContext, Tensors, Upload
from partita.data.federated import SPLITS, FederatedData
from partita.engine.cohorts import subgroup
from partita.engine.devices.activations import passed, recorded
from partita.engine.execute.base import Executor, Runner
from partita.engine.execute.plan import work_of

TRIAL_SAMPLES = 8  # tried before a run
BATCH = 512  # samples that pass through frozen blocks at a time: a device takes fewer, a simulation need not
Region = Mapping[str, tuple[slice, ...]]
"""By name, the leading part of a tensor that a class holds."""


@dataclass(frozen=True, eq=False)
class ClassExecutor:
    """What clients of one class of devices compute.

    number        of the class
    executor      runs the model of this class
    region        what the class holds of the whole model
    upload_like   an upload of a client that holds the whole model
    shapes        the shapes of the whole model's tensors
    pieces        frozen blocks in evaluation mode
    open_pieces   the same blocks, normalizing by the statistics of the samples
    initial       the initial tensors, for those that the server does not share
    static        whether norm="static"
    disk          whether records of frozen blocks are kept in files
    record_bytes  bytes of a sample behind the frozen blocks
    budget        bytes for the records of clients that train together
    training      the samples of training, if their labels say whose they are (see `labels`)
    """

    number: int
    executor: Runner
    region: Region
    upload_like: Upload
    shapes: Mapping[str, torch.Size]
    pieces: tuple[nn.Module, ...] = ()
    open_pieces: tuple[nn.Module, ...] = ()
    initial: Tensors = field(default_factory=dict)
    static: bool = False
    disk: bool = False
    record_bytes: int = 0
    budget: int = 1 << 62
    training: FederatedData | None = None
    name: str = "class"

    def __call__(
        self, program: Program, clients: np.ndarray, group: Group, states: ClientState, context: RoundContext
    ) -> tuple[Upload, ClientState]:
        """Run the program for clients of this class, as many at a time as their records fit in memory."""
        samples = self._samples(program, clients, context) if self.pieces else np.zeros(len(clients))
        results = []
        for rows in _fitting(samples * self.record_bytes, self.budget):
            if len(rows) == len(clients):
                return self._together(program, clients, group, states, context)
            results.append(
                self._together(
                    program,
                    clients[rows],
                    subgroup(group, rows, range(len(rows))),
                    tree.rows(states, rows),
                    context.of(rows),
                )
            )
        return tree.cat(results)  # type: ignore[no-any-return]

    def _together(
        self, program: Program, clients: np.ndarray, group: Group, states: ClientState, context: RoundContext
    ) -> tuple[Upload, ClientState]:
        """Run the program on this class's model; take and return tensors in the shapes of the whole model."""
        shared, extra = (self.held(x, group.stacked) for x in group.download[:2])
        if not program.trains:
            own = group.statistics.get(self.number, {})  # those of the whole model do not fit a narrow one
            shared |= {k: v for k, v in own.items() if k in shared}
        held_group = group._replace(download=group.download._replace(shared=shared, extra=extra))
        memory_of = {name: self._tensor_of(name, value) for name, value in states.memory.items()}
        memory = self._cropped(states.memory, memory_of, stacked=True)
        held_states = ClientState(self.held(states.personal, stacked=True), memory)
        executor = self.executor
        if self.pieces:
            data = executor.bound.data
            executor = executor.on(self._recorded(program, clients, group, context), counted=data)
        elif self.training is not None and program.trains:
            executor = executor.on(self.training, counted=executor.bound.data)
        upload, new = executor(program, clients, held_group, held_states, context)
        return self._whole(program, upload, len(clients)), self._kept(program, new, states, group)

    # ---- tensors

    def held(self, tensors: Tensors, stacked: bool) -> Tensors:
        """Return what the class holds of these tensors, and all that is no tensor of the model."""
        return self._cropped(tensors, {name: name for name in tensors}, stacked)

    def _cropped(self, tensors: Tensors, tensor_of: Mapping[str, str], stacked: bool) -> Tensors:
        """Return the same for entries that are about the tensors of the model that `tensor_of` names."""
        rows = (slice(None),) if stacked else ()
        cropped: Tensors = {}
        for name, value in tensors.items():
            if tensor_of[name] in self.region:
                cropped[name] = value[rows + self.region[tensor_of[name]]]
            elif tensor_of[name] not in self.shapes:
                cropped[name] = value
        return cropped

    def _tensor_of(self, name: str, value: Tensor) -> str:
        """Return the tensor of the model that an entry of clients' memories is about.

        It has its name, or ends in it: a second copy of `norm.weight` may be called `shared.norm.weight`.
        """
        return next((k for k in _endings(name) if self.shapes.get(k) == value.shape[1:]), name)

    def _whole(self, program: Program, upload: Upload, n: int) -> Upload:
        """Return an upload in the names and shapes of the whole model, zero where the class holds nothing.

        Only training is sent anywhere; a model stays what it is.
        """
        if not program.trains:
            return upload
        for name, whole in self.upload_like.extra.items():
            if name in upload.extra and upload.extra[name].shape[1:] != whole.shape:
                reason = f"devices that hold a part of the model send {name!r} in another shape"
                raise check.fail("Upload.extra", name, "Upload.sums for changes of the model", reason)
        delta = self._placed(upload.delta, self.upload_like.delta, n)
        return upload._replace(delta=delta, sums=self._placed(upload.sums, self.upload_like.sums, n))

    @staticmethod
    def _placed(stacks: Tensors, like: Tensors, n: int) -> Tensors:
        placed: Tensors = {}
        for name, whole in like.items():
            value = stacks.get(name)
            fits = value is not None and value.shape[1:] == whole.shape
            placed[name] = value if fits else _paste(whole.new_zeros(n, *whole.shape), value)  # type: ignore[assignment]
        return placed

    def _kept(self, program: Program, new: ClientState, old: ClientState, group: Group) -> ClientState:
        """Return what clients keep; of a personal copy of what they do not hold, what they received."""
        if not program.trains:
            return new
        shared = group.download.shared
        personal = {k: _merged(v, new.personal.get(k), shared.get(k)) for k, v in old.personal.items()}
        memory = {k: _merged(v, new.memory.get(k), None) for k, v in old.memory.items()}
        return ClientState(personal, memory)

    # ---- samples

    def trial(self, data: FederatedData, tensors: Tensors) -> FederatedData:
        """Return a few samples of the largest client, as the frozen blocks let them through."""
        client, rows = rows_of_largest(data, TRIAL_SAMPLES)
        x = self._pass(self.pieces, tensors, data, rows, TRIAL_SAMPLES)
        train, empty = np.zeros_like(data.train), np.zeros_like(data.train)
        train[client] = 0, len(rows)
        return data.holding(x, data.targets(rows), train=train, validation=empty, test=empty)

    def _splits(self, program: Program, context: RoundContext) -> tuple[str, ...]:
        """Return the splits of the data that the program looks at."""
        phases = self.executor.bound.bind(program).phases
        return tuple(dict.fromkeys(work_of(phase, context).split for phase in phases))

    def _samples(self, program: Program, clients: np.ndarray, context: RoundContext) -> np.ndarray:
        """Return how many samples each client has there."""
        data, none = self.executor.bound.data, np.zeros(len(clients), dtype=np.int64)
        return sum([data.ranges(split)[clients, 1] for split in self._splits(program, context)], none)

    def _recorded(
        self, program: Program, clients: np.ndarray, group: Group, context: RoundContext
    ) -> FederatedData:
        """Return the samples that the program will look at, as the frozen blocks let them through."""
        data, splits = self.executor.bound.data, self._splits(program, context)
        ranges: dict[str, Any] = {split: np.zeros((data.clients, 2), dtype=np.int64) for split in SPLITS}
        rows: list[Tensor] = []
        at = 0
        for client in clients.tolist():
            rows_of_client = [torch.arange(0, device=data.device)]
            for split in splits:
                start, length = data.ranges(split)[client].tolist()
                ranges[split][client] = at, length
                rows_of_client.append(torch.arange(start, start + length, device=data.device))
                at += length
            rows.append(torch.cat(rows_of_client))
        x = self._passed(program, data, rows, group)
        return data.holding(x, data.targets(torch.cat(rows)), **ranges)

    def _passed(self, program: Program, data: FederatedData, rows: Sequence[Tensor], group: Group) -> Tensor:
        """Pass all clients' samples together where they received the same model, else each client's alone."""
        alone = self.static and program.trains
        pieces = self.open_pieces if alone else self.pieces
        shared = group.download.shared
        if not group.stacked and not alone:
            return self._pass(pieces, shared, data, torch.cat(list(rows)), BATCH)
        models = [tree.row(shared, i) if group.stacked else shared for i in range(len(rows))]
        size = data.rows if alone else BATCH
        parts = (self._pass(pieces, model, data, mine, size) for model, mine in zip(models, rows))
        return recorded(parts, sum(map(len, rows)), self.disk)

    def _pass(
        self, pieces: Sequence[nn.Module], shared: Tensors, data: FederatedData, rows: Tensor, size: int
    ) -> Tensor:
        if not len(rows):  # the shape of what comes out, by some sample
            return self._pass(pieces, shared, data, rows.new_zeros(1), 1)[:0]

        def batches() -> Iterator[Tensor]:
            for i in range(0, len(rows), size):
                yield single(data.gather(rows[i : i + size])[0], "capacity=")

        def fetch(names: Sequence[str]) -> Tensors:
            tensors = {k: shared.get(k, self.initial.get(k)) for k in names}
            # clones: a module may write to its statistics
            return {k: v.clone() if k in buffers else v for k, v in tensors.items() if v is not None}

        buffers = {k for piece in pieces for k, _ in piece.named_buffers()}
        return passed(pieces, fetch, batches(), len(rows), disk=self.disk, size=size)


@dataclass(frozen=True, eq=False)
class Classes:
    """An executor that runs each client's program on the model of its class.

    whole      the executor of clients that hold the whole model
    executors  those of the other classes
    class_of   the class of each client, -1: the whole model
    """

    whole: Executor
    executors: Mapping[int, ClassExecutor]
    class_of: np.ndarray
    name: str = "classes"

    def __call__(
        self, program: Program, clients: np.ndarray, group: Group, states: ClientState, context: RoundContext
    ) -> tuple[Upload, ClientState]:
        """Run the clients of each class together; return their results in the cohort's order."""
        classes = self.class_of[clients]
        if program.whole_model or (classes < 0).all():
            return self.whole(program, clients, group, states, context)
        results, order = [], []
        for number in np.unique(classes).tolist():
            rows = np.flatnonzero(classes == number).tolist()
            executor = self.whole if number < 0 else self.executors[number]
            held = subgroup(group, rows, range(len(rows)))
            results.append(executor(program, clients[rows], held, tree.rows(states, rows), context.of(rows)))
            order += rows
        if len(results) == 1:
            return results[0]
        device = next(iter(self.executors.values())).executor.bound.data.device
        uploads, new = tree.rows(tree.cat(results), put(np.argsort(order), device))
        return uploads, new

    def prefetch(self, program: Program, clients: np.ndarray, context: RoundContext) -> None:
        """Do nothing: what a class does depends on what its samples have passed before."""

    def release(self, kept: Any = ()) -> None:
        """Let the executors of all classes use the memory of earlier results again."""
        for executor in (self.whole, *[each.executor for each in self.executors.values()]):
            executor.release(kept)


def _endings(name: str) -> Iterator[str]:
    """Yield 'a.b.c', 'b.c' and 'c' of the name 'a.b.c'."""
    while name:
        yield name
        name = name.partition(".")[2]


def _paste(base: Tensor, part: Tensor | None) -> Tensor:
    """Write `part` over the leading part of `base`, in place: what a class holds is a leading part."""
    if part is not None:
        base[tuple(slice(0, n) for n in part.shape)] = part
    return base


def _merged(old: Tensor, new: Tensor | None, received: Tensor | None) -> Tensor:
    """Return a tensor that a client keeps: `new` where it holds it, elsewhere `received`, or else `old`."""
    if new is not None and new.shape == old.shape:
        return new
    base = old if received is None else received.expand_as(old)
    return base if new is None else _paste(base.clone(), new)


def rows_of_largest(data: FederatedData, most: int) -> tuple[int, Tensor]:
    """Return the client with most training samples, and the places of at most so many of them."""
    client = int(np.argmax(data.train[:, 1]))
    start, length = data.train[client].tolist()
    return client, torch.arange(start, start + min(length, most), device=data.device)


def _fitting(sizes: np.ndarray, budget: int) -> list[list[int]]:
    """Return rows in groups whose sizes together fit the budget, as far as a single one does."""
    groups: list[list[int]] = [[]]
    total = 0.0
    for row, size in enumerate(sizes.tolist()):
        if groups[-1] and total + size > budget:
            groups.append([])
            total = 0.0
        groups[-1].append(row)
        total += size
    return groups
