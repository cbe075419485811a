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
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import _add_batch_dim, _remove_batch_dim
from torch._functorch import vmap as parts_of_vmap
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

Spec = tuple[type, tuple[str, ...], tuple[Any, ...]] | None
"""The shape of a structure: its type, its keys if it is a dictionary, its parts; None is a leaf."""


def flatten(tree: Any, leaves: list[Any]) -> Spec:
    """Append the leaves of nested dictionaries and (named) tuples, and return their structure.

    This does what torch's pytree does for what local rules use, several times faster: it runs in every step.
    """
    if isinstance(tree, dict):
        return dict, tuple(tree), tuple([flatten(x, leaves) for x in tree.values()])
    if isinstance(tree, tuple):
        return type(tree), (), tuple([flatten(x, leaves) for x in tree])
    leaves.append(tree)
    return None


def unflatten(spec: Spec, leaves: Iterator[Any]) -> Any:
    """Return the structure with these leaves."""
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
        """Return the stack of a structure whose tensors all have rows, or are all common."""
        leaves: list[Any] = []
        spec = flatten(tree, leaves)
        return Stack(leaves, [rows and isinstance(x, Tensor) for x in leaves], spec, n)

    def _map(self, fn: Callable[[Tensor], Tensor], n: int) -> Stack:
        leaves = [fn(x) if r else x for x, r in zip(self.leaves, self.has_rows)]
        return Stack(leaves, self.has_rows, self.spec, n)

    def between(self, a: int, b: int) -> Stack:
        """Return clients a to b, as views."""
        return self._map(lambda x: x[a:b], b - a)

    def take(self, order: Tensor) -> Stack:
        """Return the clients at these places, in this order."""
        return self._map(lambda x: x[order], len(order))

    def at(self, step: int | Tensor) -> Stack:
        """Return the values of one step, where tensors of numbers have an axis of steps at the end.

        The step may be a counter on the device.
        """

        def now(x: Tensor, rows: bool) -> Tensor:
            if x.dim() == int(rows):  # the same in every step
                return x
            if isinstance(step, Tensor):
                return x.index_select(-1, step).squeeze(-1)
            return x[..., step].contiguous()

        leaves = [now(x, r) for x, r in zip(self.leaves, self.has_rows)]
        return Stack(leaves, self.has_rows, self.spec, self.n)

    def full(self) -> Any:
        """Return the structure with a row for every client."""
        leaves = [
            x if r or not isinstance(x, Tensor) else x.expand(self.n, *x.shape)
            for x, r in zip(self.leaves, self.has_rows)
        ]
        return unflatten(self.spec, iter(leaves))


