"""What clients can hold: the classes of devices of a run, and what each of them means for the loop.

Without `capacity=` there is one class, which holds everything, and nothing here does anything.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from partita.capacity.memory import footprint, passing
from partita.core import check, tree
from partita.core.parts import Capacity, Share, StagePlan
from partita.core.types import Partition, ServerState, Tensors, Upload
from partita.data import FederatedData
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
from partita.engine.execute import Executor, Factory, Task, make_executor
from partita.engine.model.normalize import by_batch
from partita.engine.model.probe import saved_bytes
from partita.engine.model.stackable import stackable
from partita.engine.settings import Settings
from partita.engine.table import Coded, Column

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Devices:
    """The classes of a run, with the clients of each.

    kinds   the class of each client
    shares  what each class holds of the model
    full    by name the shapes of the whole model, and `shapes` those that each class holds
    whole   for each class, whether it holds the whole model
    used    the classes that have clients
    sample  a batch of samples, to count activations with
    """

    capacity: Capacity | None
    model: nn.Module
    kinds: np.ndarray
    shares: tuple[Share, ...]
    full: Shapes
    shapes: list[Shapes]
    whole: list[bool]
    used: list[int]
    sample: Tensor

    @classmethod
    def of(
        cls,
        capacity: Capacity | None,
        model: nn.Module,
        names: Sequence[str],
        data: FederatedData,
        seed: int,
    ) -> Devices:
        """Find the classes of these clients, and the shapes that each of them holds."""
        kinds, sample = np.zeros(data.clients, dtype=np.int64), _sample(data)
        shares: tuple[Share, ...] = (Share("", model),)
        if capacity is not None:
            shares = capacity.shares(model, sample)
            kinds = np.asarray(capacity.assign(data.clients, seed), dtype=np.int64)
        return cls(
            capacity=capacity,
            model=model,
            kinds=kinds,
            shares=shares,
            full=_shapes(model, names),
            shapes=[_shapes(share.model, names) for share in shares],
            whole=[not s.pieces and not s.widths and s.model is model for s in shares],
            used=[int(k) for k in np.unique(kinds)],
            sample=sample,
        )

    @functools.cached_property
    def alike(self) -> bool:
        """Whether every client holds the whole model."""
        return all(self.whole[k] for k in self.used)

    @functools.cached_property
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

    def check(
        self, plans: Sequence[StagePlan], splits: Sequence[Partition], settings: Settings, has_buffers: bool
    ) -> None:
        """Refuse methods and splits that these devices cannot run, and warn of what they would not train."""
        if self.capacity is None:
            return
        if self.capacity.record == "disk" and settings.device != "cpu":
            raise check.fail("capacity record", "disk", "'memory' with device='cuda'")
        for plan, partition in zip(plans, splits):
            reason = plan.algorithm.needs_full_model
            if reason and not self.alike:
                allowed = f"devices that hold the whole model for {plan.algorithm.name}: {reason}"
                raise check.fail("capacity", self.capacity.name, allowed)
            self._check_personal(partition, settings.norm == "personal")
        if self.narrow and has_buffers and settings.norm not in ("static", "personal"):
            check.warn(
                "capacity: narrow models share statistics with wide ones, whose channels have other means; "
                "use norm='static'",
            )
        untrained = [k for k, v in self.full.items() if all(self.shapes[c].get(k) != v for c in self.used)]
        if untrained:
            check.warn(
                f"capacity: no client holds all of {untrained[0]}{' and others' if untrained[1:] else ''}, "
                "so that it stays as it was at the start; let some clients be of a larger class",
            )

    def _check_personal(self, partition: Partition, norms_are_personal: bool) -> None:
        """Refuse a personal part that some clients do not hold: they cannot keep it."""
        if not partition.shared:  # alone: what a device does not hold stays as it was at the start
            return
        personal = set(partition.personal) - set(partition.shared)
        for kind in self.used:
            frozen = {k for piece in self.shares[kind].pieces for k, _ in named(piece)}
            missing = sorted(personal & frozen or personal - set(self.shapes[kind]))
            if missing:
                field, value = ("norm", "personal") if norms_are_personal else ("personal", missing[0])
                then = f": {missing[0]} is personal then, and" if norms_are_personal else ":"
                raise check.fail(
                    field,
                    value,
                    f"a part that all devices train{then} clients of the class {self.shares[kind].name!r} do "
                    "not hold it",
                )

    # ---- training

    def executor(self, executor: str | Factory, whole: Executor, task: Task, upload_like: Upload) -> Executor:
        """Return an executor that gives each client its class's part of the model.

        whole        the executor of those who hold the whole model, and `task` what it was made for
        upload_like  what a client that holds everything sends
        """
        parts = {k: self._part(k, executor, task, upload_like) for k in self.used if not self.whole[k]}
        kinds = np.where(np.isin(self.kinds, list(parts)), self.kinds, -1)
        return Classes(whole, parts, kinds)

    def _part(self, kind: int, executor: str | Factory, task: Task, upload_like: Upload) -> Part:
        share, shapes, initial = self.shares[kind], self.shapes[kind], task.params
        partition = Partition(*(tuple(k for k in names if k in shapes) for names in task.partition))
        profile = task.profile._replace(buffers=tuple(k for k in task.profile.buffers if k in shapes))
        part = Part(
            executor=None,  # type: ignore[arg-type]
            region={k: tuple(slice(0, n) for n in shape) for k, shape in shapes.items()},
            sent=upload_like,
            shapes={k: v.shape for k, v in initial.items()},
            pieces=tuple(stackable(p).requires_grad_(False).eval() for p in share.pieces),
            open_pieces=tuple(by_batch(stackable(p).requires_grad_(False)) for p in share.pieces),
            base=initial,
            static=not task.tracks,
            disk=self.capacity is not None and self.capacity.record == "disk",
            budget=task.room,
        )
        held = part.held(initial, stacked=False)
        data = part.trial(task.data, initial) if share.pieces else task.data
        own_task = replace(
            task,
            model=share.model,
            data=data,
            partition=partition,
            profile=profile._replace(sample_bytes=saved_bytes(share.model, data)),
            params=held,
            label=f"{share.name}, ",
            change=ordered(share.widths, held, profile.buffers) if share.widths else None,
            cohort_sizes=self.sizes,
        )
        return replace(
            part,
            executor=make_executor(executor, own_task).on(task.data),
            record_bytes=data.x[:1].numel() * data.x.element_size() if share.pieces and not part.disk else 0,
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
        return [int(kind) for kind in self.kinds]

    @functools.cached_property
    def held(self) -> list[SharedRegion]:
        """Who holds what."""
        return held_by(self.full, self.shapes, self.sample.device)

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

    def bytes_down(self, kind: int, server: ServerState) -> int:
        """Bytes that a client of this class downloads: its part, and the pieces that its samples pass."""
        frozen = [k for piece in self.shares[kind].pieces for k, _ in named(piece)]
        pieces = {k: server.shared[k] for k in frozen if k in server.shared}
        return self._bytes(kind, server.shared) + self._bytes(kind, server.extra) + tree.nbytes(pieces)

    def bytes_up(self, kind: int, upload: Upload) -> int:
        """Bytes that a client of this class uploads, where one with the whole model sends `upload`."""
        return sum(self._bytes(kind, part) for part in upload.payload)

    def bytes_sent(self, uploads: Upload) -> int:
        """Bytes that these clients have uploaded."""
        if self.alike or uploads.client is None:
            return tree.nbytes(uploads.payload)
        one = tree.row(uploads.payload, 0) if len(uploads.client) else ()
        each = {k: sum(self._bytes(k, x) for x in one) for k in self.used}
        return sum(each[int(self.kinds[c])] for c in uploads.client.tolist())

    def memory(self, batch: int) -> list[tuple[int, float]]:
        """Return for each class the bytes that a device needs, and its capacity as the paper counts it.

        It needs the 2p + 2a of training, or what its samples take to pass the largest frozen piece, if that
        is more. Capacity is 2p + 2a as a share of the whole model's.
        """
        size = max(p.element_size() for p in self.model.parameters())
        x = self.sample[:1]

        def numbers(share: Share) -> tuple[int, int]:
            inside, most = x, 0
            for piece in share.pieces:
                held, inside = passing(piece, inside, batch)
                most = max(most, held)
            p, a = footprint(share.model, inside)
            return 2 * p + 2 * a * batch, most

        whole, _ = numbers(Share("", self.model))
        return [(size * max(train, frozen), train / whole) for train, frozen in map(numbers, self.shares)]

    def columns(self, batch: int) -> dict[str, Column]:
        """The columns of clients.csv about the clients' devices."""
        if self.capacity is None:
            return {"class": None, "capacity": 1.0, "memory": None}
        sizes, shares = zip(*self.memory(batch))
        return {
            "class": Coded(self.kinds, [share.name for share in self.shares]),
            "capacity": Coded(self.kinds, [round(share, 6) for share in shares]),
            "memory": Coded(self.kinds, sizes),
        }

    def parameters(self, kind: int) -> int:
        """Numbers that a device of this class trains or tracks."""
        return sum(int(np.prod(shape, dtype=np.int64)) for shape in self.shapes[kind].values())

    def _bytes(self, kind: int, tensors: Tensors) -> int:
        shapes, total = self.shapes[kind], 0
        for name, value in tensors.items():
            if name in shapes:
                total += int(np.prod(shapes[name], dtype=np.int64)) * value.element_size()
            elif name not in self.full:
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


def _sample(data: FederatedData) -> Tensor:
    client = int(np.argmax(data.train[:, 1]))
    start, length = data.train[client].tolist()
    return data.gather(torch.arange(start, start + min(length, 4), device=data.x.device))[0]
