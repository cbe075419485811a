"""Ordered dropout: in each step a model of a random width, the first channels of every layer (FjORD).

    p ~ uniform over the widths up to the client's own,   w ← w − η ∇f(w ⊙ m_p)

m_p is 1 on the first ⌊p C⌋ channels and 0 elsewhere. A channel whose weights, bias and normalization are zero
puts out zero, so that the masked model is the narrow one, and what lies outside has no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partita.core import draws
from partita.core.types import Tensors

WIDTH = 0x77
"""What the key of a step is folded with to draw its width: dropout layers count from 0."""


@dataclass(frozen=True, eq=False)
class Ordered:
    """A `Change` of the problem: `masks` has a row for each width, the last one all ones."""

    masks: Tensors
    widths: int
    buffers: frozenset[str]

    def __call__(self, tensors: Tensors, key: Tensor) -> Tensors:
        """Return w ⊙ m_p. Statistics are no weights: they are corrected after the pass."""
        which = self._drawn(key)
        return {k: tensors[k] * self._mask(k, which, tensors[k]) for k in self.masks if k not in self.buffers}

    def kept(self, name: str, new: Tensor, old: Tensor, key: Tensor) -> Tensor:
        """Keep the statistics of channels that took no part as they were."""
        if name not in self.masks:
            return new
        return torch.where(self._mask(name, self._drawn(key), new).bool(), new, old)

    def _drawn(self, key: Tensor) -> Tensor:
        return (
            (draws.uniform(draws.fold(key, WIDTH)) * self.widths).to(torch.int64).clamp(max=self.widths - 1)
        )

    def _mask(self, name: str, which: Tensor, like: Tensor) -> Tensor:
        return self.masks[name].index_select(0, which.reshape(1)).squeeze(0).to(like.dtype)


def ordered(
    widths: Sequence[Mapping[str, tuple[int, ...]]], whole: Tensors, buffers: Sequence[str]
) -> Ordered:
    """Return ordered dropout for a model with these tensors and the narrower models inside of it."""
    masks: Tensors = {}
    for name, value in whole.items():
        if all(shapes[name] == tuple(value.shape) for shapes in widths):
            continue
        mask = torch.zeros(len(widths) + 1, *value.shape, device=value.device)
        for row, shapes in zip(mask, widths):
            row[tuple(slice(0, n) for n in shapes[name])] = 1.0
        mask[-1] = 1.0
        masks[name] = mask
    return Ordered(masks, len(widths) + 1, frozenset(buffers))
