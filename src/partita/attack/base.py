"""What attacks on uploads have in common: the honest uploads of a round, and rows to send instead."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from partita.core import tree
from partita.core.options import checked
from partita.core.sound import faults
from partita.core.types import Tensors, Upload

attack = checked("attack ")

Stacks = tuple[Tensors, Tensors, Tensors]
"""Deltas, extras and sums, as clients send them, a row for each of them."""


PREFIXES = ("", "extra.", "sums.")
"""What the names of a payload's parts begin with, where they are told apart."""


def honest(uploads: Upload, liars: tuple[int, ...]) -> Stacks:
    """What the others send: the adversary sees all of it. Nobody honest in the cohort: what liars would."""
    found: Stacks = tree.rows(uploads.payload, crowd(uploads, liars)[0] or list(liars))
    return found


def crowd(uploads: Upload, liars: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """The places of the honest clients that count, and of the liars that do.

    A client without data sends zeros and has no weight; what is unusable will be set aside.
    """
    weight, lying = uploads.weight, set(liars)
    assert weight is not None
    with_data = (weight > 0).tolist()
    why = faults(uploads, (), len(with_data))
    others = [i for i, counts in enumerate(with_data) if counts and not why[i] and i not in lying]
    return others, [i for i in liars if with_data[i]]


def everyone_sends(uploads: Upload, liars: tuple[int, ...], sent: Stacks) -> dict[int, Upload]:
    """The same from every liar, each with its own weight."""
    delta, extra, sums = sent
    return {i: Upload(delta, _weight(uploads, i), extra, sums) for i in liars}


def each_sends(
    uploads: Upload, liars: tuple[int, ...], forge: Callable[[int, str, Tensor], Tensor]
) -> dict[int, Upload]:
    """From each liar, tensor by tensor, what `forge` makes of (its place, the name, its honest tensor).

    What else it sends may have the name of a delta: there, the name begins with `extra.` or `sums.`.
    """
    sent = {}
    for i in liars:
        delta, extra, sums = (
            {k: forge(i, prefix + k, x[i]) if x.is_floating_point() else x[i] for k, x in part.items()}
            for prefix, part in zip(PREFIXES, uploads.payload)
        )
        sent[i] = Upload(delta, _weight(uploads, i), extra, sums)
    return sent


def by_tensor(stacks: Stacks, fn: Callable[[Tensor], Tensor]) -> Stacks:
    """fn on each stack of numbers, giving one row; of counters the first honest row."""
    delta, extra, sums = (
        {k: fn(x) if x.is_floating_point() else x[0] for k, x in part.items()} for part in stacks
    )
    return delta, extra, sums


def gram(stacks: Stacks) -> Tensor:
    """Inner products of the rows about their mean, in float64."""
    rows = [x for part in stacks for x in part.values() if x.is_floating_point()]
    n = len(rows[0]) if rows else 0
    total = torch.zeros(n, n, dtype=torch.float64, device=rows[0].device if rows else None)
    for x in rows:
        flat = x.reshape(n, -1).double()
        centred = flat - flat.mean(0)
        total += centred @ centred.T
    return total


def _weight(uploads: Upload, i: int) -> Tensor | None:
    return None if uploads.weight is None else uploads.weight[i]
