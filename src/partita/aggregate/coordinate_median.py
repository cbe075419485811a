"""Coordinate median: Yin et al., *Byzantine-Robust Distributed Learning* (2018).

    Δ[c] = median_i Δ_i[c]   with weights w_i, for every coordinate c

With x₁ ≤ x₂ ≤ ... the sorted values, it is the middle of the first x_k with Σ_{j≤k} w_j ≥ W/2 and the first
with Σ_{j≤k} w_j > W/2. For equal weights that is the usual median: of an even number of values, the mean of
the two in the middle. A client with double weight counts as two.
"""

from __future__ import annotations

from torch import Tensor

from partita.aggregate.sorting import per_sorted
from partita.aggregate.stack import Stack, aggregator, from_rule
from partita.core.parts import Aggregator, Combined
from partita.core.types import Tensors

TIE = 1e-12  # sums of shares that are equal but for rounding


@aggregator
def coordinate_median() -> Aggregator:
    """The median of every coordinate, by the clients' weights.

    Use it when less than half of the weight may be faulty: no coordinate leaves the range of honest clients.
    """
    return from_rule("coordinate_median", lambda stack, key: Combined(medians(stack)), {})  # noqa: ARG005


def medians(stack: Stack) -> Tensors:
    """Return the median of every coordinate."""
    return per_sorted(stack, middle)


def middle(x: Tensor, share: Tensor | None) -> Tensor:
    """Return the weighted medians of sorted rows."""
    n = x.shape[1]
    if share is None:
        return x[:, (n - 1) // 2] / 2 + x[:, n // 2] / 2  # halves first: the sum might not be finite
    sums = share.cumsum(1)
    low = (sums < 0.5 - TIE).sum(1, keepdim=True).clamp(max=n - 1)
    high = (sums <= 0.5 + TIE).sum(1, keepdim=True).clamp(max=n - 1)
    return (x.gather(1, low) / 2 + x.gather(1, high) / 2).squeeze(1)
