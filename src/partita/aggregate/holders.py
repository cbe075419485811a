"""Aggregation over those who hold a tensor, or a part of it: clients of different capacity.

    Δ[c] = aggregator(Δ_i[c] : i holds c)   for every coordinate c,   0 if nobody holds it

Coordinates that the same clients hold are handled together, as one vector.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from partita.types import Aggregator, Combined, Tensors

WORD = 31  # rows of a pattern that fit beside the number of a group in 64 bits


def over_holders(
    aggregator: Aggregator, deltas: Tensors, weight: Tensor, key: Tensor, holders: Mapping[str, Tensor]
) -> Combined:
    """The aggregator on each group of coordinates with the weights of its holders, all others having none.

    holders: a bool tensor for a name, [clients] or, where clients hold parts of it, in the shape of its
    stack; names that it lacks are held by all. With several groups their notes begin with `group0.`, ...
    """
    groups: dict[tuple[bool, ...], dict[str, Tensor | None]] = {}
    for name, delta in deltas.items():
        held = holders.get(name, torch.ones(len(weight), dtype=torch.bool))
        for pattern, where in _patterns(held).items():
            groups.setdefault(pattern, {})[name] = where if where is None else where.to(delta.device)
    out = {k: torch.zeros_like(d[0]).reshape(-1) for k, d in deltas.items()}
    notes: Tensors = {}
    for number, (pattern, parts) in enumerate(groups.items()):
        some = {k: _part(deltas[k], where) for k, where in parts.items()}
        mask = torch.tensor(pattern, device=weight.device)
        done = aggregator.combine(some, torch.where(mask, weight, 0.0), key)
        for k, where in parts.items():
            out[k][slice(None) if where is None else where] = done.delta[k].reshape(-1)
        prefix = f"group{number}." if len(groups) > 1 else ""
        notes |= {f"{prefix}{k}": v for k, v in done.notes.items()}
    return Combined({k: v.reshape(deltas[k].shape[1:]) for k, v in out.items()}, notes)


def _part(delta: Tensor, where: Tensor | None) -> Tensor:
    """Some columns of a stack, or all of them as they are."""
    return delta if where is None else delta.reshape(len(delta), -1)[:, where]


def _patterns(held: Tensor) -> dict[tuple[bool, ...], Tensor | None]:
    """Who holds what: for each set of holders its columns (None: all)."""
    if held.dim() == 1:
        return {tuple(held.tolist()): None}
    flat = held.reshape(len(held), -1)
    group = torch.zeros(flat.shape[1], dtype=torch.int64, device=flat.device)
    for begin in range(0, len(flat), WORD):  # equal numbers: the same holders among the rows so far
        for row in flat[begin : begin + WORD]:
            group = 2 * group + row
        group = torch.unique(group, return_inverse=True)[1]
    found: dict[tuple[bool, ...], Tensor | None] = {}
    for number in range(int(group.max()) + 1 if len(group) else 0):
        columns = (group == number).nonzero().squeeze(1)
        found[tuple(flat[:, columns[0]].tolist())] = None if len(columns) == len(group) else columns
    return found
