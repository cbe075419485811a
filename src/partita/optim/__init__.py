"""Optimizers of clients and of the server, and learning rates over the rounds."""

from partita.optim.optimizers import adagrad, adam, adamw, sgd, yogi
from partita.optim.rates import constant, halving, linear, stepped

__all__ = [
    "adagrad",
    "adam",
    "adamw",
    "constant",
    "halving",
    "linear",
    "sgd",
    "stepped",
    "yogi",
]
