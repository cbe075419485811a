"""Arithmetic on named tensors, stacks of them, and whether the rows of a stack are usable numbers.

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

from partita.core.device import beside, put
from partita.core.types import Tensors, Upload


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


def with_sender(
    uploads: Upload, clients: Sequence[int] | np.ndarray, samples: np.ndarray, device: torch.device | str
) -> Upload:
    """Add the clients' numbers to what they send, and as weights how many of these samples each has."""
    numbers = np.asarray(clients)
    weight = put(samples[numbers].astype(np.float64), device)
    return uploads._replace(weight=weight, client=torch.from_numpy(numbers))


def close(a: Any, b: Any, tolerance: float) -> bool:
    """Return whether two results differ by no more than this share of their largest entries."""
    pairs = zip(leaves(a), leaves(b))
    return all(_near(x, y, tolerance) for x, y in pairs if isinstance(x, Tensor) and isinstance(y, Tensor))


def _near(x: Tensor, y: Tensor, tolerance: float) -> bool:
    if not x.is_floating_point():
        return bool(torch.equal(x, y))
    scale = y.abs().max() if y.numel() else y.new_zeros(())
    return bool(((x - y).abs() <= tolerance * scale + 1e-6).all() | ~torch.isfinite(y).all())


# ---- usable numbers: finite, and small enough to be squared

NOT_FINITE, TOO_LARGE = "not finite", "too large"


def faults(uploads: Upload, kept: Any, clients: int) -> list[str]:
    """Return for each client why what it computed is unusable ('': it is usable).

    What it sends must be finite and small enough to be squared, for aggregators take lengths and distances;
    what it `kept` must be finite.
    """
    return [""] * clients if sound(lengths(uploads, kept)) else examined(uploads, kept, clients)


def examined(uploads: Upload, kept: Any, clients: int) -> list[str]:
    """Return what `faults` does, by a look at each client."""
    sent, rest = _matrices((uploads.delta, uploads.extra, uploads.sums), clients), _matrices(kept, clients)
    numbers = _all_finite([*sent, *rest], clients)
    small = _all_finite([_length(x).square()[:, None] for x in sent], clients)
    return [NOT_FINITE if not n else "" if s else TOO_LARGE for n, s in zip(numbers, small)]


def lengths(uploads: Upload, kept: Any) -> list[Tensor]:
    """Return the length of every tensor, all clients together: a cheap first look, see `sound`."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for x in _numbers((uploads.delta, uploads.extra, uploads.sums, kept)):
        kinds.setdefault(x.dtype, []).append(x)
    return [torch.stack(torch._foreach_norm(xs, dtype=_wide(kind))) for kind, xs in kinds.items()]


def sound(lengths: Sequence[Tensor]) -> bool:
    """Return whether nobody's upload has a fault. If not, somebody's may have: see `examined`."""
    return all(bool(torch.isfinite(x.square()).all()) for x in lengths)


def _matrices(stacks: Any, clients: int) -> list[Tensor]:
    """Return each stack of numbers as a matrix, a row for each client."""
    return [x.reshape(clients, -1) for x in _numbers(stacks)]


def _numbers(stacks: Any) -> list[Tensor]:
    return [x for x in leaves(stacks) if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]


def _length(x: Tensor) -> Tensor:
    """Return the length of each row, whose square is infinite if it is too long for its type."""
    length: Tensor = torch.linalg.vector_norm(x, dim=1, dtype=_wide(x.dtype))
    return length


def _wide(kind: torch.dtype) -> torch.dtype:
    return torch.float32 if torch.finfo(kind).bits < 32 else kind


def _all_finite(rows: list[Tensor], clients: int) -> list[bool]:
    """Return for each client whether every entry of its rows is finite."""
    good = [torch.isfinite(x).all(1) for x in rows]
    return [True] * clients if not good else torch.stack(good).all(0).tolist()
