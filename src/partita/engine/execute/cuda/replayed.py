"""Functions of tensors that a GPU replays: how clients begin and end, and what a server does with uploads.

They are called alike round after round, and are many small operations, which the host takes longer to ask
for than a GPU to carry out. So, once the calls have taken about as long as a recording does, the operations
are recorded as one CUDA graph. A call then copies its tensors to where the recording reads them, replays it,
and copies what it leaves: the same operations in the same order.

A recording repeats what it was given by the host, whatever that is later. So it is made only where nothing of
that changes: no tensor on the host is read, no value of a tensor is looked at, and whole numbers, such as the
number of the server's version, are passed on unread. All else that is no tensor is part of what is recorded.
The first replays are compared with the function itself.
"""

from __future__ import annotations

import functools
import logging
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from partita.core import check, tree
from partita.engine.execute.cuda.recording import copy, own, record
from partita.engine.execute.stack import Spec, Stack, lift, tensors, unflatten

LOG = logging.getLogger("partita")

DEVICES = ("cuda",)
RECORDING_SECONDS = 0.01  # about what a recording takes, and the calls that it is compared with
REPLAY_SECONDS = 2e-4  # about what a replay takes of the host: calls that take less stay as they are
MOST_BYTES = 1 << 26  # of what is given: to copy more takes longer than to ask for operations
MOST_RECORDINGS = 32
CHECKED_REPLAYS = 2
REFUSED = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
TOLERANCE = 1e-3  # of the largest entry: products of matrices may have 10 bits


class Unread:
    """A whole number of an argument that a function passes on, or adds to, without looking at it."""

    def __init__(self, place: int, more: int = 0) -> None:
        self.place, self.more = place, more

    def __add__(self, more: object) -> Unread:
        if not isinstance(more, int):
            self._refuse()
        return Unread(self.place, self.more + more)

    __radd__ = __add__

    def _refuse(self, *_: object) -> NoReturn:
        raise LookupError("it reads a number that is another one in each call")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __bool__ = __hash__ = __int__ = __float__ = __index__ = _refuse
    __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __truediv__ = __rtruediv__ = _refuse
    __neg__ = __abs__ = __pow__ = __lshift__ = __rshift__ = __and__ = __or__ = __xor__ = _refuse


