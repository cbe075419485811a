"""The deltas of those who have weight, as the aggregators read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from partita.aggregate.blocks import Place, each, places
from partita.core.options import checked
from partita.core.parts import Aggregator, Combined
from partita.core.types import Tensors

aggregator = checked("aggregate ")
LARGE = 1e140
Rule = Callable[["Stack", Tensor], Combined]


class Stack(NamedTuple):
    """Deltas, the rows with weight (None: all), their shares (float64, sum 1), whether these are equal."""

    deltas: Tensors
    rows: Tensor | None
    share: Tensor
    equal: bool

    @property
    def clients(self) -> int:
        """How many have weight."""
        return len(self.share)

    def original(self, row: Tensor) -> Tensor:
        """Return the rows' numbers among all clients."""
        return row if self.rows is None else self.rows[row]


def present(deltas: Tensors, weight: Tensor) -> Stack:
    """Return the deltas of the clients with weight: nothing that another one sent is read."""
    keep = weight > 0
    w = weight[keep].double()
    rows = None if len(w) == len(weight) else keep.nonzero().squeeze(1)
    if not len(w):
        return Stack(deltas, rows, w, True)
    w = w / w.max()  # so that the sum of large weights is finite
    return Stack(deltas, rows, w / w.sum(), bool((w == 1).all()))


def from_rule(name: str, rule: Rule, options: Mapping[str, Any]) -> Aggregator:
    """Return an aggregator of a rule; where nobody has weight it gives zeros, and the rule is not asked."""

    def combine(deltas: Tensors, weight: Tensor, key: Tensor) -> Combined:
        stack = present(deltas, weight)
        if not stack.clients:
            return Combined({k: torch.zeros_like(d[0]) if len(d) else d.sum(0) for k, d in deltas.items()})
        return rule(stack, key)

    return Aggregator(name, combine, options)


def working(dtype: torch.dtype) -> torch.dtype:
    """Return the precision to compute in: float64 for counters as well, float32 for whatever is shorter."""
    return torch.float32 if dtype.is_floating_point and dtype != torch.float64 else torch.float64


def restored(value: Tensor, like: Tensor) -> Tensor:
    """Return one delta in the shape and type of a row; counters, such as BatchNorm's, stay whole."""
    value = value.reshape(like.shape[1:])
    return value.to(like.dtype) if like.is_floating_point() else value.round().to(like.dtype)


def block(stack: Stack, place: Place) -> Tensor:
    """Return columns [clients, k] in working precision.

    Nothing is beyond ±1e140, where squares would not be finite; float32 does not go that far.
    """
    delta = stack.deltas[place.name]
    x = delta.reshape(len(delta), -1)[:, place.columns]
    x = (x if stack.rows is None else x[stack.rows]).to(working(delta.dtype))
    return x.clamp(-LARGE, LARGE) if x.dtype == torch.float64 else x


def per_block(stack: Stack, rule: Callable[[Tensor], Tensor], rows: int = 1) -> Tensors:
    """Apply a rule that takes blocks [clients, k] to [rows, k] to all columns, in working precision."""
    out = {
        k: torch.empty(rows, d[0].numel(), dtype=working(d.dtype), device=d.device)
        for k, d in stack.deltas.items()
    }

    def one(place: Place) -> None:
        out[place.name][:, place.columns] = rule(block(stack, place))

    each(one, places(stack.deltas, stack.deltas), stack.share)
    return out


def mixed(stack: Stack, coefficients: Tensor) -> Tensors:
    """Return linear combinations of the rows, [k, clients] × [clients, ...] -> [k, ...]."""
    mixtures = per_block(stack, lambda x: coefficients.to(x.dtype) @ x, len(coefficients))
    return {k: v.reshape(len(v), *stack.deltas[k].shape[1:]) for k, v in mixtures.items()}


def whole(stack: Stack, rows: Tensors) -> Tensors:
    """Return one row of `per_block` or `mixed` per name in the types and shapes of the deltas."""
    return {k: restored(v, stack.deltas[k]) for k, v in rows.items()}


def combination(stack: Stack, coefficients: Tensor) -> Tensors:
    """Return Σ_i c_i Δ_i."""
    return whole(stack, mixed(stack, coefficients[None].to(stack.share.device)))


def note(value: float, like: Tensor) -> Tensor:
    """Return a number for the notes, on the device of the round."""
    return torch.tensor(value, device=like.device)
