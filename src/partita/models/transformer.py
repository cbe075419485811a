"""The causal language model of partial personalization (Pillutla et al. 2022, Appendix B.1.1)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from partita.core import check
from partita.models.blocks import Blocks, layers, seeded


def transformer(
    vocabulary: int = 10004,
    *,
    length: int = 20,
    width: int = 256,
    depth: int = 4,
    heads: int = 4,
    hidden: int = 1024,
    dropout: float = 0.0,
    seed: int = 0,
) -> Blocks:
    """Scores for the next token at every position: [B, T] int64 → [B, T, vocabulary], T up to `length`.

    The size of BERT mini: 4 blocks, 4 heads, width 256, hidden 1024, and the output layer shares the weight
    of the token embedding. 10,000 words and 4 special tokens give 5,731,604 parameters, 788,736 in each
    block; characters are `transformer(76, length=80)`. The paper personalizes the first and the last
    transformer block instead of the large embedding, so these are the input and output part.

    We normalize before each sub-layer and once at the end, which plain SGD trains without a warm-up.
    """
    for field, value in (("vocabulary", vocabulary), ("length", length), ("width", width), ("depth", depth)):
        check.integer(field, value, low=1)
    check.integer("heads", heads, low=1)
    check.integer("hidden", hidden, low=1)
    check.number("dropout", dropout, low=0.0, high=1.0)
    if width % heads:
        raise check.fail("heads", heads, f"a divisor of width={width}")
    with seeded(seed):
        embed = Embed(vocabulary, length, width, dropout)
        project = nn.Linear(width, vocabulary)
        # one Parameter with two names: named_parameters() and functional_call know it by the first
        project.weight = embed.tokens.weight
        blocks: dict[str, nn.Module] = {"embed": embed}
        blocks |= {f"block{i}": TransformerBlock(width, heads, hidden, dropout) for i in range(depth)}
        blocks["head"] = layers(norm=nn.LayerNorm(width), project=project)
        model = Blocks(blocks, input_part=["block0"], output_part=[f"block{depth - 1}"])
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        return model


class Embed(nn.Module):
    """Token embedding plus a learned embedding of the position."""

    def __init__(self, vocabulary: int, length: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(length, width).normal_(std=0.02))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        length = self.positions.shape[0]
        if x.dim() != 2 or x.shape[1] > length:
            raise check.fail("input", list(x.shape), f"[batch, time] with at most {length} tokens in time")
        out: Tensor = self.dropout(self.tokens(x) + self.positions[: x.shape[1]])
        return out


class TransformerBlock(nn.Module):
    """x ← x + attention(norm(x)), then x ← x + feedforward(norm(x))."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.feedforward = FeedForward(width, hidden, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.feedforward(self.norm2(x))
        return out


class Attention(nn.Module):
    """softmax(QKᵀ/√d + mask)·V for each head, then a projection; a position sees itself and what precedes.

    Written out, not fused: this form has per-client gradients and exact Hessian-vector products.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.dropout1 = nn.Dropout(dropout)
        self.dropout2 = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, heads, T, width/heads]
            for layer in (self.query, self.key, self.value)
        )
        time = x.shape[1]
        future = torch.ones(time, time, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(future, -math.inf)
        mixed = (self.dropout1(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2)
        out: Tensor = self.dropout2(self.out(mixed))
        return out


class FeedForward(nn.Module):
    """W₂ gelu(W₁x + b₁) + b₂ at every position."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.width = width
        self.expand = nn.Linear(width, hidden)
        self.contract = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.contract(nn.functional.gelu(self.expand(x))))
        return out
