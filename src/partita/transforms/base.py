"""What transforms have in common: names for what they add, tensors end to end."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from partita.core.options import checked
from partita.core.types import Message, Tensors

transform = checked("transform ")


def unused(message: Message, name: str) -> str:
    """Return the name of something that is sent beside what a message has: this one, or a longer one."""
    while name in message.numbers or name in message.rest:
        name += "+"
    return name


def parts_of(numbers: Tensors) -> dict[str, Tensors]:
    """Return numbers by what they are a part of: 'delta', 'sums'."""
    parts: dict[str, Tensors] = {}
    for path, value in numbers.items():
        parts.setdefault(path.partition(".")[0], {})[path] = value
    return parts


def joined(tensors: Tensors) -> Tensor:
    """Return all entries as one vector, in the widest of the types."""
    return torch.cat([x.reshape(-1) for x in tensors.values()])


def parted(vector: Tensor, like: Tensors) -> Tensors:
    """Return a vector as the tensors that it was joined from."""
    pieces = torch.split(vector, [x.numel() for x in like.values()])
    return {k: piece.to(x.dtype).reshape(x.shape) for piece, (k, x) in zip(pieces, like.items())}


def in_order_of(like: Tensors, found: Mapping[str, Tensor]) -> Tensors:
    """Return tensors in the order that they had before they were encoded."""
    return {path: found[path] for path in like}


def working(dtype: torch.dtype) -> torch.dtype:
    """Return the type to compute in: float32 for whatever is shorter."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def count(share: float, entries: int) -> int:
    """Return how many entries a share is: at least one of them, where there are any."""
    return min(entries, max(1, math.floor(share * entries + 0.5)))
