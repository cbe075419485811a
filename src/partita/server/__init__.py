"""What the server does with an aggregated delta, rates over the rounds, and how much stale deltas count."""

from partita.server.optimizers import adagrad, adam, sgd, yogi
from partita.server.rates import constant, halving, linear, stepped
from partita.server.staleness import hinge, polynomial

__all__ = [
    "adagrad",
    "adam",
    "constant",
    "halving",
    "hinge",
    "linear",
    "polynomial",
    "sgd",
    "stepped",
    "yogi",
]
