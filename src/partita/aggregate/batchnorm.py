"""Statistics that layers keep, such as BatchNorm's, beside parameters.

    a mean:           their mean, as for parameters
    any other rule:   their coordinate median; the rule itself sees the parameters alone

A variance is small and positive. What a minority can always do to a vector as a whole, move it by about the
distance between honest clients, would be enough to make one negative.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from partita.aggregate.coordinate_median import coordinate_median
from partita.core.parts import Aggregator, Combined
from partita.core.types import Tensors


def with_statistics(aggregator: Aggregator, names: Sequence[str]) -> Aggregator:
    """Return the aggregator on all tensors but these statistics, which are combined as said above."""
    if aggregator.linear or not names:
        return aggregator
    median, apart = coordinate_median(), set(names)

    def combine(deltas: Tensors, weight: Tensor, key: Tensor) -> Combined:
        parts = [{k: v for k, v in deltas.items() if (k in apart) is kept} for kept in (False, True)]
        parameters, notes = aggregator.combine(parts[0], weight, key)
        combined = {**parameters, **median.combine(parts[1], weight, key).delta}
        return Combined({k: combined[k] for k in deltas}, notes)

    return aggregator._replace(combine=combine)
