"""What the server does with an aggregated delta, and learning rates over the rounds."""

from partita.optim.optimizers import adagrad, adam, sgd, yogi
from partita.optim.rates import constant, halving, linear, stepped

__all__ = [
    "adagrad",
    "adam",
    "constant",
    "halving",
    "linear",
    "sgd",
    "stepped",
    "yogi",
]
