"""How the LSTM of EmbracingFL comes to learn reviews: plain SGD on all of IMDB, without federation.

    PARTITA_DATA=FOLDER python bench/reviews.py --units 64 --words normal --pool mean --steps 600

The model is that of `partita.models.bilstm` with torch.nn.LSTM, which is faster on a CPU.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

BATCH, TEST = 32, 1000


class Reader(nn.Module):
    def __init__(self, units: int, words: str, pool: str) -> None:
        super().__init__()
        self.units, self.pool = units, pool
        self.words = nn.Embedding(10_000, units)
        if words == "uniform":
            nn.init.uniform_(self.words.weight, -0.05, 0.05)
        self.lstm = nn.LSTM(units, units, batch_first=True, bidirectional=True)
        for name, p in self.lstm.named_parameters():
            if "weight_ih" in name:
                nn.init.xavier_uniform_(p)
            elif "weight_hh" in name:
                nn.init.orthogonal_(p)
            else:
                nn.init.zeros_(p)
                if "bias_ih" in name:
                    nn.init.ones_(p[units : 2 * units])  # that of the forget gate
        self.output = nn.Linear(2 * units, 1)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(self.dropout(self.words(x)))
        last = torch.cat((h[:, -1, : self.units], h[:, 0, self.units :]), -1)
        output: Tensor = self.output(self.dropout(last if self.pool == "last" else h.mean(1)))
        return output.squeeze(-1)


def padded_in_front(x: Tensor) -> Tensor:
    length, words = x.shape[1], (x > 0).sum(1, keepdim=True)
    return x.gather(1, (torch.arange(length) + words) % length)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--units", type=int, default=64, help="of the embedding and of each direction")
    parser.add_argument("--words", choices=("uniform", "normal"), default="normal", help="how words start")
    parser.add_argument("--pool", choices=("last", "mean"), default="mean", help="outputs that are read")
    parser.add_argument("--padding", choices=("behind", "front"), default="behind")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--lr", type=float, default=0.1)
    options = parser.parse_args()
    file = np.load(Path(os.environ["PARTITA_DATA"]) / "imdb.npz")
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    x, y = (torch.from_numpy(file[k].astype(t)) for k, t in (("x", "int64"), ("y", "float32")))
    order = torch.randperm(len(x), generator=generator)
    x, y = x[order], y[order]
    if options.padding == "front":
        x = padded_in_front(x)
    model = Reader(options.units, options.words, options.pool)
    sgd = torch.optim.SGD(model.parameters(), options.lr, momentum=0.9, weight_decay=1e-4)
    losses: list[float] = []
    for step in range(1, options.steps + 1):
        rows = torch.randint(0, len(x) - TEST, (BATCH,), generator=generator)
        loss = nn.functional.binary_cross_entropy_with_logits(model(x[rows]), y[rows])
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        losses.append(loss.item())
        if step % 50 == 0:
            print(f"step {step}  loss {np.mean(losses[-50:]):.4f}", flush=True)
    model.eval()
    with torch.no_grad():
        right = torch.cat(
            [(model(a) > 0) == (b > 0) for a, b in zip(x[-TEST:].split(250), y[-TEST:].split(250))]
        )
    print(f"test accuracy {100 * right.double().mean():.1f} %")


if __name__ == "__main__":
    main()
