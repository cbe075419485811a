"""Geometric median (RFA): Pillutla et al., *Robust Aggregation for Federated Learning* (2019).

    minimize over z:   Σ_i w_i ‖z − Δ_i‖₂

by the smoothed Weiszfeld iteration

    β_i = w_i / max(ν, ‖z − Δ_i‖),   z ← Σ_i β_i Δ_i / Σ_i β_i

until a step is shorter than `tolerance` times the harmonic mean of the distances, Σ w / Σ β, which nobody far
away can stretch. All names are one vector.
It does not start at the mean, from which an attacker at 10¹² takes a thousand steps to come back, but around
the client that is nearest to all others; the minimum is the same.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from partita.aggregate.gram import Array, central, distances_to, length, products
from partita.aggregate.stack import Stack, aggregator, combination, from_rule, note
from partita.core.options import Option
from partita.core.parts import Aggregator, Combined

Tolerance = Annotated[float, Option("the relative length of the last step", low=0)]
Iterations = Annotated[int, Option("the most steps", low=1)]
Nu = Annotated[float, Option("ν, distances below it count as it", low=0, open_low=True)]


@aggregator
def geometric_median(tolerance: Tolerance = 1e-8, iterations: Iterations = 1000, nu: Nu = 1e-6) -> Aggregator:
    """The point with the least mean distance to the deltas.

    Use it when less than half of the weight may be faulty and coordinates belong together.
    """

    def rule(stack: Stack, key: Tensor) -> Combined:  # noqa: ARG001
        g, share = products(stack).cpu().numpy(), stack.share.cpu().numpy()
        a, used = weiszfeld(g, share, tolerance, iterations, nu)
        return Combined(combination(stack, torch.from_numpy(a)), {"iterations": note(used, stack.share)})

    return from_rule("geometric_median", rule, {"tolerance": tolerance, "iterations": iterations, "nu": nu})


def weiszfeld(g: Array, share: Array, tolerance: float, iterations: int, nu: float) -> tuple[Array, int]:
    """Return the coefficients a of z = Σ_i a_i Δ_i, and the number of steps."""
    a = central(g, share)
    for step in range(iterations):
        beta = share / np.maximum(distances_to(g, a), nu)
        new = beta / beta.sum()
        moved, a = length(g, new - a), new
        if moved <= tolerance / beta.sum():
            return a, step + 1
    return a, iterations
