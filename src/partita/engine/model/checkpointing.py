"""Activation checkpointing (torch.utils.checkpoint) for one client or many: blocks are computed twice.

A checkpointed block keeps its inputs alone, and is computed again when its gradient is taken. torch's own
form knows nothing of stacked clients and of draws by key; so while a `Pass` is in force, its two entries lead
here. A block that is computed again draws what it drew before, and for several clients it runs for all of
them: so the gradient must be taken where `vmap` is still in force (see `partita.engine.model.problem`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from partita.engine.model.functions import Functions
from partita.engine.model.seeding import kept, put_back, state
from partita.engine.model.stackable import KeyedDropout

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

    context   what must be in force when a block is computed again, beside the functions of the pass
    keeps     nothing is computed again: second derivatives are taken
    draws     the model draws from the generators of the process
    used      whether there was such a block
    """

    module: nn.Module
    key: Tensor
    functions: Functions | None = None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    keeps: bool = False
    draws: bool = False
    used: bool = False

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
        prepare, count, saved = self._replay(), 0, dict[int, Tensor]()

        def pack(x: Tensor) -> int:  # noqa: ARG001
            nonlocal count
            count += 1
            return count - 1

        def unpack(place: int) -> Tensor:
            if place not in saved:
                saved.update(enumerate(_computed_again(prepare, function, args, kwargs)))
            return saved.pop(place)

        with saved_tensors_hooks(pack, unpack):
            yield

    def _replay(self) -> Callable[[], AbstractContextManager[Any]]:
        """Return the context in which a block that begins now can be computed again, with the same draws."""
        dropouts = [m for m in self.module.modules() if isinstance(m, KeyedDropout)]
        counts = [(m._last_key, m._calls) for m in dropouts]
        calls = self.functions.calls if self.functions is not None else 0
        before = state(self.key.device) if self.draws else None

        @contextmanager
        def replay() -> Iterator[None]:
            with ExitStack() as stack:
                if before is not None:
                    stack.enter_context(kept(self.key.device))
                    put_back(before, self.key.device)
                stack.enter_context(self.context())
                functions = None
                if self.functions is not None:
                    functions = stack.enter_context(Functions(self.key))
                    functions.calls = calls
                for dropout, (key, count) in zip(dropouts, counts):
                    dropout._last_key, dropout._calls = key, count
                stack.enter_context(Pass(self.module, self.key, functions, self.context, draws=self.draws))
                yield

        return replay


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


def _generator(
    function: Any,
    preserve: Any = True,
    context_fn: Any = None,
    determinism_check: Any = None,
    debug: Any = None,
    early_stop: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Iterator[None]:
    """Surround a block, which `torch.utils.checkpoint.checkpoint` calls itself."""
    if _here.current is None:
        options = (preserve, context_fn, determinism_check, debug, early_stop)
        yield from _torchs[_GENERATOR](function, *options, *args, **kwargs)
        return
    with _here.current.block(function, args, kwargs):
        yield


class _Reentrant:
    """The older form, which is called with the block."""

    @staticmethod
    def apply(function: Any, preserve: Any, *args: Any) -> Any:
        if _here.current is None:
            return _torchs[_REENTRANT].apply(function, preserve, *args)
        with _here.current.block(function, args, {}):
            return function(*args)
