"""Layerwise: the hybrids of Kundu et al., *Robustness and Personalization in Federated Learning* (2022).

    Δ[L_p] = aggregator_p(Δ_1[L_p], ..., Δ_n[L_p])   for every pattern p

L_p are the names that p is the first pattern to match; they are handled together, as one vector.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from torch import Tensor

from partita.aggregate.coordinate_median import coordinate_median
from partita.aggregate.inner import Written
from partita.aggregate.mean import mean
from partita.aggregate.stack import aggregator
from partita.core import check, draws, tree
from partita.core.options import Option
from partita.core.parts import Aggregator, Combined
from partita.core.patterns import by_pattern
from partita.core.types import Tensors

ALLOWED = "a dictionary from patterns of names to aggregators"


class _Example(dict[str, Aggregator]):
    """Printed with double quotes, which do not end the single ones of a shell."""

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{json.dumps(k)}: {v!r}' for k, v in self.items())}}}"


def _checked(field: str, value: Any) -> dict[str, Aggregator]:
    if not isinstance(value, Mapping) or not value or not all(isinstance(k, str) for k in value):
        raise check.fail(field, value, ALLOWED)
    for pattern, inner in value.items():
        if not isinstance(inner, Aggregator):
            raise check.fail(f"{field}[{pattern!r}]", inner, "an aggregator such as partita.aggregate.mean()")
    return dict(value)


Patterns = Annotated[
    dict[str, Aggregator],
    Option(
        "which names (* and ? stand for any characters) go to which aggregator; the first match counts",
        allowed=ALLOWED,
        check=_checked,
        example=_Example({"*.bias": Written(*mean()[:3]), "*": Written(*coordinate_median()[:3])}),
    ),
]


@aggregator
def layerwise(patterns: Patterns) -> Aggregator:
    """Another aggregator for every group of names.

    Use it when layers differ: a robust aggregator for some of them, the mean for the others.
    """

    def combine(deltas: Tensors, weight: Tensor, key: Tensor) -> Combined:
        delta: Tensors = {}
        notes: Tensors = {}
        for pattern, names in _groups(list(deltas), patterns).items():
            branch = key if len(patterns) == 1 else draws.branch(key, pattern)  # repeats no other's draws
            done = patterns[pattern].combine(tree.pick(deltas, names), weight, branch)
            delta |= done.delta
            notes |= {f"{pattern}.{k}": v for k, v in done.notes.items()}
        return Combined(tree.pick(delta, deltas), notes)

    linear = all(inner.linear for inner in patterns.values())
    return Aggregator("layerwise", combine, {"patterns": patterns}, linear)


def _groups(names: list[str], patterns: Mapping[str, Aggregator]) -> dict[str, list[str]]:
    """Return the names of each pattern that has any; refuse a name without a pattern."""

    def refuse(name: str) -> ValueError:
        listed = ", ".join(map(repr, patterns))
        return check.fail(
            "aggregate name", name, f"one that matches {listed}; the pattern '*' takes the rest"
        )

    return by_pattern(names, patterns, refuse)
