"""Layers of torch as users put them together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from samples import CLASSES, VOCABULARY, Foreign, lists, vectors


def _seeded(kind: Callable[..., nn.Module], *args: Any, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return kind(*args, **options)

    return build


class Encoder(nn.Module):
    """nn.TransformerEncoder with a head, samples first or, as is torch's default, second."""

    def __init__(self, samples_first: bool) -> None:
        super().__init__()
        self.first = samples_first
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=samples_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=samples_first)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).mean(1) if self.first else self.encoder(x.transpose(0, 1)).mean(0))


class Tagger(nn.Module):
    """nn.TransformerEncoder as it is by default, with a mask of padding, and a class for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, input_ids: torch.Tensor, src_key_padding_mask: torch.Tensor) -> torch.Tensor:
        x = self.encoder(self.embedding(input_ids), src_key_padding_mask=src_key_padding_mask)
        return self.head(x)


class Pair(nn.Module):
    """nn.Transformer: two inputs, of which one attends to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.head(self.transformer(source, target).mean(1))


class Attention(nn.Module):
    """nn.MultiheadAttention, whose output is a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        attended, weights = self.attention(x, x, x)
        return self.head(attended.mean(1)), weights


class Recurrent(nn.Module):
    """An LSTM or a GRU that returns its states too."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(6, 8, batch_first=True, num_layers=2, dropout=0.2, **options)
        self.head = nn.Linear(16 if self.rnn.bidirectional else 8, CLASSES)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        states, last = self.rnn(x)
        return self.head(states[:, -1]), last


LAYERS: dict[str, Foreign] = {
    # torch.nn
    "TransformerEncoder": Foreign("torch.nn", _seeded(Encoder, True), vectors(5, 16)),
    "TransformerEncoder, samples second": Foreign("torch.nn", _seeded(Encoder, False), vectors(5, 16)),
    "TransformerEncoder, a mask of padding": Foreign("torch.nn", _seeded(Tagger), lists("tokens")),
    "Transformer": Foreign("torch.nn", _seeded(Pair), vectors(5, 16, inputs=2)),
    "MultiheadAttention": Foreign("torch.nn", _seeded(Attention), vectors(5, 16)),
    "LSTM": Foreign("torch.nn", _seeded(Recurrent, nn.LSTM), vectors(5, 6)),
    "GRU": Foreign("torch.nn", _seeded(Recurrent, nn.GRU, bidirectional=True), vectors(5, 6)),
}
