"""A step for many clients, written down as a list of tensor operations.

`vmap` and `grad` work out again in every call which operations a step comes down to, which takes longer than
the operations where models are small. They are the same as long as the shapes are: so they are taken down
once (`torch.fx`) and then only carried out, the same operations in the same order with the same bits.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from partita.engine.execute.stack import Spec, Stack, lift

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
