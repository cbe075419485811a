"""What the server does with an aggregated delta, and learning rates over the rounds."""

from partita.server.optimizers import adagrad, adam, sgd, yogi
from partita.server.rates import constant, halving, linear, stepped

__all__ = ["adagrad", "adam", "constant", "halving", "linear", "sgd", "stepped", "yogi"]
