"""What driver and workers say to each other."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from partita.core import check, tree
from partita.core.types import Tensors
from partita.data.columns import Columns
from partita.engine.execute import EXECUTORS
from partita.engine.workers.share import Assignment
from partita.engine.workers.wire import Packed, pack, pickled, unpack, unpickled

if TYPE_CHECKING:
    from partita.engine.setup import Setup

Choices = dict[str, dict[str, str]]


class Samples(NamedTuple):
    """The samples of all clients, on the host: once for each machine."""

    key: int
    x: Columns
    y: Tensor


class StageBlob(NamedTuple):
    """All that a stage is bound from, as bytes in which the samples are named.

    `key` tells it apart from all stages that the driver has had.
    """

    key: int
    content: bytes

    @classmethod
    def of(cls, key: int, setup: Setup, number: int, initial: Tensors, memory: int) -> StageBlob:
        """Return what a worker needs of a run: no files, no listeners, no other workers."""
        settings = replace(
            setup.settings,
            memory=memory,
            baselines=False,
            out=None,
            report=False,
            resume=False,
            callbacks=(),
            progress=False,
            max_time=None,
            store="memory",
            workers=None,
            schedule=None,
            attack=None,
            executor=_own_factory(setup.settings.executor),
        )
        alone = replace(
            setup,
            settings=settings,
            plans=tuple(replace(plan, schedule=None) for plan in setup.plans),
            clean_data=setup.data,
            newcomers=None,
            crew=None,
            shorter=None,
        )
        outside = {"x": setup.data.x, "y": setup.data.y}
        try:
            return cls(key, pickled((alone, number, initial, torch.get_default_dtype()), outside))
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            allowed = "none, or a model, a method, a loss and metrics without open files, locks or generators"
            reason = f"workers cannot be sent what they need ({check.named_reason(error)})"
            raise check.fail("workers", setup.settings.workers, allowed, reason) from error

    def opened(self, samples: Samples) -> tuple[Setup, int, Tensors]:
        """Return the run, the number of the stage and the model that it begins with, on these samples."""
        setup, number, initial, kind = unpickled(self.content, lambda name: getattr(samples, name))
        torch.set_default_dtype(kind)  # as in the driver, for constants that a model makes
        device = setup.settings.device
        data = setup.data.stay(device) if setup.data.elsewhere else setup.data.to(device)
        return replace(setup, data=data, clean_data=data), number, initial


def _own_factory(executor: Any) -> Any:
    """Return the function that makes an executor, where the user has registered it under a name."""
    factory = EXECUTORS[executor] if isinstance(executor, str) else executor
    return executor if factory.__module__.startswith("partita.") else factory


class Call(NamedTuple):
    """A share to compute.

    program   the name of the program; of a `function`, what it does
    sum       whether what the clients send is added up
    choices   what executors have decided so far
    function  whether what comes is no share, but a function to call
    together  how many workers share the memory of a machine or a GPU, for functions
    """

    program: str
    sum: bool = False
    choices: Choices = {}  # noqa: RUF012
    function: bool = False
    together: int = 1


class Place(NamedTuple):
    """Where a worker is."""

    machine: str
    pid: int
    device: str


class Facts(NamedTuple):
    """What a worker has to compute with, and which software."""

    machine: str
    cores: int
    memory: int
    gpus: tuple[str, ...]
    versions: dict[str, str]


class Reply(NamedTuple):
    """What became of a call.

    seconds  that it took
    choices  what executors have decided in it
    warned   the texts of warnings that were given
    error    what was raised, with its traceback in words; None if nothing was
    """

    place: Place
    seconds: float
    choices: Choices
    warned: tuple[str, ...] = ()
    error: tuple[bytes, str] | None = None


class Job(NamedTuple):
    """A call for each share of a cohort: `common` is what all have received, `own` makes what one has alone.

    clients  the names of the clients of each share, for messages
    samples  what they are computed on, and `stage` by what; None where functions are called
    """

    samples: Samples | None
    stage: StageBlob | None
    call: Call
    common: Packed
    own: Sequence[Callable[[], Packed]]
    clients: Sequence[str]


def function_call(call: Callable[[], Any]) -> Packed:
    """Return a function as it is sent to be called."""
    return pack(np.frombuffer(pickled(call, {}), dtype=np.uint8))


def called(packed: Packed) -> Any:
    """Call a function that was sent; return its result as it is sent back."""
    result = unpickled(unpack(packed).tobytes(), _nothing_outside)()
    return np.frombuffer(pickled(result, {}), dtype=np.uint8)


def result_of(content: np.ndarray) -> Any:
    """Return the result of a function as it was sent back."""
    return unpickled(content.tobytes(), _nothing_outside)


def sent(assignment: Assignment, key: Tensor | None) -> tuple[Any, Any]:
    """Return what all shares of an assignment have in common, and the rest, to be sent apart."""
    group = assignment.group
    if group.stacked:
        return (), (assignment, key)
    bare = group._replace(download=group.download._replace(shared={}, extra={}))
    return group.download[:2], (assignment._replace(group=bare), key)


def received(common: Packed, own: Packed, device: str) -> tuple[Assignment, Any]:
    """Return an assignment as it was `sent`, on this device."""
    (clients, group, states, context), key = unpack(own)
    if both := unpack(common):
        group = group._replace(download=group.download._replace(shared=both[0], extra=both[1]))
    group, states, key = tree.to((group, states, key), device)
    return Assignment(np.array(clients), group, states, context), key


def sendable(error: Exception) -> tuple[bytes, str]:
    """Return an error as bytes, with its traceback in words; of one that cannot be sent, its text."""
    words = traceback.format_exc()
    try:
        content = pickled(error, {})
        unpickled(content, _nothing_outside)
    except Exception:
        content = pickled(RuntimeError(check.named_reason(error)), {})
    return content, words


def raised(error: tuple[bytes, str], worker: str) -> Exception:
    """Return the error of a worker, with a note on where it was raised."""
    content, words = error
    found: Exception = unpickled(content, _nothing_outside)
    found.add_note(f"raised in {worker}:\n{words}")
    if isinstance(found, ModuleNotFoundError):
        found.add_note(
            "workers import modules afresh: put this one where Python finds it (sys.path), or send it with "
            "cloudpickle.register_pickle_by_value(module)"
        )
    return found


def _nothing_outside(name: str) -> Any:
    raise ValueError(f"{name} is not there")
