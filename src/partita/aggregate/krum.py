"""Krum: Blanchard et al., *Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent* (2017).

    score(i) = Σ ‖Δ_i − Δ_j‖²  over the n − f − 2 clients j closest to i
    Krum:        the Δ_i with the least score
    Multi-Krum:  Σ w_i Δ_i / Σ w_i over the m clients with the least scores

All names are one vector. Weights do not change scores; they count in the mean of Multi-Krum. The paper's
proof asks for n > 2f + 2. If n < f + 3 for the n clients that arrive, f is n − 3 (or 0), so that everybody
has a neighbour; if m > n, m is n. The notes say what was used, and who was chosen.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from partita.aggregate.gram import products, squared_distances
from partita.aggregate.stack import Stack, aggregator, combination, from_rule, note
from partita.core.options import Option
from partita.core.parts import Aggregator, Combined

F = Annotated[int, Option("f, how many clients may be faulty", low=0, example=2)]
M = Annotated[int, Option("m, how many clients are averaged", low=1, example=4)]


@aggregator
def krum(f: F) -> Aggregator:
    """The delta of the one client that is closest to its neighbours.

    Use it when up to f clients may be faulty and the result must be what some client really sent.
    """

    def rule(stack: Stack, key: Tensor) -> Combined:  # noqa: ARG001
        scores, used = _scores(stack, f)
        best = stack.original(scores.argmin())
        delta = {k: d[best].clone() for k, d in stack.deltas.items()}
        return Combined(delta, {"f": used, "chosen": best})

    return from_rule("krum", rule, {"f": f})


@aggregator
def multi_krum(f: F, m: M) -> Aggregator:
    """The mean of the m clients that are closest to their neighbours.

    Use it when up to f clients may be faulty and Krum's single client is too noisy.
    """

    def rule(stack: Stack, key: Tensor) -> Combined:  # noqa: ARG001
        scores, used = _scores(stack, f)
        best = scores.argsort(stable=True)[:m]
        a = torch.zeros_like(stack.share)
        a[best] = stack.share[best] / stack.share[best].sum()
        notes = {"f": used, "m": note(len(best), a), "chosen": stack.original(best)}
        return Combined(combination(stack, a), notes)

    return from_rule("multi_krum", rule, {"f": f, "m": m})


def _scores(stack: Stack, f: int) -> tuple[Tensor, Tensor]:
    """Return everybody's score, and the f that was used."""
    n = stack.clients
    used = max(min(f, n - 3), 0)
    apart = squared_distances(products(stack)).fill_diagonal_(-1).sort(dim=1).values  # oneself first
    return apart[:, 1 : max(n - used - 1, 2)].sum(1), note(used, apart)
