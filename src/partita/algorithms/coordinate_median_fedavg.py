"""Coordinate-wise median.

    client:  as fedavg
    server:  w^{t+1}_j = median_i (w_i)_j      every coordinate j for itself

It is fedavg with `aggregate=partita.aggregate.coordinate_median()`.
"""

from __future__ import annotations

from typing import Unpack

from partita.aggregate.coordinate_median import coordinate_median
from partita.algorithms.base import Common, Lr, having, method
from partita.algorithms.fedavg import fedavg
from partita.core.parts import Algorithm


@method(
    paper="Coordinate-wise median: Yin et al., Byzantine-Robust Distributed Learning (2018), with "
    "fedavg's clients",
    use="Use it when less than half of the clients may send anything, and single coordinates may be off.",
    weighting="uniform",
    without=("aggregate",),
)
def coordinate_median_fedavg(lr: Lr, **options: Unpack[Common]) -> Algorithm:
    """fedavg with the median of every coordinate in place of the mean."""
    return fedavg(lr, **having(options, aggregate=coordinate_median()))
