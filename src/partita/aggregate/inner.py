"""Aggregators of aggregators: what they are given, and how they pass on what they made of the deltas."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from partita.aggregate.coordinate_median import coordinate_median
from partita.aggregate.stack import Stack, mixed, restored
from partita.core.options import Option
from partita.core.parts import Aggregator, Combined


class Written(Aggregator):
    """An aggregator that is printed as one writes it, for the examples of `partita show`."""

    def __repr__(self) -> str:
        options = ", ".join(f"{k}={v!r}" for k, v in self.options.items())
        return f"pt.aggregate.{self.name}({options})"


ALLOWED = "an aggregator such as partita.aggregate.coordinate_median()"
Inner = Annotated[
    Aggregator,
    Option("what is done with the result", allowed=ALLOWED, example=Written(*coordinate_median())),
]


def inside(inner: Aggregator, stack: Stack, mixing: Tensor, weight: Tensor, key: Tensor) -> Combined:
    """Apply the inner aggregator to mixtures of the rows; its notes begin with `inner.`.

    Mixtures of counters are not whole: they are rounded once, at the end.
    """
    done = inner.combine(mixed(stack, mixing), weight, key)
    delta = {k: restored(v, stack.deltas[k]) for k, v in done.delta.items()}
    return Combined(delta, {f"inner.{k}": v for k, v in done.notes.items()})
