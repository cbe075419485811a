"""A measure as a program that clients run, like an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from partita.algorithms.partition import split
from partita.core import check
from partita.core.parts import Algorithm, LocalRule, Measure, Program
from partita.core.types import Partition


def measured_split(
    measure: Measure, partition: Partition, model: nn.Module, names: Sequence[str]
) -> Partition:
    """Return the split that a measure looks at; refuse one that the method's own contradicts."""
    if measure.own:
        return partition
    if measure.personal is None:  # what is shared and kept as a copy too is shared
        shared = set(partition.shared)
        return Partition(partition.shared, tuple(k for k in partition.personal if k not in shared))
    wanted = split(model, names, measure.personal)
    missing = [k for k in wanted.shared if k not in partition.shared]
    if missing:
        raise check.fail(
            f"measure {measure.name} personal",
            measure.personal,
            f"a split whose shared part is shared by the method too ({missing[0]} is not)",
        )
    return wanted


def measure_program(measure: Measure, partition: Partition, method: Algorithm) -> Program:
    """Return the measure's rule on its own split of the model."""

    def build(problem: Any) -> LocalRule:
        return measure.client(replace(problem, partition=partition), method)

    return Program(f"measure {measure.name}", build, whole_model=True)
