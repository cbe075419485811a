"""The sentiment classifier of EmbracingFL (Lee et al. 2024, section 6.2 and Table 1)."""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn

from partita.core import check
from partita.models.blocks import Blocks, layers, seeded

POOLS = ("last", "mean")


def bilstm(
    vocabulary: int = 10000,
    *,
    embedding: int = 256,
    hidden: int = 256,
    outputs: int = 1,
    dropout: float = 0.3,
    pool: str = "last",
    seed: int = 0,
) -> Blocks:
    """A bidirectional LSTM over words: [B, T] int64 → [B, outputs].

    Embedding, dropout, LSTM in both directions, its outputs side by side (`pool`: the 'last' of each
    direction, or their 'mean' over the words), dropout, dense. Blocks `embedding`, `lstm`, `output`:
    3,611,137 parameters, 1,051,137 of them after the embedding. The paper uses words from 10,000, reviews of
    256 words, one output.

    Use 'mean' for long texts with plain SGD: a new LSTM forgets a word within a few others, so that its last
    output knows the ends of a text alone.
    """
    for field, value in (("vocabulary", vocabulary), ("embedding", embedding), ("hidden", hidden)):
        check.integer(field, value, low=1)
    check.integer("outputs", outputs, low=1)
    check.number("dropout", dropout, low=0.0, high=1.0)
    check.choice("pool", pool, POOLS)
    with seeded(seed):
        # N(0, 1), torch's default: with U(−0.05, 0.05), that of Keras, outputs hardly depend on the words,
        # and SGD takes a thousand steps to change that
        words = nn.Embedding(vocabulary, embedding)
        # Dropout opens a block instead of closing one: a device that stores the output of the blocks it does
        # not train still draws a new mask in every step.
        return Blocks(
            {
                "embedding": words,
                "lstm": Reader(
                    OrderedDict(dropout=nn.Dropout(dropout), both=BiLSTM(embedding, hidden, pool))
                ),
                "output": layers(dropout=nn.Dropout(dropout), linear=nn.Linear(2 * hidden, outputs)),
            }
        )


class BiLSTM(nn.Module):
    """Forward and backward LSTM as one recurrence with a direction axis of length 2: [B, T, E] → [B, 2H].

        i, f, g, o = W_input x_t + W_recurrent h_{t-1} + b
        c_t = σ(f) c_{t-1} + σ(i) tanh(g),  h_t = σ(o) tanh(c_t)
        output: h_T, or (1/T) Σ h_t with pool="mean"

    Gates are ordered as in torch.nn.LSTM, with one bias per gate as in Keras, whose initialization is used:
    Glorot for the input, orthogonal for the recurrence, forget bias 1. Written by hand because torch.nn.LSTM
    cannot be stacked over clients.
    """

    def __init__(self, inputs: int, hidden: int, pool: str = "last") -> None:
        super().__init__()
        gates = 4 * hidden
        glorot = [nn.init.xavier_uniform_(torch.empty(gates, inputs)) for _ in range(2)]
        orthogonal = [nn.init.orthogonal_(torch.empty(gates, hidden)) for _ in range(2)]
        bias = torch.zeros(2, gates)
        bias[:, hidden : 2 * hidden] = 1.0
        self.input = nn.Parameter(torch.stack(glorot))
        self.recurrent = nn.Parameter(torch.stack(orthogonal))
        self.bias = nn.Parameter(bias)
        self.kept = 2 + (pool == "mean")  # tensors of a state: h, c, and the sum of all h for their mean

    def forward(self, x: Tensor, words: int = 0, state: Tensor | None = None) -> Tensor:
        """Return the output of both directions; from a `state` on, after so many words of each direction."""
        h, _, *total = self.read(x, words, x.shape[1], state)
        output = total[0] / x.shape[1] if total else h
        return torch.cat((output[0], output[1]), -1)

    def read(self, x: Tensor, first: int, last: int, state: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the state of both directions, each [2, B, H], after the words `first` to `last` of each."""
        x = x.transpose(0, 1)
        x = torch.stack((x, x.flip(0)))[:, first:last]  # the second direction reads backwards
        _, time, batch, _ = x.shape
        # what the input adds to the gates needs no recurrence: one product for all time steps
        projected = x.flatten(1, 2) @ self.input.mT + self.bias.unsqueeze(1)
        recurrent = self.recurrent.mT
        zeros = x.new_zeros(2, batch, recurrent.shape[1])
        h, c, *total = [zeros] * self.kept if state is None else state.unbind(0)
        for step in projected.view(2, time, batch, -1).unbind(1):
            i, f, g, o = (step + h @ recurrent).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            total = [before + h for before in total]
        return (h, c, *total)

    def activations(self, x: Tensor, words: int = 0, state: Tensor | None = None) -> int:  # noqa: ARG002
        """Return what `partita.capacity.memory` counts: 10 values for each word, direction and unit.

        Four gates before and after their nonlinearity, c and h.
        """
        return 10 * 2 * x.shape[0] * (x.shape[1] - words) * self.recurrent.shape[-1]


class Reader(nn.Sequential):
    """Dropout, then the LSTM, which can stop after some words of each direction and go on from its state.

    A record is a row for each sample: its words, [T, E], then the state of both directions, [2 or 3, 2, H].
    """

    dropout: nn.Module
    both: BiLSTM

    def begin(self, x: Tensor, words: int) -> Tensor:
        """Return the record after so many words."""
        state = torch.stack(self.both.read(self.dropout(x), 0, words))  # [2 or 3, 2, B, H]
        return torch.cat((x.flatten(1), state.permute(2, 0, 1, 3).flatten(1)), 1)

    def resume(self, record: Tensor, words: int) -> Tensor:
        """Return the output from a record on."""
        inputs, shape = self.both.input.shape[-1], (self.both.kept, 2, self.both.recurrent.shape[-1])
        x, state = record.tensor_split([-math.prod(shape)], 1)
        x = x.reshape(len(x), -1, inputs)
        state = state.reshape(len(state), *shape).permute(1, 2, 0, 3)
        return self.both(self.dropout(x), words, state)  # type: ignore[no-any-return]
