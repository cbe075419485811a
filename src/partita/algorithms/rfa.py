"""RFA.

    client:  as fedavg
    server:  w^{t+1} = argmin_z Σ_i n_i ‖z − w_i‖      the geometric median

It is fedavg with `aggregate=partita.aggregate.geometric_median()`, the smoothed Weiszfeld iteration.
"""

from __future__ import annotations

from typing import Unpack

from partita.aggregate.geometric_median import geometric_median
from partita.algorithms.base import Common, Lr, having, method
from partita.algorithms.fedavg import fedavg
from partita.core.parts import Algorithm


@method(
    paper="RFA: Pillutla, Kakade & Harchaoui, Robust Aggregation for Federated Learning (2022), Algorithm 1",
    use="Use it when a part of the clients, less than half by weight, may send anything.",
    without=("aggregate",),
)
def rfa(lr: Lr, **options: Unpack[Common]) -> Algorithm:
    """fedavg with the geometric median of the clients' models in place of their mean."""
    return fedavg(lr, **having(options, aggregate=geometric_median()))
