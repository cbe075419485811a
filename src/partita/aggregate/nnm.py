"""Nearest-neighbour mixing: Allouah et al., *Fixing by Mixing: A Recipe for Optimal Byzantine ML* (2023).

    y_i = Σ_{j ∈ N_i} w_j Δ_j / Σ_{j ∈ N_i} w_j,   N_i: the n − f clients nearest to i, itself one of them
    Δ = inner(y_1, ..., y_n),   with the weights w_i

All names are one vector. If f ≥ n for the n clients that arrive, f is n − 1: everybody stays as it is. The
notes say which f was used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from partita.aggregate.gram import products, squared_distances
from partita.aggregate.inner import Inner, inside
from partita.aggregate.krum import F
from partita.aggregate.stack import Stack, aggregator, from_rule, note
from partita.core.parts import Aggregator, Combined


@aggregator
def nnm(f: F, inner: Inner) -> Aggregator:
    """Every delta is replaced by the mean of its n − f nearest ones, then another aggregator takes over.

    Use it before a robust aggregator when clients differ in their data.
    """

    def rule(stack: Stack, key: Tensor) -> Combined:
        used = min(f, stack.clients - 1)
        apart = squared_distances(products(stack)).fill_diagonal_(-1)  # oneself is always the nearest
        near = apart.argsort(dim=1, stable=True)[:, : stack.clients - used]
        # nothing is drawn here: the key is the inner aggregator's
        mixing = torch.zeros_like(apart).scatter_(1, near, stack.share[near])
        done = inside(inner, stack, mixing / mixing.sum(1, keepdim=True), stack.share, key)
        return Combined(done.delta, {"f": note(used, apart), **done.notes})

    return from_rule("nnm", rule, {"f": f, "inner": inner})
