"""Activation checkpointing (torch.utils.checkpoint) for one client or many: blocks are computed twice.

A checkpointed block keeps its inputs alone, and is computed again when its gradient is taken. torch's own
form knows nothing of stacked clients and of draws by key; so while a `Pass` is in force, its two entries lead
here. A block that is computed again draws what it drew before, and for several clients it runs for all of
them: so the gradient must be taken where `vmap` is still in force (see `partita.engine.model.problem`).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from partita.engine.model.functions import Functions
from partita.engine.model.seeding import kept, put_back, state
from partita.engine.model.stackable import KeyedDropout

CHANGED = (
    "what a checkpointed block was called with has been written into since, so that it cannot be computed "
    "again: write h = h + y instead of h += y"
)
ANOTHER = "a checkpointed block computes something else the second time: it depends on more than its inputs"
Form = tuple[torch.Size, torch.dtype]
_GENERATOR, _REENTRANT = "_checkpoint_without_reentrant_generator", "CheckpointFunction"
_LOCK = threading.Lock()


class _Here(threading.local):
    """What goes on in a thread: the pass in force, and whether a block is being computed again."""

    current: Pass | None = None
    again: bool = False


_here = _Here()


def computes_again() -> bool:
    """Return whether this thread is computing a block for the second time."""
    return _here.again


@dataclass(eq=False)
class Pass:
    """A forward pass whose checkpointed blocks come here.

    keeps     nothing is computed again: second derivatives are taken
    draws     the model draws from the generators of the process
    counts    the bytes that blocks take are counted: those of all inputs, and of all that one block saves
    used      whether there was such a block
    """

    module: nn.Module
    key: Tensor
    functions: Functions | None = None
    keeps: bool = False
    draws: bool = False
    counts: bool = False
    used: bool = False
    inputs_bytes: int = 0
    block_bytes: int = 0

    def __enter__(self) -> Pass:
        _install()
        self._outer, _here.current = _here.current, self
        return self

    def __exit__(self, *error: object) -> None:
        _here.current = self._outer
        _uninstall()

    @contextmanager
    def block(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[None]:
        """Keep of what is computed inside nothing but how to compute it again."""
        self.used = True
        if self.keeps or not torch.is_grad_enabled():
            yield
            return
        prepare, forms, saved, own_bytes = self._replay(), list[Form](), dict[int, Tensor](), 0
        parameters = {p.data_ptr() for p in self.module.parameters()} if self.counts else set[int]()
        tensors = [_plain(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        inputs = [(x, x._version) for x in tensors]

        def pack(x: Tensor) -> int:
            nonlocal own_bytes
            if self.counts and x.data_ptr() not in parameters:
                own_bytes += x.nbytes
            forms.append((x.shape, x.dtype))
            return len(forms) - 1

        def unpack(place: int) -> Tensor:
            if place not in saved:
                if any(x._version != version for x, version in inputs):
                    raise RuntimeError(CHANGED)
                again = _computed_again(prepare, function, args, kwargs)
                if [(x.shape, x.dtype) for x in again] != forms:
                    raise RuntimeError(ANOTHER)
                saved.update(enumerate(again))
            return saved.pop(place)

        with saved_tensors_hooks(pack, unpack):
            yield
        if self.counts:
            self.inputs_bytes += sum(x.nbytes for x, _ in inputs)
            self.block_bytes = max(self.block_bytes, own_bytes)

    def _replay(self) -> Callable[[], AbstractContextManager[Any]]:
        """Return the context in which a block that begins now can be computed again, with the same draws."""
        dropouts = [m for m in self.module.modules() if isinstance(m, KeyedDropout)]
        counts = [(m._last_key, m._calls) for m in dropouts]
        calls = self.functions.calls if self.functions is not None else 0
        device = self.key.device
        before = state(device) if self.draws else None
        dtype, cached = torch.get_autocast_dtype(device.type), torch.is_autocast_cache_enabled()
        enabled = torch.is_autocast_enabled(device.type)

        @contextmanager
        def replay() -> Iterator[None]:
            with ExitStack() as stack:
                if before is not None:
                    stack.enter_context(kept(device))
                    put_back(before, device)
                stack.enter_context(torch.autocast(device.type, dtype, enabled, cached))
                functions = None
                if self.functions is not None:
                    functions = stack.enter_context(Functions(self.key))
                    functions.calls = calls
                for dropout, (key, count) in zip(dropouts, counts):
                    dropout._last_key, dropout._calls = key, count
                stack.enter_context(Pass(self.module, self.key, functions, draws=self.draws))
                yield

        return replay


def _plain(x: Tensor) -> Tensor:
    """Return the tensor below `vmap`, which counts the writes into it."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def _computed_again(
    prepare: Callable[[], AbstractContextManager[Any]], function: Callable[..., Any], args: Any, kwargs: Any
) -> list[Tensor]:
    """Return what autograd saves of a block."""
    saved: list[Tensor] = []

    def pack(x: Tensor) -> None:
        saved.append(x.detach())

    def unpack(_: None) -> Tensor:
        raise AssertionError("nobody asks for the gradient of a block that was computed again")

    outer, _here.again = _here.again, True
    try:
        with saved_tensors_hooks(pack, unpack), torch.enable_grad(), prepare():
            function(*args, **kwargs)
    finally:
        _here.again = outer
    return saved


# ---- torch's two entries, which lead here while somebody asks for it

_torchs: dict[str, Any] = {}
_users = 0


def _install() -> None:
    global _users
    with _LOCK:
        _users += 1
        if _users == 1:
            _torchs.update({name: getattr(checkpoint, name) for name in (_GENERATOR, _REENTRANT)})
            setattr(checkpoint, _GENERATOR, _generator)
            setattr(checkpoint, _REENTRANT, _Reentrant)


def _uninstall() -> None:
    global _users
    with _LOCK:
        _users -= 1
        if _users == 0:
            for name, function in _torchs.items():
                setattr(checkpoint, name, function)


def _generator(function: Any, *given: Any, **kwargs: Any) -> Iterator[None]:
    """Surround a block, which `torch.utils.checkpoint.checkpoint` calls itself."""
    original = _torchs[_GENERATOR]
    if _here.current is None:
        yield from original(function, *given, **kwargs)
        return
    # how many options come before the block's arguments depends on the version of torch
    kinds = [p.kind for p in inspect.signature(original).parameters.values()]
    options = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) - 1
    with _here.current.block(function, given[options:], kwargs):
        yield


class _Reentrant:
    """The older form, which is called with the block."""

    @staticmethod
    def apply(function: Any, preserve: Any, *args: Any) -> Any:
        if _here.current is None:
            return _torchs[_REENTRANT].apply(function, preserve, *args)
        with _here.current.block(function, args, {}):
            return function(*args)