class _Repeatable(TorchDispatchMode):
    """Refuses what a recording would not repeat: reading the host's tensors, drawing, waiting for a value.

    A number on the host that the function has made itself is one of its constants.
    """

    def __init__(self, device: torch.device, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._given = {x.untyped_storage().data_ptr() for x in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not REFUSED.isdisjoint(func.tags) and not _by_places(func, args):
            raise LookupError(f"{func} depends on values, or draws")
        for x in tree.leaves((args, kwargs or {})):
            if isinstance(x, Tensor) and x.device != self._device and (x.dim() or self._is_given(x)):
                raise LookupError("it reads tensors on the host")
        return func(*args, **(kwargs or {}))

    def _is_given(self, x: Tensor) -> bool:
        return x.untyped_storage().data_ptr() in self._given


def _by_places(func: Any, args: Sequence[Any]) -> bool:
    """Return whether an operation takes entries by their places, and not those that a mask has chosen."""
    masks = torch.bool, torch.uint8
    return func is torch.ops.aten.index.Tensor and all(x is None or x.dtype not in masks for x in args[1])


@contextmanager
def _refusing_to_wait(device: torch.device) -> Iterator[None]:
    """Let whatever the host would wait for be an error: in a recording it would spoil more than that."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it may not notice all of it
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class _Leaf(NamedTuple):
    """Where a leaf of a result comes from: what is recorded, an argument, or neither."""

    kind: str  # "recorded", "given", "number", "constant"
    place: int = 0
    value: Any = None


class _Recording:
    """The operations of a function for arguments of certain shapes, and the memory that they read."""

    def __init__(self, fn: Callable[..., Any], args: Sequence[Stack], device: torch.device) -> None:
        given = tensors(*args)
        self._device = device
        self._rooms = [x.clone() if x.device == device else None for x in given]
        room = iter(self._rooms)
        filled = [_with_rooms(arg, room, first) for arg, first in zip(args, _firsts(args))]
        found: list[Stack] = []

        def work() -> list[Tensor]:
            with torch.no_grad():
                found[:] = [lift(fn, *filled)]
            return [found[0].leaves[i] for i in self._places(found[0], given)]

        with _refusing_to_wait(device), _Repeatable(device, [x for x in given if x.device != device]):
            work()
        self._replay = record(work, device)
        self._like = found[0]
        self._leaves = self._sources(self._like, given)
        self.checks = CHECKED_REPLAYS

    def _sources(self, result: Stack, given: Sequence[Tensor]) -> list[_Leaf]:
        """Return where each leaf of a result comes from."""
        sources, recorded = [], 0
        inputs = {id(x if room is None else room): i for i, (x, room) in enumerate(zip(given, self._rooms))}
        for leaf in result.leaves:
            if isinstance(leaf, Unread):
                sources.append(_Leaf("number", leaf.place, leaf.more))
            elif id(leaf) in inputs:
                sources.append(_Leaf("given", inputs[id(leaf)]))
            elif not isinstance(leaf, Tensor) or leaf.device != self._device:
                sources.append(_Leaf("constant", 0, leaf))
            else:
                sources.append(_Leaf("recorded", recorded))
                recorded += 1
        return sources

    def _places(self, result: Stack, given: Sequence[Tensor]) -> list[int]:
        """Return the places of the leaves that are recorded."""
        return [i for i, source in enumerate(self._sources(result, given)) if source.kind == "recorded"]

    def __call__(self, args: Sequence[Stack]) -> Stack:
        """Return the result for these arguments."""
        given = tensors(*args)
        copy([(room, x) for room, x in zip(self._rooms, given) if room is not None])
        recorded = own(self._replay())
        numbers = [x for arg in args for x in arg.leaves if _is_number(x)]
        leaves: list[Any] = []
        for kind, place, value in self._leaves:
            if kind == "recorded":
                leaves.append(recorded[place])
            elif kind == "given":
                leaves.append(given[place])
            else:
                leaves.append(numbers[place] + value if kind == "number" else value)
        return Stack(leaves, self._like.has_rows, self._like.spec, self._like.n)


@dataclass
class _Known:
    """What is known of calls of one kind: the seconds that they took, and the recording, if there is one."""

    seconds: float = 0.0
    recording: _Recording | None = None
    refused: bool = False


@dataclass(frozen=True, eq=False)
class Replayed:
    """Lifted functions, which a GPU replays once they have been called alike a few times."""

    name: str
    known: dict[Any, _Known] = field(default_factory=dict)

    def function(self, fn: Callable[..., Any], *given: Any) -> Any:
        """Compute `fn(*given)`."""
        device = _device(tree.leaves(given))
        if device is None:
            return fn(*given)
        result = self(fn, fn, *[Stack.of(x, 1, rows=False) for x in given])
        return unflatten(result.spec, iter(result.leaves))

    def __call__(self, of: Hashable, fn: Callable[..., Any], *args: Stack) -> Stack:
        """Compute `lift(fn, *args)`; `of` is what tells this function from others."""
        given = tensors(*args)
        device = _device(given)
        if device is None or sum([x.nbytes for x in given]) > MOST_BYTES:
            return lift(fn, *args)
        key = of, *[_kind(arg) for arg in args]
        try:
            known = self.known.setdefault(key, _Known())
        except TypeError:  # something that has no hash: nobody can tell whether it is the same again
            return lift(fn, *args)
        if known.recording is not None:
            return self._replayed(known, known.recording, fn, args)
        begin = time.perf_counter()
        result = lift(fn, *args)
        took = time.perf_counter() - begin
        known.seconds += took
        if known.seconds > RECORDING_SECONDS and took > REPLAY_SECONDS and not known.refused:
            self._record(known, fn, args, device)
        return result

    def _record(
        self, known: _Known, fn: Callable[..., Any], args: Sequence[Stack], device: torch.device
    ) -> None:
        others = [other for other in self.known.values() if other.recording is not None]
        if len(others) >= MOST_RECORDINGS:
            others[0].recording, others[0].seconds = None, 0.0
        try:
            known.recording = _Recording(fn, args, device)
        except Exception as error:  # it looks at values, or reads what the host has
            self._refuse(known, check.named_reason(error))

    def _replayed(
        self, known: _Known, recording: _Recording, fn: Callable[..., Any], args: Sequence[Stack]
    ) -> Stack:
        result = recording(args)
        if recording.checks:
            recording.checks -= 1
            expected = lift(fn, *args)
            if not _alike(result, expected):
                self._refuse(known, "results differ")
                return expected
        return result

    def _refuse(self, known: _Known, reason: str) -> None:
        known.recording, known.refused = None, True
        LOG.info("%s is not recorded: %s", self.name, reason)


def replaying(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes the same, and is replayed where that can be."""
    return functools.partial(Replayed(name).function, fn)


def _device(leaves: Sequence[Any]) -> torch.device | None:
    """Return the device that replays, if some of these are on it."""
    return next((x.device for x in leaves if isinstance(x, Tensor) and x.device.type in DEVICES), None)


def _is_number(leaf: Any) -> bool:
    return type(leaf) is int


def _kind(stack: Stack) -> tuple[Spec, int, tuple[Any, ...]]:
    """Return what a recording depends on: structure, shapes, and all that is neither a tensor nor unread."""
    leaves = [
        (x.shape, x.dtype, x.device, r) if isinstance(x, Tensor) else int if _is_number(x) else x
        for x, r in zip(stack.leaves, stack.has_rows)
    ]
    return stack.spec, stack.n, tuple(leaves)


def _firsts(args: Sequence[Stack]) -> list[int]:
    """Return for each argument how many whole numbers those before it have."""
    counts = [sum(map(_is_number, arg.leaves)) for arg in args]
    return [sum(counts[:i]) for i in range(len(counts))]


def _with_rooms(stack: Stack, rooms: Any, first: int) -> Stack:
    """Return the stack whose tensors on the device lie where a recording reads them; numbers are unread."""
    leaves: list[Any] = []
    for leaf in stack.leaves:
        if isinstance(leaf, Tensor):
            room = next(rooms)
            leaves.append(leaf if room is None else room)
        elif _is_number(leaf):
            leaves.append(Unread(first))
            first += 1
        else:
            leaves.append(leaf)
    return Stack(leaves, stack.has_rows, stack.spec, stack.n)


def _alike(a: Stack, b: Stack) -> bool:
    if (a.spec, a.has_rows, len(a.leaves)) != (b.spec, b.has_rows, len(b.leaves)):
        return False
    return tree.close(tuple(a.leaves), tuple(b.leaves), TOLERANCE) and all(
        isinstance(x, Tensor) or x is y or x == y for x, y in zip(a.leaves, b.leaves)
    )
