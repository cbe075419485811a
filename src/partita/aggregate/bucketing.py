"""Bucketing: Karimireddy et al., *Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing* (2022).

    π a random permutation of the clients;   B_b = π(s(b−1)+1), ..., π(sb)
    y_b = Σ_{i ∈ B_b} w_i Δ_i / Σ_{i ∈ B_b} w_i,   with weight Σ_{i ∈ B_b} w_i
    Δ = inner(y_1, y_2, ...)

The permutation is another one in every round. The last bucket has what is left.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from partita.aggregate.inner import Inner, inside
from partita.aggregate.stack import Stack, aggregator, from_rule, note
from partita.core import draws
from partita.core.options import Option
from partita.core.parts import Aggregator, Combined

S = Annotated[int, Option("s, the number of clients in a bucket", low=1, example=2)]


@aggregator
def bucketing(s: S, inner: Inner) -> Aggregator:
    """Random buckets of s clients are averaged, then another aggregator takes over.

    Use it when honest clients differ so much that robust aggregators take them for faulty ones.
    """

    def rule(stack: Stack, key: Tensor) -> Combined:
        order = draws.fold(key.to(stack.share.device), torch.arange(stack.clients, device=stack.share.device))
        bucket = torch.empty_like(order)
        bucket[order.argsort()] = torch.arange(stack.clients, device=order.device) // s
        buckets = -(-stack.clients // s)
        member = (bucket == torch.arange(buckets, device=bucket.device)[:, None]) * stack.share
        weight = member.sum(1)
        branch = draws.branch(key, "inner")  # `key` has drawn the buckets
        done = inside(inner, stack, member / weight[:, None], weight, branch)
        return Combined(done.delta, {"buckets": note(buckets, weight), **done.notes})

    return from_rule("bucketing", rule, {"s": s, "inner": inner})
