"""Trimmed mean: Yin et al., *Byzantine-Robust Distributed Learning* (2018).

    Δ[c] = Σ_{i ∈ K_c} w_i Δ_i[c] / Σ_{i ∈ K_c} w_i,   K_c: all but the f smallest and the f largest of c

Clients are trimmed by number, whatever their weights; those that are left count by weight. If 2f ≥ n for the
n clients that arrive, f is the largest number with 2f < n; the notes say which one was used.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from partita.aggregate.sorting import per_sorted
from partita.aggregate.stack import Stack, aggregator, from_rule, note
from partita.core.options import Option
from partita.core.parts import Aggregator, Combined

F = Annotated[int, Option("f, how many values are dropped at each end", low=0, example=2)]


@aggregator
def trimmed_mean(f: F) -> Aggregator:
    """The mean of every coordinate without its f smallest and f largest values.

    Use it when up to f clients may be faulty and the median wastes too much of the others.
    """

    def rule(stack: Stack, key: Tensor) -> Combined:  # noqa: ARG001
        used = min(f, (stack.clients - 1) // 2)
        kept = slice(used, stack.clients - used)

        def mean(x: Tensor, share: Tensor | None) -> Tensor:
            if share is None:
                return x[:, kept].sum(1, dtype=torch.float64) / (stack.clients - 2 * used)
            return (x[:, kept].double() * share[:, kept]).sum(1) / share[:, kept].sum(1)

        return Combined(per_sorted(stack, mean), {"f": note(used, stack.share)})

    return from_rule("trimmed_mean", rule, {"f": f})
