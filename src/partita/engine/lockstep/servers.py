"""What the servers of several runs do at the same time, as one operation on a stack of runs.

Aggregation and the server's step are small: a run alone spends more on asking for them than on computing
them. Where all runs have the same functions, one `vmap` over runs computes all; the first time, each run's
own result is compared with its row. All rounds have the roundings of the stack, also of a run that goes on.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from partita.core import check, tree
from partita.core.parts import Algorithm
from partita.engine.execute.cuda.replayed import Replayed
from partita.engine.execute.stack import Stack, Steps, flatten, unflatten
from partita.engine.lockstep.meeting import Failure
from partita.engine.model.problem import ModelProblem

LOG = logging.getLogger("partita")

AGGREGATION, SERVER = "aggregation", "the server's step"
TOLERANCE = 1e-3  # of the largest entry, the first time: products of matrices may have 10 bits


class Act:
    """What a server asks for: aggregation, or its step.

    alone   the run's own function, which is to be applied to what is `given`
    kind    what acts have in common that can be one: `what`, and structures, shapes and all that is no tensor
    """

    def __init__(self, what: str, alone: Callable[..., Any], *given: Any) -> None:
        self.what, self.alone, self.given = what, alone, given
        self.leaves: list[Any] = []
        self.spec = flatten(given, self.leaves)
        leaves = [(x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x for x in self.leaves]
        self.kind = what, self.spec, tuple(leaves)


class Servers:
    """The functions that the servers of several runs share; made from the first, where all are the same."""

    def __init__(self, algorithms: Sequence[Algorithm], problem: ModelProblem) -> None:
        first = algorithms[0]
        self._functions: dict[str, Callable[..., Any]] = {}
        self._tried: set[str] = set()
        self._replayed = Replayed("what the servers of several runs do", Steps())
        if all_same([algorithm.aggregate for algorithm in algorithms]):
            self._functions[AGGREGATION] = _of_all(first.aggregate(problem))
        if all_same([algorithm.server for algorithm in algorithms]):
            self._functions[SERVER] = _of_all(first.server(problem).step)

    def __call__(self, acts: Sequence[Act]) -> Sequence[Any]:
        """Return what each of the runs gets."""
        what = acts[0].what
        if len(acts) == 1 or what not in self._functions:
            return each_alone(acts)
        try:
            found = parted(
                self._replayed(self._functions[what], self._functions[what], stacked(acts)), len(acts)
            )
            tried = what in self._tried
            if not tried and not all(tree.close(a, b, TOLERANCE) for a, b in zip(found, each_alone(acts))):
                raise ValueError("results of several runs differ from those of each alone")
        except Exception as error:  # it looks at numbers, for example
            del self._functions[what]
            LOG.info("%s of %d runs apart: %s", what, len(acts), check.named_reason(error))
            return each_alone(acts)
        self._tried.add(what)
        return found


def _of_all(function: Callable[..., Any]) -> Callable[[tuple[Any, ...]], Any]:
    return lambda given: function(*given)


def each_alone(acts: Sequence[Act]) -> Sequence[Any]:
    """Return what each run computes for itself."""
    return [_alone(act) for act in acts]


def _alone(act: Act) -> Any:
    try:
        return act.alone(*act.given)
    except Exception as error:
        return Failure(error)


def stacked(acts: Sequence[Act]) -> Stack:
    """Return what several runs give as a stack, a row for each run; what is no tensor is common to all."""
    columns = zip(*[act.leaves for act in acts])
    leaves = [rows(xs) if isinstance(xs[0], Tensor) else xs[0] for xs in columns]
    return Stack(leaves, [isinstance(x, Tensor) for x in leaves], acts[0].spec, len(acts))


def rows(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors; where they lie one after another in memory, they are a stack already."""
    first = tensors[0]
    if first.is_contiguous():
        step, memory = first.numel(), first.untyped_storage().data_ptr()
        begin = first.storage_offset()
        if all(
            x.is_contiguous()
            and x.untyped_storage().data_ptr() == memory
            and x.storage_offset() == begin + i * step
            for i, x in enumerate(tensors)
        ):
            return first.as_strided((len(tensors), *first.shape), (step, *first.stride()))
    return torch.stack(list(tensors))


def parted(stack: Stack, runs: int) -> list[Any]:
    """Return the structure of each run."""
    columns = [x.unbind() if has_rows else [x] * runs for x, has_rows in zip(stack.leaves, stack.has_rows)]
    return [unflatten(stack.spec, iter([column[run] for column in columns])) for run in range(runs)]


# ---- functions that do the same


def all_same(functions: Sequence[Any]) -> bool:
    """Return whether functions do the same, as far as anyone can see."""
    try:
        return all(same(functions[0], other) for other in functions[1:])
    except (RecursionError, ValueError):  # one that knows itself, or that is not made yet
        return False


def same(a: Any, b: Any) -> bool:
    """Return whether two functions, made by the same code, have been made from equal values."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, FunctionType):
        return a.__code__ is b.__code__ and same(_made_from(a), _made_from(b))
    if isinstance(a, functools.partial):
        return same((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if isinstance(a, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return isinstance(a, str | int | float | bool | bytes) and a == b


def _made_from(function: FunctionType) -> tuple[Any, ...]:
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return cells, function.__defaults__, function.__kwdefaults__, getattr(function, "__wrapped__", None)
