"""What an executor is made for: a model, the data it is trained on, and what is known of both."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from partita.core import check, tree
from partita.core.device import arithmetic
from partita.core.types import Partition, Tensors
from partita.data import FederatedData
from partita.engine.execute.base import Runner
from partita.engine.execute.loop import Loop
from partita.engine.execute.plan import BoundProblem
from partita.engine.execute.pool import Pool
from partita.engine.execute.trial import takes_channels_last, why_not_stackable
from partita.engine.model.probe import ModelProfile
from partita.engine.model.problem import Change, ModelProblem, reference, stacked
from partita.engine.model.seeding import OwnDraws


@dataclass(frozen=True, eq=False)
class Task:
    """A model on the data of clients, with all that an executor may want to know.

    profile  what a trial pass has shown of the model, the loss and the metric
    params    its tensors by name
    memory    bytes that stacked clients may take (None: a quarter of the device's memory)
    choices     what was decided, by what, and why: it goes to config.json
    label     of a class of devices, before the names of its choices
    change    what a step does to the model before it looks at the batch
    tracks    whether a training pass moves statistics
    cohort_sizes  numbers of clients that come in every round
    batch     samples of a step (None: all that a client has)
    half      whether models compute in bfloat16
    tell      hears what takes a while
    """

    model: nn.Module
    data: FederatedData
    partition: Partition
    profile: ModelProfile
    params: Tensors
    memory: int | None = None
    choices: dict[str, dict[str, str]] = field(default_factory=dict)
    label: str = ""
    change: Change | None = None
    tracks: bool = True
    cohort_sizes: Collection[int] = ()
    batch: int | None = None
    half: bool = False
    tell: Callable[[str], None] = lambda text: None  # noqa: ARG005

    @functools.cached_property
    def alone(self) -> ModelProblem:
        """The problem for one client at a time: the reference."""
        own = OwnDraws(bool(self.profile.own.draws))
        return replace(self._problem(reference), draws=own)

    @functools.cached_property
    def together(self) -> ModelProblem:
        """The problem for many clients at once."""
        return self._problem(stacked)

    def _problem(self, form: Callable[..., ModelProblem]) -> ModelProblem:
        known = self.profile
        given = (self.partition, *known[:3], self.data.clients, self.change, self.tracks)
        return form(self.model, *given, known.own.recomputes)

    @functools.cached_property
    def loop(self) -> Loop:
        """One client after another, with images as the device likes them."""
        last = takes_channels_last(self.alone, self.params, self.data)
        return Loop(BoundProblem(replace(self.alone, half=self.half, last=last), self.data))

    @functools.cached_property
    def pool(self) -> Loop | Pool:
        """A worker for each core; a loop where there is one, or where passes share something."""
        bound, own, count = self.loop.bound, self.profile.own, torch.get_num_threads()
        if bound.data.x.device.type != "cpu" or count == 1 or own.draws or own.remembers:
            return self.loop
        return Pool(
            (self.loop, *[Loop(BoundProblem(bound.problem.twin(), bound.data)) for _ in range(count - 1)])
        )

    @property
    def room(self) -> int:
        """Bytes that stacked clients may take."""
        return budget(self.memory, self.data.x.device)

    @property
    def model_bytes(self) -> int:
        """Of each stacked client: parameters, gradient, momentum, new values, delta."""
        return 5 * tree.nbytes(self.params)

    @property
    def sample_bytes(self) -> int:
        """Of each of its samples: what autograd saves, and as much again on the way back."""
        return 3 * self.profile.sample_bytes

    def stacked(self, name: str, make: Callable[[BoundProblem], Runner]) -> Runner:
        """An executor that stacks clients; where the model cannot be stacked, each trains alone."""
        reason = self._not_stackable
        if reason is None:
            return make(BoundProblem(replace(self.together, half=self.half), self.data))
        check.warn(
            f"executor={name!r}: {type(self.model).__name__} cannot be stacked; each client trains alone "
            f"(executor={self.pool.name!r}). Reason: {reason}",
        )
        self.choices["fallback"] = {"picked": self.pool.name, "why": reason}
        return self.pool

    @functools.cached_property
    def _not_stackable(self) -> str | None:
        if self.profile.own.alone:
            return self.profile.own.alone
        largest = int(self.data.train[:, 1].max())
        fits = self.room // max(1, 4 * self.sample_bytes)
        tried = max(3, min(self.batch or largest, largest, fits))
        with arithmetic("fp32"):
            return why_not_stackable(self.alone, self.together, self.params, self.data, tried)


def budget(memory: int | None, device: torch.device) -> int:
    """Bytes that stacked clients may take: as the user says, or a quarter of what there is."""
    return memory if memory is not None else _memory(device) // 4


def _memory(device: torch.device) -> int:
    """What the device has in all: the same in every run on it, so that chunks are the same too."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
