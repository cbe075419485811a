"""Federated averaging.

    client:  w ← w − η ∇f_i(w; batch), from w = w^t
    server:  w^{t+1} = w^t − Σ_i n_i (w^t − w_i) / Σ_i n_i

One step of all clients with the full batch is gradient descent on the mean loss of all samples.
"""

from __future__ import annotations

from typing import Unpack

from partita.algorithms.base import Common, Lr, compose, method, settings
from partita.algorithms.local.sgd import together
from partita.core.parts import Algorithm
from partita.optim.rates import as_rate


@method(
    paper="Federated averaging: McMahan et al., Communication-Efficient Learning of Deep Networks (2017)",
    use="Use it when clients resemble each other, and as the model to beat when they do not.",
)
def fedavg(lr: Lr, **options: Unpack[Common]) -> Algorithm:
    """One global model: local SGD, then the mean."""
    common, eta = settings(options), as_rate(lr)
    return compose(lambda problem: together(problem, eta, common.optimizer), common)
