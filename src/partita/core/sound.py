"""Is what clients computed usable: finite, and small enough to be squared?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from partita.core import tree
from partita.core.types import Upload

NOT_FINITE, TOO_LARGE = "not finite", "too large"


def faults(uploads: Upload, kept: Any, clients: int) -> list[str]:
    """For each client, why what it computed is unusable ('': it is usable).

    What it sends must be finite and small enough to be squared, for aggregators take lengths and distances;
    what it `kept` must be finite.
    """
    return [""] * clients if sound(lengths(uploads, kept)) else examined(uploads, kept, clients)


def examined(uploads: Upload, kept: Any, clients: int) -> list[str]:
    """What `faults` says, by a look at each client."""
    sent, rest = _rows(uploads.payload, clients), _rows(kept, clients)
    numbers = _all_finite([*sent, *rest], clients)
    small = _all_finite([_length(x).square()[:, None] for x in sent], clients)
    return [NOT_FINITE if not n else "" if s else TOO_LARGE for n, s in zip(numbers, small)]


def lengths(uploads: Upload, kept: Any) -> list[Tensor]:
    """Of every tensor, all clients together: a cheap first look, see `sound`."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for x in _numbers((*uploads.payload, kept)):
        kinds.setdefault(x.dtype, []).append(x)
    return [torch.stack(torch._foreach_norm(some, dtype=_wide(kind))) for kind, some in kinds.items()]


def sound(found: Sequence[Tensor]) -> bool:
    """Whether nobody's upload has a fault. If not, somebody's may have: see `examined`."""
    return all(bool(torch.isfinite(x.square()).all()) for x in found)


def _rows(stacks: Any, clients: int) -> list[Tensor]:
    """Each stack of numbers as a matrix, a row for each client."""
    return [x.reshape(clients, -1) for x in _numbers(stacks)]


def _numbers(stacks: Any) -> list[Tensor]:
    return [x for x in tree.leaves(stacks) if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]


def _length(x: Tensor) -> Tensor:
    """Of each row, in single precision at least: its square is infinite if it is too long for its type."""
    length: Tensor = torch.linalg.vector_norm(x, dim=1, dtype=_wide(x.dtype))
    return length


def _wide(kind: torch.dtype) -> torch.dtype:
    return torch.float32 if torch.finfo(kind).bits < 32 else kind


def _all_finite(rows: list[Tensor], clients: int) -> list[bool]:
    """For each client, whether every entry of its rows is finite."""
    good = [torch.isfinite(x).all(1) for x in rows]
    return [True] * clients if not good else torch.stack(good).all(0).tolist()