def join(parts: Sequence[Stack]) -> Stack:
    """Join stacks of the same structure; what is still common to all stays common."""
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
    """Apply fn, written for one client, to stacks: `vmap` over the leaves with rows.

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

    def call(*columns: Tensor) -> tuple[Tensor, ...]:
        nonlocal spec, rows
        filled = list(leaves)
        for i, x in zip(moving, columns):
            filled[i] = x
        values = iter(filled)
        spec = flatten(fn(*[unflatten(a.spec, values) for a in args]), out)
        rows = [isinstance(x, Tensor) and id(x) not in common for x in out]
        return tuple([x for x, r in zip(out, rows) if r])

    if not moving:  # nothing differs between the clients yet
        call()
        return Stack(out, [False] * len(out), spec, n)
    result = iter(_vmap(call, [leaves[i] for i in moving], n))
    return Stack([next(result) if r else x for x, r in zip(out, rows)], rows, spec, n)


def lifted(of: Hashable, fn: Callable[..., Any], *args: Stack) -> Stack:  # noqa: ARG001
    """Compute `lift(fn, *args)`, where others tell by `of` whether a function is the same again."""
    return lift(fn, *args)


def _vmap(fn: Callable[..., Sequence[Tensor]], columns: list[Tensor], n: int) -> list[Tensor]:
    """Compute `torch.func.vmap(fn, randomness="different")(*columns)`.

    These are the parts of `vmap` without its search through structures, which takes longer than small
    operations.
    """
    parts_of_vmap.lazy_load_decompositions()  # type: ignore[attr-defined]
    with parts_of_vmap.vmap_increment_nesting(n, "different") as level:
        results = fn(*[_add_batch_dim(x, 0, level) for x in columns])
        return [_remove_batch_dim(x, level, n, 0) for x in results]


# ---- steps that are traced once

STEPS_BEFORE_TRACE = 40  # of the same shapes: a trace takes as long as some dozen steps
MAX_TRACES = 64
MAX_COUNTED_SHAPES = 4096


class Traced(NamedTuple):
    """The operations of a step for stacks of certain shapes."""

    graph: GraphModule
    rows: list[bool]
    spec: Spec
    n: int
    kinds: tuple[Any, ...]  # shapes and types of what comes out, and all that is no tensor

    def __call__(self, *args: Stack) -> Stack:
        """Take the step on other values of the same shapes."""
        return Stack(self.graph(*tensors(*args)), self.rows, self.spec, self.n)


def tensors(*args: Stack) -> list[Tensor]:
    """Return the tensors of stacks in their order."""
    return [x for a in args for x in a.leaves if isinstance(x, Tensor)]


def kinds(stack: Stack) -> tuple[Any, ...]:
    """Return shapes and types of a stack's tensors, and all that is no tensor."""
    return tuple([(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in stack.leaves])


def signature(*args: Stack) -> tuple[Any, ...]:
    """Return what the operations depend on: structures, shapes, and all that is no tensor."""
    leaves = [
        (x.shape, x.dtype, r) if isinstance(x, Tensor) else x
        for a in args
        for x, r in zip(a.leaves, a.has_rows)
    ]
    return (*[(a.spec, a.n) for a in args], *leaves)


def trace(fn: Callable[..., Any], *args: Stack) -> Traced:
    """Trace the operations of `lift(fn, *args)`; fail where they depend on the values of tensors."""
    result: Stack | None = None

    def call(*inputs: Tensor) -> list[Any]:
        nonlocal result
        values = iter(inputs)
        filled = [
            Stack([next(values) if isinstance(x, Tensor) else x for x in a.leaves], a.has_rows, a.spec, a.n)
            for a in args
        ]
        result = lift(fn, *filled)
        return result.leaves

    graph = make_fx(call)(*_distinct(tensors(*args)))
    assert result is not None
    return Traced(graph, result.has_rows, result.spec, result.n, kinds(result))


def _distinct(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the inputs, each as an object of its own.

    What a client received is its model, too, before its first step: the same tensor twice. A tracer takes it
    for one input, and the operations would be wrong where the two differ.
    """
    distinct: list[Tensor] = []
    for x in inputs:
        twice = any(x is other for other in distinct)
        distinct.append(x.detach() if twice else x)
    return distinct


class Steps:
    """Lifted steps; those whose shapes come often are traced once and then only carried out."""

    def __init__(self) -> None:
        self._counts: dict[Any, int] = {}
        self._traced: OrderedDict[Any, Traced | None] = OrderedDict()

    def __call__(self, fn: Callable[..., Any], *args: Stack) -> Stack:
        """Compute `lift(fn, *args)`."""
        layout = tuple([x.stride() for x in tensors(*args)])  # a traced view fits the layout that it has seen
        key = (fn, signature(*args), layout)
        if key not in self._traced:
            if len(self._counts) > MAX_COUNTED_SHAPES:
                self._counts.clear()
            self._counts[key] = self._counts.get(key, 0) + 1
            if self._counts[key] < STEPS_BEFORE_TRACE:
                return lift(fn, *args)
            del self._counts[key]
            self._traced[key] = _trace_or_none(fn, *args)
            if len(self._traced) > MAX_TRACES:
                self._traced.popitem(last=False)
        traced = self._traced[key]
        self._traced.move_to_end(key)
        return lift(fn, *args) if traced is None else traced(*args)


def _trace_or_none(fn: Callable[..., Any], *args: Stack) -> Traced | None:
    """Return None where a step cannot be traced: `vmap` works all the same."""
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return trace(fn, *args)
    except Exception:  # a rule may look at the values of its tensors, in any way
        return None


def unless_rows(done: Tensor, old: Stack, new: Stack) -> Stack:
    """Return the new stack, with the old rows of clients that were done; what is common to all is new."""
    leaves = [
        torch.where(done.reshape(-1, *[1] * (b.dim() - 1)), a, b) if rows and b is not a else b
        for a, b, rows in zip(old.leaves, new.leaves, new.has_rows)
    ]
    return Stack(leaves, new.has_rows, new.spec, new.n)
