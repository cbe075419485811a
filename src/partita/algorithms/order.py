"""In which order a model uses its parameters while a sample passes through it.

The order in which layers are defined says nothing about it: a head may be registered first, and a parameter
of the whole model (a class token, a table of user vectors) belongs to no layer at all. So a few samples pass
through a copy of the model, and every operation is looked at as it happens. A tensor comes from the sample or
from parameters alone, whatever was made of them on the way (a transposed, normalized or summed weight). Where
one of each kind meet in an operation, parameters act on the sample: that is a `Use`.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partita.core.inputs import call, tensors
from partita.core.types import Inputs

TRIES = 4  # of a model that skips layers at random
# what has the shape of a sample knows nothing else of it
_SHAPE_ONLY = {f"{kind}_like" for kind in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")} | {
    f"new_{kind}" for kind in ("empty", "zeros", "ones", "full", "empty_strided")
}
_PUTS = {"cat", "stack", "where", "copy_", "index_put", "index_put_", "masked_fill", "masked_fill_", "lerp"}


class Use(NamedTuple):
    """Parameters that act on the sample, in one operation.

    names  the parameters; one that belongs to several modules by the name of the module at work
    mixes  whether it is a product, a convolution or a lookup, as of a layer; not so where a parameter is only
           added, multiplied element by element, put beside, or normalizes
    biases vectors that are added to what came out
    """

    names: tuple[str, ...]
    mixes: bool
    biases: tuple[str, ...]


def uses(model: nn.Module, x: Inputs) -> list[Use]:
    """What the model's parameters do to `x` on its way to the output, one after another.

    The same in every process: draws of the model itself are seeded. A model that skips layers at random has
    several tries, of which the one that used most counts.
    """
    model = copy.deepcopy(model).train()  # as in training; statistics of the copy change
    device = tensors(x)[0].device
    devices = [device] if device.type == "cuda" else []
    before, found = (random.getstate(), np.random.get_state()), list[list[Use]]()
    try:
        with torch.random.fork_rng(devices=devices):
            for seed in range(TRIES):
                torch.manual_seed(seed)
                random.seed(seed)
                np.random.seed(seed)
                start = _drawn(device)
                watch = _Watch(model, x)
                with watch:
                    output = call(model, x)
                found.append(watch.until(output))
                if _drawn(device) == start:  # nothing is random
                    break
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
    return max(found, key=len)


def _drawn(device: torch.device) -> tuple[Any, ...]:
    """Where the generators of the process are."""
    there = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return there.numpy().tobytes(), random.getstate(), str(np.random.get_state())


class _Operation(NamedTuple):
    read: set[int]
    written: set[int]
    names: list[str]  # parameters that meet the sample here
    mixes: bool
    biases: list[str]


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows what comes from the sample and what from parameters alone, by the memory in which it lies."""

    def __init__(self, model: nn.Module, x: Inputs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sample = set(map(_place, tensors(x)))
        self.carried: dict[int, tuple[str, ...]] = {}  # parameters, and what was made of them alone
        self.vectors: set[str] = set()
        self.aliases: dict[str, list[str]] = {}
        self.operations: list[_Operation] = []
        self.made: dict[int, _Operation] = {}  # by the place of what a product has put out
        self.working: list[str] = []  # modules in whose calls we are
        self.alive: list[Tensor] = tensors(x)  # so that no place is given out twice
        for name, p in model.named_parameters(remove_duplicate=False):
            first = self.carried.setdefault(_place(p), (name,))[0]
            self.aliases.setdefault(first, []).append(name)
            self.vectors |= {name} if p.dim() <= 1 else set()
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                continue
            module.register_forward_pre_hook(functools.partial(self._entered, name))
            module.register_forward_hook(self._left, always_call=True)

    def _entered(self, name: str, *call: Any) -> None:  # noqa: ARG002
        self.working.append(name)

    def _left(self, *call: Any) -> None:  # noqa: ARG002
        self.working.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = _tensors((args, kwargs))
        written = [*_tensors(result), *_written(func, args)]
        self.alive += written
        read, places = dict.fromkeys(map(_place, given)), set(map(_place, written))
        names = list(dict.fromkeys(n for p in read if p not in self.sample for n in self.carried.get(p, ())))
        name = func._schema.name.partition("::")[2]
        if self.sample.isdisjoint(read):
            self.carried |= {
                p: tuple(dict.fromkeys((*self.carried.get(p, ()), *names))) for p in places if names
            }
        elif name not in _SHAPE_ONLY:
            self.sample |= places
            mixes = not (
                torch.Tag.pointwise in func.tags or name in _PUTS or "norm" in name or "prelu" in name
            )
            operation = _Operation(set(read), places, [self._called(n) for n in names], mixes, [])
            self.operations.append(operation)
            if names and mixes:
                self.made |= dict.fromkeys(places, operation)
            elif name in ("add", "add_"):
                self._bias(read, operation.names)
        return result

    def _bias(self, read: Iterable[int], names: list[str]) -> None:
        for operation in (self.made[p] for p in read if p in self.made):
            operation.biases.extend(n for n in names if n in self.vectors)

    def _called(self, name: str) -> str:
        """A tied tensor by the name that it has in the module at work, the innermost first."""
        known = self.aliases.get(name, [name])
        for module in reversed(self.working):
            for alias in known:
                if alias.rpartition(".")[0] == module:
                    return alias
        return name

    def until(self, output: Any) -> list[Use]:
        """The uses that lead to the output; all of them where it cannot be followed to the sample."""
        wanted = {_place(t) for t in _tensors(output)}
        found: list[Use] = []
        for o in reversed(self.operations):
            if o.written & wanted:
                wanted |= o.read
                found += [Use(tuple(o.names), o.mixes, tuple(o.biases))] if o.names else []
        every = [Use(tuple(o.names), o.mixes, tuple(o.biases)) for o in self.operations if o.names]
        return found[::-1] or every


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


def _written(func: Any, args: Any) -> list[Tensor]:
    """Arguments that an operation changes in place."""
    changed = [
        a
        for a, known in zip(args, func._schema.arguments)
        if known.alias_info is not None and known.alias_info.is_write
    ]
    return _tensors(changed)


def _place(t: Tensor) -> int:
    """Views lie in the memory of what they are views of."""
    try:
        return int(t.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse
        return id(t)
