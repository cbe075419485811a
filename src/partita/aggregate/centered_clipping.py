"""Centered clipping: Karimireddy et al., *Learning from History for Byzantine Robust Optimization* (2021).

    v ← v + Σ_i w_i (Δ_i − v) min(1, τ / ‖Δ_i − v‖) / Σ_i w_i

All names are one vector. The paper starts at the aggregate of the round before. An aggregator has no memory
here, so v starts at the coordinate median: a minority cannot move it, and it moves along with all deltas when
these are shifted. Each step moves v by τ at most.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from partita.aggregate.coordinate_median import medians
from partita.aggregate.gram import Array, distances_to, gram
from partita.aggregate.stack import Stack, aggregator, from_rule, mixed, restored
from partita.core.options import Option
from partita.core.parts import Aggregator, Combined
from partita.core.types import Tensors

Tau = Annotated[
    float, Option("τ, what is farther away than this is clipped", low=0, open_low=True, example=1.0)
]
Iterations = Annotated[int, Option("the number of steps", low=1)]


@aggregator
def centered_clipping(tau: Tau, iterations: Iterations = 5) -> Aggregator:
    """The mean of the deltas, each clipped to a distance τ from a robust centre.

    Use it when less than half of the weight may be faulty and you know how far honest clients are apart.
    """

    def rule(stack: Stack, key: Tensor) -> Combined:  # noqa: ARG001
        start = medians(stack)
        a = _clipped(gram(stack, start).cpu().numpy(), stack.share.cpu().numpy(), tau, iterations)
        return Combined(_around(stack, start, torch.from_numpy(a).to(stack.share.device)))

    return from_rule("centered_clipping", rule, {"tau": tau, "iterations": iterations})


def _clipped(g: Array, share: Array, tau: float, iterations: int) -> Array:
    """Return the coefficients a of v = start + Σ_i a_i (Δ_i − start)."""
    a = np.zeros_like(share)
    for _ in range(iterations):
        c = share * tau / np.maximum(distances_to(g, a), tau)
        a = c + (1 - c.sum()) * a
    return a


def _around(stack: Stack, start: Tensors, a: Tensor) -> Tensors:
    """Return start + Σ_i a_i (Δ_i − start)."""
    rest = float(1 - a.sum())
    moved = mixed(stack, a[None])
    return {k: restored(rest * start[k] + moved[k][0], d) for k, d in stack.deltas.items()}
