"""Optimizers of clients and of the server, and learning rates over rounds and steps."""

from partita.optim.optimizers import adagrad, adam, adamw, lion, sgd, yogi
from partita.optim.rates import by_step, constant, cosine, halving, linear, stepped, within_round

__all__ = [
    "adagrad",
    "adam",
    "adamw",
    "by_step",
    "constant",
    "cosine",
    "halving",
    "linear",
    "lion",
    "sgd",
    "stepped",
    "within_round",
    "yogi",
]
