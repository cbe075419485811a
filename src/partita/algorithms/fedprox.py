"""FedProx: Li et al., *Federated Optimization in Heterogeneous Networks* (2020).

    client:  SGD on f_i(w) + (μ/2) ‖w − w^t‖²
    server:  the mean

μ = 0 is fedavg, bit for bit.
"""

from __future__ import annotations

from typing import Unpack

from partita import check
from partita.algorithms.base import Common, compose, method, rate, settings
from partita.local.sgd import together
from partita.types import Algorithm, Rate


@method
def fedprox(lr: float | Rate, mu: float, **options: Unpack[Common]) -> Algorithm:
    """One global model; a proximal term of weight `mu` keeps clients near it.

    Use it when clients do many local steps, or very different numbers of them.
    """
    common, eta = settings(options), rate("lr", lr)
    mu = check.number("mu", mu, low=0.0)
    return compose(lambda problem: together(problem, eta, common.optimizer, pull=mu), common)
