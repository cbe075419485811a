"""Models of dense layers only. They flatten whatever they are given."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

from torch import nn

from partita.core import check
from partita.models.blocks import Blocks, layers, scalable, seeded


def logistic(inputs: int, classes: int, *, seed: int = 0) -> Blocks:
    """Multinomial logistic regression: x ↦ Wx + b, one block `output`.

    (inputs + 1) · classes parameters; 7,850 for MNIST. With a cross entropy its loss is convex, which is what
    the experiments of Fed+ (Kundu et al. 2022) and many proofs ask for.
    """
    return mlp(inputs, classes, seed=seed)


def mlp(*widths: int, seed: int = 0) -> Blocks:
    """A multilayer perceptron with ReLU: mlp(64, 32, 10) takes 64 numbers, has 32 hidden units, 10 outputs.

    Blocks `hidden1`, `hidden2`, ..., `output`; Σ (w_i + 1) · w_{i+1} parameters.
    """
    if len(widths) < 2:
        raise check.fail("widths", widths, "at least the number of inputs and the number of outputs")
    for width in widths:
        check.integer("widths", width, low=1)
    return scalable(_mlp(widths, seed), 1.0, partial(_mlp, widths, seed))


def _mlp(widths: tuple[int, ...], seed: int, width: float = 1.0) -> Blocks:
    hidden = [max(1, math.floor(width * w)) for w in widths[1:-1]]
    sizes = (widths[0], *hidden, widths[-1])
    with seeded(seed):
        blocks = {}
        for i, (before, after) in enumerate(pairwise(sizes), start=1):
            first = {"flatten": nn.Flatten()} if i == 1 else {}
            last = {"relu": nn.ReLU()} if i < len(sizes) - 1 else {}
            name = f"hidden{i}" if last else "output"
            blocks[name] = layers(**first, linear=nn.Linear(before, after), **last)
        return Blocks(blocks)
