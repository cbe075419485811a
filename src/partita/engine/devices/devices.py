"""What clients can hold: the classes of devices of a run, and what each of them means for the loop.

Without `capacity=` there is one class, which holds everything, and nothing here does anything.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from partita.capacity.memory import footprint, passing
from partita.core import check, draws, tree
from partita.core.parts import Capacity, Share
from partita.core.types import Download, Partition, ServerState, Tensors, Upload
from partita.engine.devices.classes import Classes, Part
from partita.engine.devices.holders import (
    Aggregate,
    Forge,
    SharedRegion,
    forged_by_holders,
    held_by,
    over_holders,
)
from partita.engine.devices.ordered import ordered
from partita.engine.execute import Executor, Task, budget, make_executor
from partita.engine.execute.normalize import by_batch
from partita.engine.execute.probe import saved_bytes
from partita.engine.execute.stackable import stackable
from partita.engine.table import Coded, Column

if TYPE_CHECKING:
    from partita.engine.federation import Federation

Shapes = Mapping[str, tuple[int, ...]]


class Devices:
    """The classes of a run, with the clients of each."""

    def __init__(self, run: Federation, capacity: Capacity | None) -> None:
        self.run, self.capacity = run, capacity
        self.kinds = np.zeros(run.data.clients, dtype=np.int64)
        self.shares: tuple[Share, ...] = (Share("", run.model),)
        if capacity is not None:
            self.shares = capacity.shares(run.model, _sample(run))
            self.kinds = np.asarray(capacity.assign(run.data.clients, run.settings.seed), dtype=np.int64)
        self.full = _shapes(run.model, run.names)
        self.shapes = [_shapes(share.model, run.names) for share in self.shares]
        self.whole = [not s.pieces and not s.widths and s.model is run.model for s in self.shares]
        self._received: dict[tuple[int, int], int] = {}
        self.used = [int(k) for k in np.unique(self.kinds)]
        if capacity is not None:
            self._check(capacity)

    @property
    def alike(self) -> bool:
        """Whether every client holds the whole model."""
        return all(self.whole[k] for k in self.used)

    @property
    def narrow(self) -> bool:
        """Whether some clients have another model than the server's, in the same names."""
        return any(self.shapes[k][name] != self.full[name] for k in self.used for name in self.shapes[k])

    @property
    def sizes(self) -> set[int]:
        """How many clients there are of each class."""
        return {int((self.kinds == k).sum()) for k in self.used}

    def lacks(self, names: Collection[str]) -> bool:
        """Whether there are clients that do not hold all of these."""
        return any(name not in self.shapes[k] for k in self.used for name in names)

    def narrow_model(self, client: int) -> nn.Module | None:
        """The model that a client holds, if it is another one than the server's."""
        kind = int(self.kinds[client])
        other = any(shape != self.full[name] for name, shape in self.shapes[kind].items())
        return self.shares[kind].model if other else None

    def _check(self, capacity: Capacity) -> None:
        if capacity.record == "disk" and self.run.settings.device != "cpu":
            raise check.fail("capacity record", "disk", "'memory' with device='cuda'")
        for part in self.run.stages:
            reason = part.algorithm.needs_full_model
            if reason and not self.alike:
                raise check.fail(
                    "capacity",
                    capacity.name,
                    f"devices that hold the whole model for {part.algorithm.name}: {reason}",
                )
            self._check_personal(self.run.partition_of(part.algorithm))
        if self.narrow and self.run.profile.buffers and self.run.settings.norm not in ("static", "personal"):
            check.warn(
                "capacity: narrow models share statistics with wide ones, whose channels have other means; "
                "use norm='static'",
            )
        nobody = [k for k, v in self.full.items() if all(self.shapes[c].get(k) != v for c in self.used)]
        if nobody:
            check.warn(
                f"capacity: no client holds all of {nobody[0]}{' and others' if nobody[1:] else ''}, so that "
                "it stays as it was at the start; let some clients be of a larger class",
            )

    def _check_personal(self, partition: Partition) -> None:
        """What never leaves a client must be there: a client cannot keep what it does not hold."""
        if not partition.shared:  # alone: what a device does not hold stays as it was at the start
            return
        mine = set(partition.personal) - set(partition.shared)
        for kind in self.used:
            frozen = {k for piece in self.shares[kind].pieces for k, _ in named(piece)}
            lost = sorted(mine & frozen or mine - set(self.shapes[kind]))
            if lost:
                norm = self.run.settings.norm == "personal"
                raise check.fail(
                    "norm" if norm else "personal",
                    "personal" if norm else lost[0],
                    "a part that all devices train"
                    + (f": {lost[0]} is personal then, and" if norm else ":")
                    + f" clients of the class {self.shares[kind].name!r} do not hold it",
                )

    # ---- what the loop asks

    def executor(self, whole: Executor) -> Executor:
        """An executor that gives each client its class's part of the model."""
        if self.alike:
            return whole
        sent = self._sent()
        parts = {k: self._part(k, sent) for k in self.used if not self.whole[k]}
        kinds = np.where(np.isin(self.kinds, list(parts)), self.kinds, -1)
        return Classes(whole, parts, kinds)

    def _sent(self) -> Upload:
        """What the method's clients send: of one that has taken no step, for its names and shapes."""
        run = self.run
        shared = tree.pick(run.base, run.partition.shared)
        extra = run.algorithm.server(run.problem).init(shared).extra
        download = Download(shared, extra, 0, draws.key(0, "start", 0, device=run.settings.device))
        state = run.algorithm.init_client(run.base, run.partition)
        rule = run.algorithm.local(replace(run.problem, owns_gradients=False))
        return rule.finish(rule.start(download, state), download, state)[0]

    def _part(self, kind: int, sent: Upload) -> Part:
        run, share = self.run, self.shares[kind]
        names, shapes = set(self.shapes[kind]), self.shapes[kind]
        region = {k: tuple(slice(0, n) for n in shape) for k, shape in shapes.items()}
        partition = Partition(*(tuple(k for k in part if k in names) for part in run.partition))
        profile = run.profile._replace(buffers=tuple(k for k in run.profile.buffers if k in names))
        part = Part(
            executor=None,  # type: ignore[arg-type]
            region=region,
            sent=sent,
            shapes={k: v.shape for k, v in run.base.items()},
            pieces=tuple(stackable(p).requires_grad_(False).eval() for p in share.pieces),
            open_pieces=tuple(by_batch(stackable(p).requires_grad_(False)) for p in share.pieces),
            base=run.base,
            static=run.settings.norm == "static",
            disk=self.capacity is not None and self.capacity.record == "disk",
        )
        held = part.held(run.base, stacked=False)
        data = part.trial(run.data, run.base) if share.pieces else run.data
        task = Task(
            share.model,
            data,
            partition,
            profile._replace(sample_bytes=saved_bytes(share.model, data)),
            held,
            memory=run.settings.memory_bytes,
            picks=run.picks,
            label=f"{share.name}, ",
            tracks=run.settings.norm != "static",
            change=ordered(share.widths, held, profile.buffers) if share.widths else None,
            cohort_sizes=self.sizes,
            batch=run.stages[run.stage].batch,
            half=run.settings.precision == "bf16",
            tell=run.tell,
        )
        runner = make_executor(run.settings.executor, task)
        fits = budget(run.settings.memory_bytes, run.data.x.device)
        return replace(
            part,
            executor=runner.on(run.data),
            record_bytes=data.x[:1].numel() * data.x.element_size() if share.pieces and not part.disk else 0,
            budget=fits,
        )

    def aggregate(self, rule: Aggregate) -> Aggregate:
        """Each part of the model over those who hold it."""
        if self.alike:
            return rule
        return over_holders(rule, self.held, self._kind_of)

    def forge(self, attack: Forge) -> Forge:
        """An attack that sees, of each part of the model, those who hold it."""
        return attack if self.alike else forged_by_holders(attack, self.held, self._kind_of)

    @functools.cached_property
    def _kind_of(self) -> list[int]:
        """The class of each client; made once, not in every round."""
        return self.kinds.tolist()

    @functools.cached_property
    def held(self) -> list[SharedRegion]:
        """Who holds what."""
        return held_by(self.full, self.shapes, self.run.settings.device)

    def settled(self, before: ServerState, after: ServerState, uploads: Upload) -> ServerState:
        """What nobody in the cohort holds stays as it was, whatever momentum the server has."""
        if self.alike or uploads.client is None:
            return after
        there = {int(self.kinds[c]) for c in uploads.client.tolist()}
        shared = dict(after.shared)
        for part in self.held:
            if not part.classes & there:
                for name, where in part.columns.items():
                    if name in shared and name in before.shared:
                        shared[name] = _put_back(shared[name], before.shared[name], where)
        return after._replace(shared=shared)

    # ---- what it costs

    def received(self, client: int) -> int:
        """Bytes that a client of its class downloads: its part, and the pieces that its samples pass."""
        return self.received_by(int(self.kinds[client]))

    def received_by(self, kind: int) -> int:
        """The same for a client of this class."""
        if (self.run.stage, kind) not in self._received:
            self._received[self.run.stage, kind] = self._down(kind)
        return self._received[self.run.stage, kind]

    def _down(self, kind: int) -> int:
        server = self.run.server
        down = self._bytes(kind, server.shared) + self._bytes(kind, server.extra)
        frozen = [k for piece in self.shares[kind].pieces for k, _ in named(piece)]
        return down + tree.nbytes({k: server.shared[k] for k in frozen if k in server.shared})

    def sent(self, uploads: Upload) -> int:
        """Bytes that these clients have uploaded."""
        if self.alike or uploads.client is None:
            return tree.nbytes(uploads.payload)
        one = tree.row(uploads.payload, 0) if len(uploads.client) else ()
        each = {k: sum(self._bytes(k, x) for x in one) for k in self.used}
        return sum(each[int(self.kinds[c])] for c in uploads.client.tolist())

    @functools.cached_property
    def memory(self) -> list[tuple[int, float]]:
        """For each class the bytes that a device needs, and its capacity as the paper counts it.

        It needs the 2p + 2a of training, or what its samples take to pass the largest frozen piece, if that
        is more. Capacity is 2p + 2a as a share of the whole model's.
        """
        run = self.run
        batch = run.stages[-1].batch or int(run.data.train[:, 1].max())
        size = max(p.element_size() for p in run.model.parameters())
        x = _sample(run)[:1]

        def numbers(share: Share) -> tuple[int, int]:
            inside, most = x, 0
            for piece in share.pieces:
                held, inside = passing(piece, inside, batch)
                most = max(most, held)
            p, a = footprint(share.model, inside)
            return 2 * p + 2 * a * batch, most

        whole, _ = numbers(Share("", run.model))
        return [(size * max(train, frozen), train / whole) for train, frozen in map(numbers, self.shares)]

    def described(self) -> dict[str, Column]:
        """What clients.csv has about the clients' devices."""
        if self.capacity is None:
            return {"class": None, "capacity": 1.0, "memory": None}
        sizes, shares = zip(*self.memory)
        return {
            "class": Coded(self.kinds, [share.name for share in self.shares]),
            "capacity": Coded(self.kinds, [round(share, 6) for share in shares]),
            "memory": Coded(self.kinds, sizes),
        }

    def sent_by(self, kind: int) -> int:
        """Bytes that a client of this class uploads in a turn of this stage."""
        return sum(self._bytes(kind, x) for x in self._sent().payload)

    def parameters(self, kind: int) -> int:
        """Numbers that a device of this class trains or tracks."""
        return sum(int(np.prod(shape, dtype=np.int64)) for shape in self.shapes[kind].values())

    def _bytes(self, kind: int, tensors: Tensors) -> int:
        shapes, total = self.shapes[kind], 0
        for name, value in tensors.items():
            if name in shapes:
                total += int(np.prod(shapes[name], dtype=np.int64)) * value.element_size()
            elif name not in self.run.base:
                total += value.numel() * value.element_size()
        return total


def _put_back(now: Tensor, before: Tensor, where: Tensor | None) -> Tensor:
    if where is None:
        return before
    found = now.clone()
    found.view(-1)[where] = before.reshape(-1)[where]
    return found


def named(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers with their names."""
    return [*module.named_parameters(), *module.named_buffers()]


def _shapes(model: nn.Module, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    there = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {k: tuple(there[k].shape) for k in names if k in there}


def _sample(run: Federation) -> Tensor:
    client = int(np.argmax(run.data.train[:, 1]))
    start, length = run.data.train[client].tolist()
    rows = torch.arange(start, start + min(length, 4), device=run.data.x.device)
    return run.data.gather(rows)[0]
