"""Functions of tensors that a GPU replays: how clients begin and end, and what a server does with uploads.

They are called alike round after round, and are many small operations, which the host takes longer to ask
for than a GPU to carry out. So, once the calls have taken about as long as a recording does, the operations
are recorded as one CUDA graph. A call then copies its tensors to where the recording reads them, replays it,
and copies what it leaves: the same operations in the same order.

A recording repeats what it was given by the host, whatever that is later. So only functions of this package
are recorded, which depend on their arguments alone; and a trial refuses what reads tensors on the host or the
values of others, draws, writes to memory that it has not made, or looks at a whole number, such as the
server's version: those are passed on unread. All else that is no tensor is part of what is recorded. Replays
are compared with the function itself, less and less often.
"""

from __future__ import annotations

import functools
import logging
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from partita.core import check, tree
from partita.engine.execute.cuda.recording import copy, own, record, room_for, unexpanded
from partita.engine.execute.stack import Spec, Stack, lift, tensors, unflatten

LOG = logging.getLogger("partita")

DEVICES = ("cuda",)
RECORDING_SECONDS = 0.01  # about what a recording takes, and the calls that it is compared with
REPLAY_SECONDS = 2e-4  # about what a replay takes of the host: calls that take less stay as they are
MOST_BYTES = 1 << 25  # of what is given: to copy more takes longer than to ask for operations
ROOM = 1 << 28  # bytes that the arguments of all recordings of a function may take
MOST_KINDS = 1024  # of calls that are remembered
CHECKED_REPLAYS = frozenset([1, 2, *(10**i for i in range(1, 10))])
OURS = ("partita.",)
"""What the names of modules begin with whose functions are recorded."""
OPAQUE = ("partita.engine.model.", "partita.data.")
"""Modules of objects that functions ask, and that are not looked into: the user's model and data."""
REFUSED = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
TOLERANCE = 1e-3  # of the largest entry: products of matrices may have 10 bits
CONSTANTS = (str, bytes, bool, int, float, torch.dtype, torch.device, np.ndarray, np.generic, Tensor)


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
    """Refuses what a recording would not repeat: reading the host's tensors, drawing, waiting for a value,
    and writing to memory that was there before.

    A number on the host that the function has made itself is one of its constants.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._made: set[int] = set()  # addresses of memory that the function has taken

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree.leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        if func is torch.ops.aten.lift_fresh.default and not given[0].dim() and not given[0].is_cuda:
            self._made.update(map(_address, given))  # torch.tensor(1.0)
        if not REFUSED.isdisjoint(func.tags) and not _by_places(func, args):
            raise LookupError(f"{func} depends on values, or draws")
        if any(x.device != self._device and (x.dim() or _address(x) not in self._made) for x in given):
            raise LookupError("it reads tensors on the host")
        if func is torch.ops.aten.lift_fresh.default and _address(given[0]) not in self._made:
            raise LookupError("it sends numbers to the device")
        if func._schema.is_mutable and not all(
            _address(x) in self._made for x in _written(func, args, kwargs)
        ):
            raise LookupError(f"{func} changes what was there before")
        result = func(*args, **(kwargs or {}))
        before = set(map(_address, given))
        after = (_address(x) for x in tree.leaves((result,)) if isinstance(x, Tensor))
        self._made.update(place for place in after if place not in before)
        return result


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    values = [
        (x, args[i] if i < len(args) else (kwargs or {}).get(x.name))
        for i, x in enumerate(func._schema.arguments)
    ]
    changed = [value for x, value in values if x.alias_info is not None and x.alias_info.is_write]
    return [x for x in tree.leaves(tuple(changed)) if isinstance(x, Tensor)]


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
        hosts = [id(x) for x in given if x.device != device]
        if len(set(hosts)) < len(hosts):
            raise LookupError("a tensor on the host is given twice")
        self._device = device
        self._rooms = [room_for(x) if x.device == device else None for x in given]
        self._fill(given)
        room = iter(self._rooms)
        filled = [_with_rooms(arg, room, first) for arg, first in zip(args, _firsts(args))]
        found: list[Stack] = []

        def work() -> list[Tensor]:
            with torch.no_grad():
                found[:] = [lift(fn, *filled)]
            return [found[0].leaves[i] for i in self._places(found[0], given)]

        with _refusing_to_wait(device), _Repeatable(device):
            work()
        self._replay = record(work, device)
        self._like = found[0]
        self._leaves = self._sources(self._like, given)
        self.replays = 0

    def _fill(self, given: Sequence[Tensor]) -> None:
        """Copy arguments to where the recording reads them."""
        copy([(unexpanded(room), unexpanded(x)) for room, x in zip(self._rooms, given) if room is not None])

    @property
    def nbytes(self) -> int:
        """The bytes of the memory that it reads."""
        return sum([x.nbytes for x in self._rooms if x is not None])

    def _sources(self, result: Stack, given: Sequence[Tensor]) -> list[_Leaf]:
        """Return where each leaf of a result comes from."""
        sources, recorded = [], 0
        inputs = {id(x if room is None else room): i for i, (x, room) in enumerate(zip(given, self._rooms))}
        for leaf in result.leaves:
            if isinstance(leaf, Unread):
                sources.append(_Leaf("number", leaf.place, leaf.more))
            elif id(leaf) in inputs:
                sources.append(_Leaf("given", inputs[id(leaf)]))
            elif isinstance(leaf, Tensor) and leaf.device == self._device:
                sources.append(_Leaf("recorded", recorded))
                recorded += 1
            elif leaf is None or isinstance(leaf, str | bool | int | float | Tensor):
                sources.append(_Leaf("constant", 0, leaf))
            else:
                raise LookupError(f"it returns {type(leaf).__name__}")
        return sources

    def _places(self, result: Stack, given: Sequence[Tensor]) -> list[int]:
        """Return the places of the leaves that are recorded."""
        return [i for i, source in enumerate(self._sources(result, given)) if source.kind == "recorded"]

    def __call__(self, args: Sequence[Stack]) -> Stack:
        """Return the result for these arguments."""
        given = tensors(*args)
        self._fill(given)
        recorded = own(self._replay())
        numbers = [x for arg in args for x in arg.leaves if _is_number(x)]
        leaves: list[Any] = []
        for kind, place, value in self._leaves:
            if kind == "recorded":
                leaves.append(recorded[place])
            elif kind == "given":
                leaves.append(given[place])
            elif kind == "number":
                leaves.append(numbers[place] + value)
            else:
                leaves.append(value.clone() if isinstance(value, Tensor) else value)
        self.replays += 1
        return Stack(leaves, self._like.has_rows, self._like.spec, self._like.n)


@dataclass
class _Known:
    """What is known of calls of one kind: the seconds that they took, and the recording, if there is one."""

    seconds: float = 0.0
    recording: _Recording | None = None
    refused: bool = False


@dataclass(frozen=True, eq=False)
class Replayed:
    """Lifted functions, which a GPU replays once they have been called alike a few times.

    `otherwise` lifts them where there is no GPU.
    """

    name: str
    otherwise: Callable[..., Stack] = lift
    known: OrderedDict[Any, _Known] = field(default_factory=OrderedDict)

    def function(self, fn: Callable[..., Any], *given: Any) -> Any:
        """Compute `fn(*given)`."""
        device = _device(tree.leaves(given))
        if device is None:
            return fn(*given)
        result = self(fn, fn, *[Stack.of(x, 1, rows=False) for x in given])
        return unflatten(result.spec, iter(result.leaves))

    def __call__(self, of: Callable[..., Any], fn: Callable[..., Any], *args: Stack) -> Stack:
        """Compute `lift(fn, *args)`, where `fn` is the same as long as it is made `of` the same."""
        given = tensors(*args)
        device = _device(given)
        if device is None:
            return self.otherwise(fn, *args)
        # when replays begin is a matter of time, and so nothing for a run that repeats its bits
        if sum([x.nbytes for x in given]) > MOST_BYTES or torch.are_deterministic_algorithms_enabled():
            return lift(fn, *args)
        try:
            known = self._of_kind((of, *[_kind(arg) for arg in args]))
        except TypeError:  # something that has no hash: nobody can tell whether it is the same again
            return lift(fn, *args)
        if known.recording is not None:
            return self._replayed(known, known.recording, fn, args)
        begin = time.perf_counter()
        result = lift(fn, *args)
        took = time.perf_counter() - begin
        known.seconds += took
        if known.seconds > RECORDING_SECONDS and took > REPLAY_SECONDS and not known.refused:
            self._record(known, of, fn, args, device)
        return result

    def _of_kind(self, kind: Any) -> _Known:
        """Return what is known of calls of a kind; the last one that was called comes last."""
        known = self.known.setdefault(kind, _Known())
        self.known.move_to_end(kind)
        if len(self.known) > MOST_KINDS:
            self.known.popitem(last=False)
        return known

    def _record(
        self,
        known: _Known,
        of: Callable[..., Any],
        fn: Callable[..., Any],
        args: Sequence[Stack],
        device: torch.device,
    ) -> None:
        if not is_ours(of, set()):
            self._refuse(known, "it is none of this package's, and may depend on more than its arguments")
            return
        try:
            known.recording = _Recording(fn, args, device)
        except Exception as error:  # it looks at values, or reads what the host has
            self._refuse(known, check.named_reason(error))
            return
        recorded = [each for each in self.known.values() if each.recording is not None]
        room = sum([each.recording.nbytes for each in recorded if each.recording is not None])
        for each in recorded[:-1]:  # those that were not called for longest
            if room > ROOM and each.recording is not None:
                room -= each.recording.nbytes
                each.recording, each.refused = None, True  # for good: else they would take turns

    def _replayed(
        self, known: _Known, recording: _Recording, fn: Callable[..., Any], args: Sequence[Stack]
    ) -> Stack:
        result = recording(args)
        if recording.replays in CHECKED_REPLAYS:
            expected = lift(fn, *args)
            if not _alike(result, expected):
                self._refuse(known, "results differ")
                return expected
            if not _finite(expected):  # that tells nothing
                recording.replays -= 1
        return result

    def _refuse(self, known: _Known, reason: str) -> None:
        known.recording, known.refused = None, True
        LOG.info("%s is not recorded: %s", self.name, reason)


def is_ours(value: Any, seen: set[int]) -> bool:
    """Return whether a function is of this package, with all that it was made from."""
    if value is None or isinstance(value, CONSTANTS) or id(value) in seen:
        return True
    seen.add(id(value))
    if isinstance(value, tuple | list | set | frozenset):
        return all(is_ours(x, seen) for x in value)
    if isinstance(value, Mapping):
        return all(is_ours(x, seen) for x in value.values())
    if isinstance(value, functools.partial):
        return is_ours((value.func, value.args, value.keywords), seen)
    if isinstance(value, MethodType):
        return is_ours((value.__func__, value.__self__), seen)
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        made_from = cells, value.__defaults__, value.__kwdefaults__
        return f"{value.__module__}.".startswith(OURS) and is_ours(made_from, seen)
    if isinstance(value, type):
        return f"{value.__module__}.".startswith(OURS)
    module = f"{type(value).__module__}."
    if module.startswith(OPAQUE) or isinstance(value, Replayed):
        return True
    return module.startswith(OURS) and is_ours(list(vars(value).values()), seen)


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
        (x.shape, x.stride(), x.dtype, x.device, r)
        if isinstance(x, Tensor)
        else (int if _is_number(x) else (type(x), x))
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
    """Return whether results are the same but for roundings."""
    if (a.spec, a.has_rows, len(a.leaves)) != (b.spec, b.has_rows, len(b.leaves)):
        return False
    return all(map(_same_leaf, a.leaves, b.leaves)) and tree.close(a.leaves, b.leaves, TOLERANCE)


def _same_leaf(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)
    return type(x) is type(y) and x == y


def _finite(stack: Stack) -> bool:
    """Return whether all numbers of a result are finite."""
    numbers = [x for x in stack.leaves if isinstance(x, Tensor) and x.is_floating_point()]
    return all(bool(x.isfinite().all()) for x in numbers)
