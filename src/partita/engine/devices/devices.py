"""What clients can hold: the classes of devices of a run, and what each of them means for the loop.

Without `capacity=` there is one class, which holds the whole model, and nothing here changes a run.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor, nn

from partita.capacity.memory import footprint, passing
from partita.core import check, tree
from partita.core.inputs import each, single
from partita.core.inputs import tensors as tensors_in
from partita.core.parts import Capacity, Share, StagePlan
from partita.core.types import Inputs, Partition, ServerState, Tensors, Upload
from partita.data import FederatedData
from partita.engine.devices.classes import Classes, ClassExecutor, rows_of_largest
from partita.engine.devices.holders import (
    Aggregate,
    Forge,
    SharedRegion,
    forged_by_holders,
    held_by,
    over_holders,
    with_columns,
)
from partita.engine.devices.labels import masked, outputs_of, owned
from partita.engine.devices.ordered import ordered
from partita.engine.execute import Executor, Factory, Task, make_executor
from partita.engine.model.normalize import by_batch
from partita.engine.model.probe import saved_bytes
from partita.engine.model.stackable import stackable
from partita.engine.settings import Settings
from partita.engine.table import Coded, Column

SAMPLES = 4  # to count activations with
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Devices:
    """The classes of devices of a run, with the clients of each.

    class_of  the class of each client
    shares    what each class holds of the model
    full      the shapes of the whole model, by name
    shapes    those that each class holds
    complete  for each class, whether it holds the whole model
    used      the classes that have clients
    sample    a batch of samples, to count activations with
    """

    capacity: Capacity | None
    model: nn.Module
    class_of: np.ndarray
    shares: tuple[Share, ...]
    full: Shapes
    shapes: list[Shapes]
    complete: list[bool]
    used: list[int]
    sample: Inputs

    @classmethod
    def of(
        cls,
        capacity: Capacity | None,
        model: nn.Module,
        names: Sequence[str],
        data: FederatedData,
        seed: int,
        batch: int = 1,
    ) -> Devices:
        """Find the classes of these clients, and the shapes that each of them holds.

        batch  samples in a training step, of which a device's memory must be enough
        """
        class_of, (_, rows) = np.zeros(data.clients, dtype=np.int64), rows_of_largest(data, SAMPLES)
        sample = data.gather(rows)[0]
        shares: tuple[Share, ...] = (Share("", model),)
        if capacity is not None:
            shares = capacity.shares(model, sample, batch)
            class_of = np.asarray(capacity.assign(data.clients, seed), dtype=np.int64)
        return cls(
            capacity=capacity,
            model=model,
            class_of=class_of,
            shares=shares,
            full=_shapes(model, names),
            shapes=[_shapes(share.model, names) for share in shares],
            complete=[not s.pieces and not s.widths and s.model is model for s in shares],
            used=[int(k) for k in np.unique(class_of)],
            sample=sample,
        )

    @functools.cached_property
    def alike(self) -> bool:
        """Whether every client holds the whole model."""
        return all(self.complete[k] for k in self.used)

    @property
    def uniform(self) -> bool:
        """Whether every client holds the whole model, and trains it by the loss of the run."""
        return self.alike and not self.masks

    @property
    def masks(self) -> bool:
        """Whether a client's loss leaves out the classes of which it has no sample."""
        return self.capacity is not None and self.capacity.mask

    @functools.cached_property
    def narrow(self) -> bool:
        """Whether some clients have another model than the server's: a narrower one, or of fewer blocks."""
        return any(self._is_another(k) for k in self.used)

    def _is_another(self, kind: int) -> bool:
        return self.shares[kind].model is not self.model and not self.shares[kind].pieces

    @property
    def sizes(self) -> set[int]:
        """The numbers of clients that classes have."""
        return {int((self.class_of == k).sum()) for k in self.used}

    def lacks(self, names: Collection[str]) -> bool:
        """Return whether there are clients that do not hold all tensors of these names."""
        return any(name not in self.shapes[k] for k in self.used for name in names)

    def narrow_model(self, client: int) -> nn.Module | None:
        """Return the model that a client holds if it is another than the server's, else None."""
        number = int(self.class_of[client])
        return self.shares[number].model if self._is_another(number) else None

    def of_model(self, client: int, tensors: Tensors) -> Tensors:
        """Return those of the tensors that a client's model has: some, if it is another than the server's."""
        number = int(self.class_of[client])
        held = self.shapes[number] if self._is_another(number) else tensors
        return {k: v for k, v in tensors.items() if k in held}

    def check(
        self, plans: Sequence[StagePlan], splits: Sequence[Partition], settings: Settings, has_buffers: bool
    ) -> None:
        """Refuse methods and splits that these devices cannot run, and warn of what they would not train."""
        if self.capacity is None:
            return
        if self.capacity.record == "disk" and settings.device != "cpu":
            raise check.fail("capacity record", "disk", "'memory', or device='cpu'", "records are on the GPU")
        for plan, partition in zip(plans, splits):
            reason = plan.algorithm.needs_full_model
            if reason and not self.alike:
                allowed = f"devices that hold the whole model for {plan.algorithm.name}"
                raise check.fail("capacity", self.capacity.name, f"{allowed}: {reason}")
            self._check_personal(partition, settings.norm == "personal")
        channels = [self.shapes[k] for k in self.used if self.shapes[k].keys() == self.full.keys()]
        narrow = any(shapes != self.full for shapes in channels)
        if narrow and has_buffers and settings.norm not in ("static", "personal"):
            check.warn(
                "capacity: narrow and wide models share statistics although the means of their channels "
                "differ; use norm='static'",
            )
        untrained = [k for k, v in self.full.items() if all(self.shapes[c].get(k) != v for c in self.used)]
        if untrained:
            check.warn(
                f"capacity: no client holds all of {untrained[0]}{' and others' if untrained[1:] else ''}, "
                "which is not trained; let some clients be of a larger class",
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
                reason = f"clients of the class {self.shares[kind].name!r} do not train {missing[0]}"
                raise check.fail(field, value, "a part that all devices train", reason)

    # ---- training

    def executor(self, executor: str | Factory, whole: Executor, task: Task, upload_like: Upload) -> Executor:
        """Return an executor that gives each client its class's part of the model.

        whole        the executor of those who hold the whole model, and `task` what it was made for
        upload_like  what a client that holds everything sends
        """
        partial = [k for k in self.used if not self.complete[k] or self.masks]
        executors = {k: self._class_executor(k, executor, task, upload_like) for k in partial}
        return Classes(whole, executors, np.where(np.isin(self.class_of, partial), self.class_of, -1))

    def _class_executor(
        self, kind: int, executor: str | Factory, task: Task, upload_like: Upload
    ) -> ClassExecutor:
        share, shapes, initial = self.shares[kind], self.shapes[kind], task.params
        partition = Partition(*(tuple(k for k in names if k in shapes) for names in task.partition))
        profile = task.profile._replace(buffers=tuple(k for k in task.profile.buffers if k in shapes))
        part = ClassExecutor(
            number=kind,
            executor=None,  # type: ignore[arg-type]
            region={k: tuple(slice(0, n) for n in shape) for k, shape in shapes.items()},
            upload_like=upload_like,
            shapes={k: v.shape for k, v in initial.items()},
            pieces=tuple(stackable(p).requires_grad_(False).eval() for p in share.pieces),
            open_pieces=tuple(by_batch(stackable(p).requires_grad_(False)) for p in share.pieces),
            initial=initial,
            static=not task.tracks,
            disk=self.capacity is not None and self.capacity.record == "disk",
            budget=task.room,
        )
        held = part.held(initial, stacked=False)
        data = part.trial(task.data, initial) if share.pieces else task.data
        if self.masks:
            outputs = outputs_of(self.model, single(self.sample, "capacity="), profile.loss, data.y)
            labels, classes = owned(data, outputs)
            part, profile = (
                replace(part, training=labels),
                profile._replace(loss=masked(profile.loss, classes)),
            )
        class_task = replace(
            task,
            model=share.model,
            data=data,
            partition=partition,
            profile=profile._replace(sample_bytes=saved_bytes(share.model, data, profile.forward)),
            params=held,
            label=f"{share.name}, ",
            change=ordered(share.widths, held, profile.buffers) if share.widths else None,
            cohort_sizes=self.sizes,
        )
        return replace(
            part,
            executor=make_executor(executor, class_task).on(task.data),
            record_bytes=data.row_bytes if share.pieces and not part.disk else 0,
        )

    def aggregate(self, rule: Aggregate) -> Aggregate:
        """Return a rule that aggregates each region of the model over the clients that hold it."""
        return rule if self.alike else over_holders(rule, self.regions, self._classes)

    def forge(self, attack: Forge) -> Forge:
        """Return an attack that sees, of each region of the model, the clients that hold it."""
        return attack if self.alike else forged_by_holders(attack, self.regions, self._classes)

    @functools.cached_property
    def _classes(self) -> list[int]:
        """The class of each client as Python's numbers; made once, not in every round."""
        return [int(number) for number in self.class_of]

    @functools.cached_property
    def regions(self) -> list[SharedRegion]:
        """The regions of the model, with the classes that hold each."""
        return held_by(self.full, self.shapes, tensors_in(self.sample)[0].device)

    def settled(self, before: ServerState, after: ServerState, uploads: Upload) -> ServerState:
        """Undo the server's step, whatever its momentum, in regions that nobody in the cohort holds."""
        if self.alike or uploads.client is None:
            return after
        classes = {int(self.class_of[c]) for c in uploads.client.tolist()}
        shared = dict(after.shared)
        for region in self.regions:
            if not region.classes & classes:
                for name, columns in region.columns.items():
                    if name in shared and name in before.shared:
                        old = before.shared[name]
                        old = old if columns is None else old.reshape(-1)[columns]
                        shared[name] = with_columns(shared[name], columns, old)
        return after._replace(shared=shared)

    # ---- what it costs

    def held(self, kind: int, tensors: Tensors) -> Tensors:
        """Return what a client of this class holds of these tensors, and what is no tensor of the model."""
        shapes = self.shapes[kind]
        return {
            k: v[tuple(slice(0, n) for n in shapes[k])] if k in shapes else v
            for k, v in tensors.items()
            if k in shapes or k not in self.full
        }

    def received(self, kind: int, shared: Tensors) -> Tensors:
        """Return what a client of this class downloads of the model: its part, and its frozen blocks."""
        frozen = [k for piece in self.shares[kind].pieces for k, _ in named(piece)]
        return {**{k: shared[k] for k in frozen if k in shared}, **self.held(kind, shared)}

    def bytes_down(self, kind: int, server: ServerState) -> int:
        """Return the bytes that a client of this class downloads."""
        return tree.nbytes(self.received(kind, server.shared)) + self._bytes(kind, server.extra)

    def bytes_up(self, kind: int, upload: Upload) -> int:
        """Return the bytes that a client of this class uploads of what `upload` is of the whole model."""
        return sum(self._bytes(kind, part) for part in upload.payload)

    def bytes_sent(self, uploads: Upload) -> int:
        """Return the bytes that these clients have uploaded."""
        if self.alike or uploads.client is None:
            return tree.nbytes(uploads.payload)
        one = tree.row(uploads.payload, 0) if len(uploads.client) else ()
        each = {k: sum(self._bytes(k, x) for x in one) for k in self.used}
        return sum(each[int(self.class_of[c])] for c in uploads.client.tolist())

    def memory(self, batch: int) -> list[tuple[int, float]]:
        """Return for each class the bytes that a device needs, and its capacity as the paper counts it.

        It needs the 2p + 2a of training, or what its samples take to pass the largest frozen piece, if that
        is more. Capacity is 2p + 2a as a share of the whole model's.
        """
        size = max(p.element_size() for p in self.model.parameters())
        x = each(lambda t: t[:1], self.sample)

        def numbers(share: Share) -> tuple[int, int]:
            activations, largest = x, 0
            for piece in share.pieces:
                held, activations = passing(piece, activations, batch)
                largest = max(largest, held)
            p, a = footprint(share.model, activations)
            return 2 * p + 2 * a * batch, largest

        whole, _ = numbers(Share("", self.model))
        return [(size * max(train, frozen), train / whole) for train, frozen in map(numbers, self.shares)]

    def columns(self, batch: int) -> dict[str, Column]:
        """Return the columns of clients.csv about the clients' devices."""
        if self.capacity is None:
            return {"class": None, "capacity": 1.0, "memory": None}
        sizes, shares = zip(*self.memory(batch))
        return {
            "class": Coded(self.class_of, [share.name for share in self.shares]),
            "capacity": Coded(self.class_of, [round(share, 6) for share in shares]),
            "memory": Coded(self.class_of, sizes),
        }

    def parameters(self, kind: int) -> int:
        """Return how many numbers a device of this class trains or tracks."""
        return sum(int(np.prod(shape, dtype=np.int64)) for shape in self.shapes[kind].values())

    def _bytes(self, kind: int, tensors: Tensors) -> int:
        shapes, total = self.shapes[kind], 0
        for name, value in tensors.items():
            if name in shapes:
                total += int(np.prod(shapes[name], dtype=np.int64)) * value.element_size()
            elif name not in self.full:
                total += value.numel() * value.element_size()
        return total


def named(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers of a module with their names."""
    return [*module.named_parameters(), *module.named_buffers()]


def _shapes(model: nn.Module, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    tensors = dict(named(model))
    return {k: tuple(tensors[k].shape) for k in names if k in tensors}
