"""What a model takes: one tensor, or several with a row of each sample, in order or by argument names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from partita.core import check
from partita.core.types import Inputs, Tensors


def each(fn: Callable[[Tensor], Tensor], x: Inputs) -> Inputs:
    """Return the inputs with each tensor changed."""
    if isinstance(x, Tensor):
        return fn(x)
    if isinstance(x, dict):
        return {name: fn(values) for name, values in x.items()}
    return tuple([fn(values) for values in x])


def tensors(x: Inputs) -> list[Tensor]:
    """Return the tensors of the inputs, in order."""
    return [x] if isinstance(x, Tensor) else list(x.values() if isinstance(x, dict) else x)


def samples(x: Inputs) -> int:
    """Return how many samples there are."""
    return len(tensors(x)[0])


def single(x: Inputs, who: str) -> Tensor:
    """Return the one tensor that there is; refuse several for what takes only one."""
    if isinstance(x, Tensor):
        return x
    raise check.fail("x", described(x), f"one tensor, for {who}")


def described(x: Inputs) -> str:
    """Return shapes and types in words, such as 'input_ids [4, 16] int64, attention_mask [4, 16] int64'."""
    names = x if isinstance(x, dict) else [""] * len(tensors(x))
    kinds = [f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors(x)]
    return ", ".join(f"{name} {kind}".lstrip() for name, kind in zip(names, kinds))


def sample_form(x: Inputs) -> str:
    """Return the form of one sample in words, such as '[3, 32, 32] of float32'."""
    names = x if isinstance(x, dict) else [""] * len(tensors(x))
    kinds = [f"{list(t.shape[1:])} of {str(t.dtype).removeprefix('torch.')}" for t in tensors(x)]
    return ", ".join(f"{name} {kind}".lstrip() for name, kind in zip(names, kinds))


def alike(x: Inputs, like: Inputs) -> Inputs:
    """Return the inputs with numbers of the precision that others of the same structure have."""
    if isinstance(x, dict) and isinstance(like, dict) and x.keys() == like.keys():
        return {name: _alike(x[name], like[name]) for name in like}
    if isinstance(x, tuple) and isinstance(like, tuple) and len(x) == len(like):
        return tuple(map(_alike, x, like))
    return _alike(x, like) if isinstance(x, Tensor) and isinstance(like, Tensor) else x


def _alike(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.dtype) if values.is_floating_point() and like.is_floating_point() else values


def call(module: nn.Module, x: Inputs, **more: Any) -> Any:
    """Return what a module makes of the inputs, which become its arguments."""
    if isinstance(x, dict):
        return module(**x, **more)
    return module(x, **more) if isinstance(x, Tensor) else module(*x, **more)


def functional(module: nn.Module, values: Tensors | tuple[Tensors, ...], x: Inputs, **more: Any) -> Any:
    """Return what a module makes of the inputs with some of its tensors exchanged."""
    args = () if isinstance(x, dict) else (x,) if isinstance(x, Tensor) else x
    named = {**x, **more} if isinstance(x, dict) else more
    return torch.func.functional_call(module, values, args, named)
