"""Distances between clients from one pass over their deltas, and what follows from them alone.

    G_ij = ⟨x_i − c, x_j − c⟩,   ‖x_i − x_j‖² = G_ii + G_jj − 2 G_ij

Any affine combination z = Σ_i a_i x_i (Σ a = 1) has ‖z − x_j‖² = aᵀG a − 2 (G a)_j + G_jj, so iterations such
as Weiszfeld's run on n numbers (in NumPy, which is quick with few), and the deltas are read once more at the
end.

G is in float64. That makes the squares of float32 numbers finite and, without a centre, errors of distances
smaller than the rounding of float32 deltas themselves. Blocks may be multiplied in float32, in half the time,
where that is enough: everything is finite, and a distance is not small next to the deltas. Deltas
in float64 are centred at a point that a minority cannot move, the coordinate median. Whole-number tensors,
such as BatchNorm's counters, are no part of a distance.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from partita.aggregate.blocks import WIDTH, Place, each, places
from partita.aggregate.coordinate_median import TIE, medians
from partita.aggregate.stack import Stack, block
from partita.core.types import Tensors

Array = npt.NDArray[np.float64]
PARTIAL_SUMS = 32
CLOSE = 0.01  # squared distances below this part of the squares are worked out in double precision


def products(stack: Stack) -> Tensor:
    """Return the matrix of inner products, as exact as the deltas and distances ask for."""
    if any(d.dtype == torch.float64 for d in stack.deltas.values()):
        return gram(stack, medians(stack))
    if stack.share.device.type == "cpu" and torch.get_float32_matmul_precision() == "highest":
        quick = gram(stack, dtype=torch.float32)
        if torch.isfinite(quick).all():
            return _refined(stack, quick)
    return gram(stack)


def _refined(stack: Stack, g: Tensor) -> Tensor:
    """Work out exactly the products of clients close to another one: errors of g are 1e-8 of the squares.

    Most often they are few: Byzantine clients who all send the same.
    """
    norms = g.diagonal()
    apart = squared_distances(g).fill_diagonal_(math.inf)
    rows = (apart < CLOSE * (norms[:, None] + norms)).any(1).nonzero().squeeze(1)
    if len(rows):
        close = stack._replace(rows=stack.original(rows), share=stack.share[rows])
        g[rows[:, None], rows] = gram(close)
    return g


def gram(stack: Stack, centre: Tensors | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the inner products [n, n] in float64, within blocks in `dtype`, around a centre if given."""
    names = [k for k, d in stack.deltas.items() if d.is_floating_point()]
    # blocks that are read in place, without a copy that must fit the cache, may be longer: that is faster
    in_place = dtype == torch.float32 and stack.rows is None
    every = places(stack.deltas, names, 8 * WIDTH if in_place else WIDTH)
    # a fixed number of partial sums: the result does not depend on the number of threads
    groups = [every[i::PARTIAL_SUMS] for i in range(min(PARTIAL_SUMS, len(every)))]
    total = torch.zeros(stack.clients, stack.clients, dtype=torch.float64, device=stack.share.device)
    for part in each(lambda group: _partial(stack, centre, dtype, group), groups, total):
        total += part
    # a product of matrices need not be symmetric to the last bit, and two that are each other's neighbours
    # must be as far apart either way: who comes first decides such a tie, on every machine
    return (total + total.t()) / 2


def _partial(stack: Stack, centre: Tensors | None, dtype: torch.dtype, group: list[Place]) -> Tensor:
    total = torch.zeros(stack.clients, stack.clients, dtype=torch.float64, device=stack.share.device)
    for place in group:
        x = block(stack, place).to(dtype)
        if centre is not None:
            x = x - centre[place.name].reshape(-1)[place.columns].to(dtype)
        total += x @ x.t()
    return total


def squared_distances(g: Tensor) -> Tensor:
    """Return ‖x_i − x_j‖² of all pairs."""
    norms = g.diagonal()
    return (norms[:, None] + norms - 2 * g).clamp_(min=0).fill_diagonal_(0)


def distances_to(g: Array, a: Array) -> Array:
    """Return ‖Σ_i a_i x_i − x_j‖ for all j."""
    ga = g @ a
    return np.sqrt(np.maximum(a @ ga - 2 * ga + g.diagonal(), 0))


def length(g: Array, a: Array) -> float:
    """Return ‖Σ_i a_i (x_i − c)‖."""
    return math.sqrt(max(float(a @ (g @ a)), 0.0))


def central(g: Array, share: Array) -> Array:
    """Return the coefficients of a point that a minority cannot carry away, where iterations may start.

    Of all clients the one with the least mean distance to the others; around it, everybody counts by the
    inverse of the distance, within the median distance fully.
    """
    apart = np.sqrt(squared_distances(torch.from_numpy(g)).numpy())
    near = apart[(apart @ share).argmin()]
    ranked = near.argsort()
    half = near[ranked[min(int((share[ranked].cumsum() <= 0.5 + TIE).sum()), len(share) - 1)]]
    a = share * half / np.maximum(near, half) if half > 0 else share * (near == 0)
    return np.asarray(a / a.sum())
