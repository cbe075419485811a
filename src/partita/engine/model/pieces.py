"""A batch that passes through the model in pieces: its gradient, in the memory of one piece.

    f(w; batch) = Σ_b a_b f(w; piece b) / Σ_b a_b,   and so ∇f

a_b is what a piece counts for: its real samples, or the weights of its labels where the loss has such; a loss
that is a sum over samples is the sum over pieces. Statistics (BatchNorm) see one piece after another. When
clients are stacked, some have no sample in the last pieces: those change nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from partita.core import draws
from partita.core.criterion import Criterion
from partita.core.inputs import each
from partita.core.types import Batch, Tensors

Gradient = Callable[[Tensors, Batch], tuple[Tensor, Tensors, Tensors]]
"""(params, batch) -> f, ∇f, the buffers after the pass."""


def pieces(batch: Batch) -> list[Batch]:
    """Cut a batch; each piece has a key of its own, the first one that of the batch."""
    rows, size = len(batch.y), batch.piece
    if size is None or rows <= size:
        return [batch]
    parts = []
    for number, start in enumerate(range(0, rows, size)):
        part = slice(start, min(start + size, rows))
        mask = None if batch.mask is None else batch.mask[part]
        key = draws.branch(batch.key, "piece", number) if number else batch.key
        x = each(lambda x, part=part: x[part], batch.x)  # type: ignore[misc]
        parts.append(Batch(x, batch.y[part], mask, key, None, batch.given))
    return parts


def accumulated(
    gradient: Gradient, criterion: Criterion, params: Tensors, parts: list[Batch]
) -> tuple[Tensor, Tensors, Tensors]:
    """Return f, ∇f and the buffers of all pieces, one after another."""
    after: Tensors = {}
    sums: Tensors = {}
    total = torch.zeros((), device=parts[0].key.device)
    for part in parts:
        loss, g, buffers = gradient({**params, **after}, part)
        counts, size = amount(criterion, part, loss), _size(part, loss)
        terms = {"": loss, **{f".{k}": v for k, v in g.items()}}
        # what a piece without samples has computed may be no number
        added = {k: torch.where(counts > 0, counts.to(v.dtype) * v, 0.0) for k, v in terms.items()}
        sums = {k: sums[k] + v for k, v in added.items()} if sums else added
        after = {k: torch.where(size > 0, v, after.get(k, params[k])) for k, v in buffers.items()}
        total = total + counts
    over = torch.ones_like(total) if criterion.adds_up else torch.where(total > 0, total, 1.0)
    means = {k: v / over.to(v.dtype) for k, v in sums.items()}
    return means.pop(""), {k[1:]: v for k, v in means.items()}, after


def _size(batch: Batch, like: Tensor) -> Tensor:
    """Return how many real samples there are."""
    return like.new_full((), len(batch.y)) if batch.mask is None else batch.mask.sum().to(like.dtype)


def amount(criterion: Criterion, batch: Batch, like: Tensor) -> Tensor:
    """Return what the loss of a batch counts for beside that of others."""
    if criterion.adds_up:
        return (_size(batch, like) > 0).to(like.dtype)
    if criterion.weight is None:
        return _size(batch, like)
    # weights follow from the labels; of outputs they have the type, and their places where labels are shares
    output = batch.y if batch.y.is_floating_point() else like
    weight = criterion.weight(output, batch.y)
    return (weight if batch.mask is None else torch.where(batch.mask > 0, weight, 0.0)).sum().to(like.dtype)
