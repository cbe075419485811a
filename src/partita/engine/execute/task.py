"""What an executor is made for: a model, the data it is trained on, and what is known of both."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from partita.augment.base import Augmentation
from partita.core import check, tree
from partita.core.criterion import Criterion
from partita.core.device import arithmetic
from partita.core.types import Partition, Tensors
from partita.data import FederatedData
from partita.engine.execute.base import Runner
from partita.engine.execute.graph import silent
from partita.engine.execute.loop import Loop
from partita.engine.execute.plan import BoundProblem
from partita.engine.execute.pool import Pool
from partita.engine.execute.trial import not_stackable, takes_channels_last
from partita.engine.model.probe import ModelProfile
from partita.engine.model.problem import Change, ModelProblem, make_problem
from partita.engine.model.seeding import OwnDraws

TRIALS, TRIALS_SHARE = 25, 0.1  # steps that it takes to try executors, and the share of the work they may be
SLOW_BYTES = 8e6  # that autograd saves in a step: above this, steps of a CPU take tens of milliseconds


def each_time(what: Hashable, make: Callable[[], str]) -> str:  # noqa: ARG001
    """Return what a function returns."""
    return make()


@dataclass(frozen=True, eq=False)
class Task:
    """A model on the data of clients, with all that an executor may need to know.

    profile       is what a trial pass has shown of the model, the loss and the metric
    params        are the model's tensors by name
    memory        is the bytes that stacked clients may take (None: a quarter of the device's memory)
    choices       collects what executors have picked and why; it is written to config.json
    label         names a class of devices, and stands before the names of its choices
    change        is applied to the model in each step before it sees the batch
    tracks        says whether a training pass moves BatchNorm's statistics
    cohort_sizes  are the numbers of clients to expect in a round
    batch         is the number of samples of a step (None: all that a client has)
    half          says whether models compute in bfloat16
    notify        is called with a message before something that takes a while, and with "" after it
    method_loss   is what the method makes of the loss (None: nothing); it is a mean over samples if that is
    augment       is what happens to each training sample before the model sees it
    bind          binds a problem to data
    stacks        says that the model can be stacked, where that is known
    steps         is about how many steps clients will take (infinite: nobody knows)
    once          returns what a trial says of the model; of several runs in lockstep, one has made it
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
    notify: Callable[[str], None] = silent
    method_loss: Callable[[Criterion], Criterion] | None = None
    augment: Augmentation | None = None
    bind: Callable[[ModelProblem, FederatedData], BoundProblem] = BoundProblem
    stacks: bool = False
    steps: float = math.inf
    once: Callable[[Hashable, Callable[[], str]], str] = each_time

    @functools.cached_property
    def alone(self) -> ModelProblem:
        """The problem for one client at a time: the reference."""
        return replace(self._problem(stacked=False), draws=OwnDraws(bool(self.profile.behaviour.draws)))

    @functools.cached_property
    def together(self) -> ModelProblem:
        """The problem for many clients at once."""
        return self._problem(stacked=True)

    def _problem(self, stacked: bool) -> ModelProblem:
        profile = self.profile
        return make_problem(
            self.model,
            self.partition,
            profile.loss,
            profile.metrics,
            profile.buffers,
            forward=profile.forward,
            initial=self.params,
            stacked=stacked,
            clients=self.data.clients,
            change=self.change,
            tracks=self.tracks,
            checkpoints=profile.behaviour.checkpoints,
            recomputes=profile.behaviour.recomputes,
            functions=profile.behaviour.functions,
            objective=None if self.method_loss is None else self.method_loss(profile.loss),
            layout=profile.layout,
            augment=self.augment,
        )

    @functools.cached_property
    def loop(self) -> Loop:
        """A loop over clients, with the channels of images where the device is fastest."""
        last = takes_channels_last(self.alone.plain, self.params, self.data)
        return Loop(self.bind(replace(self.alone, half=self.half, last=last), self.data))

    @functools.cached_property
    def pool(self) -> Loop | Pool:
        """A worker for each core; a loop where there is one core, or where passes share something."""
        bound, behaviour, cores = self.loop.bound, self.profile.behaviour, torch.get_num_threads()
        if bound.data.device.type != "cpu" or cores == 1 or behaviour.draws or behaviour.remembers:
            return self.loop
        others = [Loop(self.bind(bound.problem.twin(), bound.data)) for _ in range(cores - 1)]
        return Pool((self.loop, *others))

    @property
    def room(self) -> int:
        """Bytes that stacked clients may take."""
        return budget(self.memory, self.data.device)

    @property
    def model_bytes(self) -> int:
        """Bytes of each stacked client: parameters, gradient, momentum, new values, delta."""
        return 5 * tree.nbytes(self.params)

    @property
    def sample_bytes(self) -> int:
        """Bytes of each of its samples: what autograd saves, and as much again on the way back."""
        return 3 * self.profile.sample_bytes

    @property
    def too_short(self) -> str:
        """Why it does not pay to find out whether clients can be stacked, and what is fastest ('': it does).

        That takes the time of some dozen steps: on a CPU where steps are slow and few, it is most of a run.
        Numbers alone decide, so that a run does the same however busy its machine is.
        """
        largest = int(self.data.train[:, 1].max())
        slow = min(self.batch or largest, largest) * self.profile.sample_bytes > SLOW_BYTES
        if self.data.device.type != "cpu" or not slow or self.steps * TRIALS_SHARE > TRIALS:
            return ""
        return f"about {self.steps:.0f} slow steps in all; to try others takes as long as {TRIALS} of them"

    def stacked(self, name: str, make: Callable[[BoundProblem], Runner]) -> Runner:
        """Return an executor that stacks clients; where the model cannot be stacked, each trains alone."""
        reason = self._not_stackable
        if not reason:
            return make(self.bind(replace(self.together, half=self.half), self.data))
        check.warn(
            f"executor={name!r}: {type(self.model).__name__} cannot be stacked; each client trains alone "
            f"(executor={self.pool.name!r}). Reason: {reason}",
        )
        self.choices["fallback"] = {"picked": self.pool.name, "why": reason}
        return self.pool

    @functools.cached_property
    def _not_stackable(self) -> str:
        if self.stacks:
            return ""
        if self.profile.behaviour.not_stackable:
            return self.profile.behaviour.not_stackable
        largest = int(self.data.train[:, 1].max())
        fits = self.room // max(1, 4 * self.sample_bytes)
        batch = max(3, min(self.batch or largest, largest, fits))

        def tried() -> str:
            with arithmetic("fp32"):
                problems = self.alone.plain, self.together.plain
                return not_stackable(*problems, self.params, self.data, batch, self.profile.trial)

        return self.once((batch, self.data.y.dtype, self.data.y.shape[1:]), tried)


_SHARED_BY = ContextVar("shared by", default=1)


@contextmanager
def memory_shared_by(processes: int) -> Iterator[None]:
    """Let so many processes, of which this is one, divide the memory of a machine or a GPU."""
    token = _SHARED_BY.set(processes)
    try:
        yield
    finally:
        _SHARED_BY.reset(token)


def budget(memory: int | None, device: torch.device) -> int:
    """Return the bytes that stacked clients may take: default a quarter of the device's memory."""
    whole = memory if memory is not None else _memory(device) // 4
    return max(1, whole // _SHARED_BY.get())


def _memory(device: torch.device) -> int:
    """Return all memory of the device: the same in every run on it, so that chunks are the same too."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
