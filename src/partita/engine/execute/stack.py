"""A stack of clients: their values side by side, and what is the same for all of them only once.

What a group of clients received is one set of tensors. Keeping it unstacked until a client changes it is
what makes stacked evaluation, and steps on a small personal part, as cheap as one model on a large batch.

`vmap` and `grad` work out again in every call which operations a step comes down to, which takes longer than
the operations where models are small. They are the same as long as the shapes are: so they are traced once
(`torch.fx`) and then only carried out, the same operations in the same order with the same bits.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import (
    _add_batch_dim,
    _remove_batch_dim,
    get_unwrapped,
    is_functorch_wrapped_tensor,
)
from torch._functorch import vmap as parts_of_vmap
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

Spec = tuple[type, tuple[str, ...], tuple[Any, ...]] | None
"""The shape of a structure: its type, its keys if it is a dictionary, its parts; None is a leaf."""


def flatten(tree: Any, leaves: list[Any]) -> Spec:
    """Appends the leaves of nested dictionaries and (named) tuples; returns their structure.

    The same as torch's pytree for what local rules use, and several times faster: it runs in every step.
    """
    if isinstance(tree, dict):
        return dict, tuple(tree), tuple([flatten(x, leaves) for x in tree.values()])
    if isinstance(tree, tuple):
        return type(tree), (), tuple([flatten(x, leaves) for x in tree])
    leaves.append(tree)
    return None


def unflatten(spec: Spec, leaves: Iterator[Any]) -> Any:
    """The structure again, with these leaves."""
    if spec is None:
        return next(leaves)
    kind, keys, parts = spec
    if kind is dict:
        return {k: unflatten(part, leaves) for k, part in zip(keys, parts)}
    values = [unflatten(part, leaves) for part in parts]
    return tuple(values) if kind is tuple else kind(*values)


@dataclass(frozen=True)
class Stack:
    """A structure for `n` clients; each leaf has a row per client, or is common to all."""

    leaves: list[Any]
    has_rows: list[bool]
    spec: Spec
    n: int

    @staticmethod
    def of(tree: Any, n: int, rows: bool) -> Stack:
        """A structure whose tensors all have rows, or are all common."""
        leaves: list[Any] = []
        spec = flatten(tree, leaves)
        return Stack(leaves, [rows and isinstance(x, Tensor) for x in leaves], spec, n)

    def _map(self, fn: Callable[[Tensor], Tensor], n: int) -> Stack:
        leaves = [fn(x) if r else x for x, r in zip(self.leaves, self.has_rows)]
        return Stack(leaves, self.has_rows, self.spec, n)

    def between(self, a: int, b: int) -> Stack:
        """Clients a to b, as views."""
        return self._map(lambda x: x[a:b], b - a)

    def take(self, order: Tensor) -> Stack:
        """Clients in another order."""
        return self._map(lambda x: x[order], len(order))

    def full(self) -> Any:
        """The structure with a row for every client."""
        leaves = [
            x if r or not isinstance(x, Tensor) else x.expand(self.n, *x.shape)
            for x, r in zip(self.leaves, self.has_rows)
        ]
        return unflatten(self.spec, iter(leaves))


def join(parts: Sequence[Stack]) -> Stack:
    """Stacks of the same structure, one after another; what is still common to all stays common."""
    if len(parts) == 1:
        return parts[0]
    leaves, has_rows = [], []
    for column in zip(*([(x, r, p.n) for x, r in zip(p.leaves, p.has_rows)] for p in parts)):
        rows = any(r for _, r, _ in column)
        pieces = [x if r or not rows else x.expand(n, *x.shape) for x, r, n in column]
        leaves.append(torch.cat(pieces) if rows else pieces[0])
        has_rows.append(rows)
    return Stack(leaves, has_rows, parts[0].spec, sum(p.n for p in parts))


def lift(fn: Callable[..., Any], *args: Stack) -> Stack:
    """fn, written for one client, on stacks: `vmap` over the leaves with rows.

    A leaf of the result that fn passed through from a common leaf is common again.
    """
    n = args[0].n
    leaves = [x for a in args for x in a.leaves]
    flags = [r for a in args for r in a.has_rows]
    moving = [i for i, r in enumerate(flags) if r]
    common = {id(x) for x, r in zip(leaves, flags) if not r and isinstance(x, Tensor)}
    out: list[Any] = []
    spec: Spec = None
    rows: list[bool] = []

    def call(*given: Tensor) -> tuple[Tensor, ...]:
        nonlocal spec, rows
        filled = list(leaves)
        for i, x in zip(moving, given):
            filled[i] = x
        at = iter(filled)
        spec = flatten(fn(*[unflatten(a.spec, at) for a in args]), out)
        rows = [isinstance(x, Tensor) and id(x) not in common for x in out]
        return tuple([x for x, r in zip(out, rows) if r])

    if not moving:  # nothing differs between the clients yet
        call()
        return Stack(out, [False] * len(out), spec, n)
    result = iter(_vmap(call, [leaves[i] for i in moving], n))
    return Stack([next(result) if r else x for x, r in zip(out, rows)], rows, spec, n)


def _vmap(fn: Callable[..., Sequence[Tensor]], given: list[Tensor], n: int) -> list[Tensor]:
    """`torch.func.vmap(fn, randomness="different")` of tensors alone.

    What it is made of, without its search through structures, which takes longer than small operations.
    """
    parts_of_vmap.lazy_load_decompositions()  # type: ignore[attr-defined]
    with parts_of_vmap.vmap_increment_nesting(n, "different") as level:
        found = fn(*[_add_batch_dim(x, 0, level) for x in given])
        return [_remove_batch_dim(x, level, n, 0) for x in found]


# ---- steps that are traced once

OFTEN = 40  # steps of the same shapes, before one is written down: that takes as long as some dozen steps
KEPT, SEEN = 64, 4096  # lists of operations at a time, and shapes that are counted


class Traced(NamedTuple):
    """What a step comes down to for stacks of certain shapes."""

    graph: GraphModule
    rows: list[bool]
    spec: Spec
    n: int
    kinds: tuple[Any, ...]  # shapes and types of what comes out, and all that is no tensor

    def __call__(self, *args: Stack) -> Stack:
        """The step on other values of the same shapes."""
        return Stack(self.graph(*tensors(*args)), self.rows, self.spec, self.n)


def tensors(*args: Stack) -> list[Tensor]:
    """The tensors of stacks in their order."""
    return [x for a in args for x in a.leaves if isinstance(x, Tensor)]


def kinds(stack: Stack) -> tuple[Any, ...]:
    """Shapes and types of its tensors, and all that is no tensor."""
    return tuple([(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in stack.leaves])


def signature(*args: Stack) -> tuple[Any, ...]:
    """What must be the same for the same operations: structures, shapes, and all that is no tensor."""
    leaves = [
        (x.shape, x.dtype, r) if isinstance(x, Tensor) else x
        for a in args
        for x, r in zip(a.leaves, a.has_rows)
    ]
    return (*[(a.spec, a.n) for a in args], *leaves)


def trace(fn: Callable[..., Any], *args: Stack) -> Traced:
    """The operations of `lift(fn, *args)`; an error where they depend on the values of tensors."""
    result: Stack | None = None

    def call(*given: Tensor) -> list[Any]:
        nonlocal result
        values = iter(given)
        filled = [
            Stack([next(values) if isinstance(x, Tensor) else x for x in a.leaves], a.has_rows, a.spec, a.n)
            for a in args
        ]
        result = lift(fn, *filled)
        return result.leaves

    graph = make_fx(call)(*tensors(*args))
    assert result is not None
    return Traced(graph, result.has_rows, result.spec, result.n, kinds(result))


class Steps:
    """Steps by their shapes: one that comes often is written down."""

    def __init__(self) -> None:
        self._seen: dict[Any, int] = {}
        self._traced: OrderedDict[Any, Traced | None] = OrderedDict()

    def __call__(self, fn: Callable[..., Any], *args: Stack) -> Stack:
        """`lift(fn, *args)`."""
        key = (fn, signature(*args))
        if key not in self._traced:
            if len(self._seen) > SEEN:
                self._seen.clear()
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] < OFTEN:
                return lift(fn, *args)
            del self._seen[key]
            self._traced[key] = _or_none(fn, *args)
            if len(self._traced) > KEPT:
                self._traced.popitem(last=False)
        traced = self._traced[key]
        self._traced.move_to_end(key)
        return lift(fn, *args) if traced is None else traced(*args)


def _or_none(fn: Callable[..., Any], *args: Stack) -> Traced | None:
    """None where a step cannot be written down: `vmap` works all the same."""
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return trace(fn, *args)
    except Exception:  # a rule may look at the values of its tensors, in any way
        return None


# ---- clients that are done before others

_ALL_STEPS = ContextVar("all_steps", default=False)


@contextmanager
def all_steps() -> Iterator[None]:
    """Let nothing end early: what is recorded does the same however far clients are."""
    token = _ALL_STEPS.set(True)
    try:
        yield
    finally:
        _ALL_STEPS.reset(token)


def everyone(done: Tensor) -> bool:
    """Whether it is true for all clients that are stacked behind it, so that nothing would change."""
    if _ALL_STEPS.get():
        return False
    while is_functorch_wrapped_tensor(done):
        done = get_unwrapped(done)
    return bool(done.all())


def unless(done: Tensor, old: Any, new: Any) -> Any:
    """Return the new structure of a client, or the old one if it was done."""
    before: list[Any] = []
    after: list[Any] = []
    flatten(old, before)
    spec = flatten(new, after)
    kept = [
        b if b is a or not isinstance(b, Tensor) else torch.where(done, a, b) for a, b in zip(before, after)
    ]
    return unflatten(spec, iter(kept))


def unless_rows(done: Tensor, old: Stack, new: Stack) -> Stack:
    """Return the new stack, with the old rows of clients that were done; what is common to all is new."""
    leaves = [
        torch.where(done.reshape(-1, *[1] * (b.dim() - 1)), a, b) if rows and b is not a else b
        for a, b, rows in zip(old.leaves, new.leaves, new.has_rows)
    ]
    return Stack(leaves, new.has_rows, new.spec, new.n)
