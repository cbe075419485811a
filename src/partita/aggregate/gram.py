"""Distances between clients from one pass over their deltas, and what follows from them alone.

    G_ij = ⟨x_i − c, x_j − c⟩,   ‖x_i − x_j‖² = G_ii + G_jj − 2 G_ij

Any affine combination z = Σ_i a_i x_i (Σ a = 1) has ‖z − x_j‖² = aᵀG a − 2 (G a)_j + G_jj, so iterations such
as Weiszfeld's run on n numbers (in NumPy, which is quick with few), and the deltas are read once more at the
end.

G is in float64. That makes the squares of float32 numbers finite and, without a centre, errors of distances
smaller than the rounding of float32 deltas themselves. Deltas in float64 are centred at a point that a
minority cannot move, the coordinate median. Whole-number tensors, such as BatchNorm's counters, are no part
of a distance.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from partita.aggregate.blocks import Place, each, places
from partita.aggregate.coordinate_median import medians
from partita.aggregate.stack import Stack, block
from partita.types import Tensors

Array = npt.NDArray[np.float64]
SUMS = 32


def products(stack: Stack) -> Tensor:
    """The matrix of inner products, around the coordinate median where there are float64 deltas."""
    exact = any(d.dtype == torch.float64 for d in stack.deltas.values())
    return gram(stack, medians(stack) if exact else None)


def gram(stack: Stack, centre: Tensors | None = None) -> Tensor:
    """The matrix of inner products [n, n], around a centre if one is given."""
    names = [k for k, d in stack.deltas.items() if d.is_floating_point()]
    every = places(stack.deltas, names)
    # a fixed number of partial sums: the result does not depend on the number of threads
    groups = [every[i::SUMS] for i in range(min(SUMS, len(every)))]
    total = torch.zeros(stack.clients, stack.clients, dtype=torch.float64, device=stack.share.device)
    for part in each(lambda group: _partial(stack, centre, group), groups, total):
        total += part
    return total


def _partial(stack: Stack, centre: Tensors | None, group: list[Place]) -> Tensor:
    total = torch.zeros(stack.clients, stack.clients, dtype=torch.float64, device=stack.share.device)
    for place in group:
        x = block(stack, place).double()
        if centre is not None:
            x = x - centre[place.name].reshape(-1)[place.columns].double()
        total.addmm_(x, x.t())
    return total


def squared_distances(g: Tensor) -> Tensor:
    """‖x_i − x_j‖² of all pairs."""
    norms = g.diagonal()
    return (norms[:, None] + norms - 2 * g).clamp_(min=0).fill_diagonal_(0)


def distances_to(g: Array, a: Array) -> Array:
    """‖Σ_i a_i x_i − x_j‖ for all j."""
    ga = g @ a
    return np.sqrt(np.maximum(a @ ga - 2 * ga + g.diagonal(), 0))


def length(g: Array, a: Array) -> float:
    """‖Σ_i a_i (x_i − c)‖."""
    return math.sqrt(max(float(a @ (g @ a)), 0.0))


def central(g: Array, share: Array) -> Array:
    """Coefficients of a point that a minority cannot carry away, where iterations may start.

    Of all clients the one with the least mean distance to the others; around it, everybody counts by the
    inverse of the distance, within the median distance fully.
    """
    apart = np.sqrt(squared_distances(torch.from_numpy(g)).numpy())
    near = apart[(apart @ share).argmin()]
    ranked = near.argsort()
    half = near[ranked[min(int((share[ranked].cumsum() < 0.5).sum()), len(share) - 1)]]
    a = share * half / np.maximum(near, half) if half > 0 else share * (near == 0)
    return np.asarray(a / a.sum())
