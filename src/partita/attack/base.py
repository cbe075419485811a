"""What attacks on uploads have in common: the honest uploads of a round, and rows to send instead."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from partita.core import tree
from partita.core.options import checked
from partita.core.types import Tensors, Upload

attack = checked("attack ")

Stacks = tuple[Tensors, Tensors, Tensors]
"""Deltas, extras and sums, as clients send them, a row for each of them."""


PREFIXES = ("", "extra.", "sums.")
"""What the names of a payload's parts begin with, where they are told apart."""


def honest(uploads: Upload, byzantine: tuple[int, ...]) -> Stacks:
    """Return what honest clients send, all of which the adversary sees.

    Where a cohort has no honest client, it is what the Byzantine clients would have sent.
    """
    rows: Stacks = tree.rows(uploads.payload, crowd(uploads, byzantine)[0] or list(byzantine))
    return rows


def crowd(uploads: Upload, byzantine: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return the places of the honest clients that count, and of the Byzantine ones that do.

    A client without data sends zeros and has no weight; what is unusable will be set aside.
    """
    assert uploads.weight is not None
    with_data, dishonest = (uploads.weight > 0).tolist(), set(byzantine)
    rejections = tree.faults(uploads, (), len(with_data))
    honest_places = [
        i for i, counts in enumerate(with_data) if counts and not rejections[i] and i not in dishonest
    ]
    return honest_places, [i for i in byzantine if with_data[i]]


def everyone_sends(uploads: Upload, byzantine: tuple[int, ...], sent: Stacks) -> dict[int, Upload]:
    """Return the same upload for every Byzantine client, each with its own weight."""
    delta, extra, sums = sent
    return {i: Upload(delta, _weight(uploads, i), extra, sums) for i in byzantine}


def each_sends(
    uploads: Upload, byzantine: tuple[int, ...], forge: Callable[[int, str, Tensor], Tensor]
) -> dict[int, Upload]:
    """Return for each Byzantine client what `forge` makes of (its place, a name, its honest tensor).

    What a client sends beside deltas may have the name of a delta: there, the name begins with `extra.` or
    `sums.`.
    """
    sent = {}
    for i in byzantine:
        delta, extra, sums = (
            {k: forge(i, prefix + k, x[i]) if x.is_floating_point() else x[i] for k, x in part.items()}
            for prefix, part in zip(PREFIXES, uploads.payload)
        )
        sent[i] = Upload(delta, _weight(uploads, i), extra, sums)
    return sent


def by_tensor(stacks: Stacks, fn: Callable[[Tensor], Tensor]) -> Stacks:
    """Return what `fn` makes of each stack of numbers, one row; of counters the first row."""
    delta, extra, sums = (
        {k: fn(x) if x.is_floating_point() else x[0] for k, x in part.items()} for part in stacks
    )
    return delta, extra, sums


def gram(stacks: Stacks) -> Tensor:
    """Return the inner products of the rows about their mean, in float64."""
    stacked = [x for part in stacks for x in part.values() if x.is_floating_point()]
    n = len(stacked[0]) if stacked else 0
    total = torch.zeros(n, n, dtype=torch.float64, device=stacked[0].device if stacked else None)
    for x in stacked:
        flat = x.reshape(n, -1).double()
        centred = flat - flat.mean(0)
        total += centred @ centred.T
    return total


def _weight(uploads: Upload, i: int) -> Tensor | None:
    return None if uploads.weight is None else uploads.weight[i]
