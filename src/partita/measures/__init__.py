"""What a run can follow beside scores: `federate(..., measures=[partita.measures.gradient_norm()])`."""

from partita.measures.aggregation_change import aggregation_change
from partita.measures.line_loss import line_loss

__all__ = ["aggregation_change", "line_loss"]
