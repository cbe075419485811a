"""Arithmetic on named tensors, and stacks of them.

A stack is the same structure with one more axis in front: a row per client. Structures are nested tuples,
NamedTuples and dictionaries of tensors; `None` leaves are allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from partita.core.device import beside
from partita.core.types import Tensors


def pick(x: Tensors, names: Iterable[str]) -> Tensors:
    """Return the entries of x with these names."""
    return {k: x[k] for k in names}


def sub(a: Tensors, b: Tensors) -> Tensors:
    """Return a − b."""
    return {k: a[k] - b[k] for k in a}


def axpy(a: float | Tensor, x: Tensors, y: Tensors) -> Tensors:
    """Return y + a·x, for the names of y."""
    return {k: y[k] + a * x[k] for k in y}


def zeros_like(x: Tensors) -> Tensors:
    """Return zeros in the shapes of x."""
    return {k: torch.zeros_like(v) for k, v in x.items()}


def norm(x: Tensors) -> Tensor:
    """Return ‖x‖₂ over all entries."""
    if not x:
        return torch.zeros(())
    return torch.stack([(v * v).sum() for v in x.values()]).sum().sqrt()


def leaves(tree: Any) -> list[Any]:
    """Return the tensors of a structure, in a fixed order; other leaves too."""
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if not isinstance(tree, tuple | list):
        return [tree]
    return [leaf for part in tree for leaf in ([part] if isinstance(part, Tensor) else leaves(part))]


def map_tensors(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply fn to each tensor of a structure; other leaves (None, numbers) pass through."""
    return pytree.tree_map(lambda x, *r: fn(x, *r) if isinstance(x, Tensor) else x, tree, *rest)


def row(stack: Any, i: int) -> Any:
    """Return row i of a stack."""
    return map_tensors(lambda x: x[i], stack)


def rows(stack: Any, index: Tensor | slice | list[int]) -> Any:
    """Return some rows of a stack."""
    if not isinstance(index, list):
        return map_tensors(lambda x: x[index], stack)
    places = beside([x for x in leaves(stack) if isinstance(x, Tensor)], np.array(index, dtype=np.int64))
    return map_tensors(lambda x: x[places[x.device]], stack)


def stack(trees: Sequence[Any]) -> Any:
    """Stack structures of the same shape, one row each."""
    return map_tensors(lambda *xs: torch.stack(xs), *trees)


def cat(stacks: Sequence[Any]) -> Any:
    """Join stacks along the rows."""
    return stacks[0] if len(stacks) == 1 else map_tensors(lambda *xs: torch.cat(xs), *stacks)


def expand(tree: Any, n: int) -> Any:
    """Return the structure as n rows, without a copy."""
    return map_tensors(lambda x: x.expand(n, *x.shape), tree)


def to(tree: Any, device: torch.device | str) -> Any:
    """Return the structure on another device."""
    return map_tensors(lambda x: x.to(device), tree)


def nbytes(tree: Any) -> int:
    """Return the bytes that the tensors of a structure occupy when sent."""
    return sum(x.numel() * x.element_size() for x in leaves(tree) if isinstance(x, Tensor))
