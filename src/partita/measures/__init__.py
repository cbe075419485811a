"""What a run can follow beside scores: `federate(..., measures=[partita.measures.gradient_norm()])`."""

from partita.measures.aggregation_change import aggregation_change
from partita.measures.fedplus_objective import fedplus_objective
from partita.measures.gradient_inversion import gradient_inversion
from partita.measures.gradient_norm import gradient_norm
from partita.measures.line_loss import line_loss
from partita.measures.membership import membership
from partita.measures.svcca import svcca

__all__ = [
    "aggregation_change",
    "fedplus_objective",
    "gradient_inversion",
    "gradient_norm",
    "line_loss",
    "membership",
    "svcca",
]
