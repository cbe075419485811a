"""Federated averaging: McMahan et al., *Communication-Efficient Learning of Deep Networks* (2017).

client:  w ← w − η ∇f_i(w; batch), from w = w^t
server:  w^{t+1} = w^t − Σ_i n_i (w^t − w_i) / Σ_i n_i
"""

from __future__ import annotations

from typing import Unpack

from partita.algorithms.base import Common, compose, method, rate, settings
from partita.local.sgd import together
from partita.types import Algorithm, Rate


@method
def fedavg(lr: float | Rate, **options: Unpack[Common]) -> Algorithm:
    """One global model: local SGD, then the mean.

    Use it when clients resemble each other, and as the model to beat when they do not.
    """
    common, eta = settings(options), rate("lr", lr)
    return compose(lambda problem: together(problem, eta, common.optimizer), common)
