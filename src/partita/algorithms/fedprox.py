"""FedProx.

    client:  SGD on f_i(w) + (μ/2) ‖w − w^t‖²
    server:  the mean

μ = 0 is fedavg, bit for bit.
"""

from __future__ import annotations

from typing import Annotated, Unpack

from partita.algorithms.base import Common, Lr, compose, method, settings
from partita.algorithms.local.sgd import together
from partita.core.options import Option, Range
from partita.core.parts import Algorithm
from partita.optim.rates import as_rate


@method(
    paper="FedProx: Li et al., Federated Optimization in Heterogeneous Networks (2020)",
    use="Use it when clients do many local steps, or very different numbers of them.",
)
def fedprox(
    lr: Lr,
    mu: Annotated[
        float,
        Option("μ, the weight of the pull to the global model", low=0, search=Range(1e-3, 1.0, log=True)),
    ] = 0.1,
    **options: Unpack[Common],
) -> Algorithm:
    """One global model; a proximal term of weight `mu` keeps clients near it."""
    common, eta = settings(options), as_rate(lr)
    return compose(lambda problem: together(problem, eta, common.optimizer, pull=mu), common)
