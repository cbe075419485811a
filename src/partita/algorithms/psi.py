"""Penalties of Fed+: Kundu et al., *Robustness and Personalization in Federated Learning* (2022), section 4.

    name     Ψ(θ)            θ = prox_{Ψ/σ}(x) = argmin_θ Ψ(θ)/σ + ½‖x − θ‖²      aggregator 𝒜
    avg      (σδ/2) ‖θ‖₂²    x / (1 + δ)                                          mean
    geomed   σδ ‖θ‖₂         max(0, 1 − δ/‖x‖₂) x                                 δ-smoothed geometric median
    comed    σδ ‖θ‖₁         sign(x) max(0, |x| − δ)                              δ-smoothed coordinate median
    free     0               x                                                    mean
    fixed    0 at 0, else ∞  0                                                    mean
    penalty  any convex Ψ    what you give                                        by iteration, Equation (13)

    𝒜(w_1, ..., w_N) = argmin_w Σ_k min_θ [Ψ(θ)/σ + ½‖w_k − w − θ‖²]

A penalty on θ_k = w_k − w̃ says both how far a client may be from the others at no charge, and what "the
others" are: the aggregator is the w̃ that the penalty charges least. Ψ grows with σ, so the proximal maps
depend on δ alone. (12) of the paper as printed drops negative entries; here is the soft threshold it means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from partita import aggregate
from partita.aggregate.smoothed import Iterations, Tolerance, proximal_center
from partita.core import check, tree
from partita.core.options import Option, Range, checked
from partita.core.parts import Aggregator
from partita.core.patterns import by_pattern
from partita.core.types import Tensors

__all__ = ["avg", "comed", "fixed", "free", "geomed", "layerwise", "penalty"]

Delta = Annotated[
    float,
    Option("δ: how much the penalty weighs", low=0, open_low=True, search=Range(0.01, 10.0, log=True)),
]
Radius = Annotated[
    float,
    Option(
        "δ: clients closer to the aggregate than this are treated as equal to it",
        low=0,
        open_low=True,
        search=Range(0.01, 10.0, log=True),
    ),
]


class Penalty(NamedTuple):
    """Ψ: its proximal map over all given names together, and the aggregator that belongs to it.

    `value` is Ψ(θ)/σ, where it is finite, for `partita.measures.fedplus_objective` (None: it is not known).
    """

    name: str
    prox: Callable[[Tensors], Tensors]
    aggregator: Aggregator
    options: Mapping[str, Any]
    value: Callable[[Tensors], Tensor] | None = None

    def __repr__(self) -> str:
        return f"pt.psi.{self.name}({', '.join(f'{k}={v!r}' for k, v in self.options.items())})"


@checked()
def avg(delta: Delta = 0.1) -> Penalty:
    """Ψ = (σδ/2)‖θ‖₂²: every client is drawn to the mean, by the same share of its distance.

    Use it where no client is an outlier: it is the cheapest, and it has no threshold to choose.
    """

    def prox(x: Tensors) -> Tensors:
        return {k: v / (1 + delta) for k, v in x.items()}

    def value(theta: Tensors) -> Tensor:
        return delta / 2 * tree.norm(theta) ** 2

    return Penalty("avg", prox, aggregate.mean(), {"delta": delta}, value)


@checked()
def geomed(delta: Radius = 0.1, tolerance: Tolerance = 1e-6, iterations: Iterations = 1000) -> Penalty:
    """Ψ = σδ‖θ‖₂: within δ of the geometric median a client is as the others; beyond it the pull is constant.

    Use it where some clients are outliers as a whole.
    """

    def prox(x: Tensors) -> Tensors:
        scale = 1 - delta / tree.norm(x).clamp(min=delta)  # max(0, 1 − δ/‖x‖), and no 0/0 at x = 0
        return {k: scale.to(v.dtype) * v for k, v in x.items()}

    median = aggregate.smoothed_geometric_median(delta, tolerance, iterations)
    options = {"delta": delta, "tolerance": tolerance, "iterations": iterations}
    return Penalty("geomed", prox, median, options, lambda theta: delta * tree.norm(theta))


@checked()
def comed(delta: Radius = 0.1, tolerance: Tolerance = 1e-6, iterations: Iterations = 1000) -> Penalty:
    """Ψ = σδ‖θ‖₁: as geomed, for each coordinate on its own.

    Use it where clients are outliers in some coordinates, or to keep the personal differences few.
    """

    def prox(x: Tensors) -> Tensors:
        return {k: v - v.clamp(-delta, delta) for k, v in x.items()}  # sign(x) max(0, |x| − δ)

    median = aggregate.smoothed_coordinate_median(delta, tolerance, iterations)
    options = {"delta": delta, "tolerance": tolerance, "iterations": iterations}

    def value(theta: Tensors) -> Tensor:
        return delta * torch.stack([v.abs().sum() for v in theta.values()]).sum()

    return Penalty("comed", prox, median, options, value)


@checked()
def free() -> Penalty:
    """Ψ = 0: any difference is free, so every client ends at its own minimum (Corollary 1a).

    Use it to see what the pull to the others is worth.
    """
    return Penalty("free", dict, aggregate.mean(), {}, nothing)


@checked()
def fixed() -> Penalty:
    """Ψ = ∞ but at 0: no difference is allowed, θ = 0; with λ = 1 it is FedProx (Corollary 1b).

    Use it for the strongest pull: straight to the mean.
    """
    return Penalty("fixed", tree.zeros_like, aggregate.mean(), {}, nothing)


def nothing(theta: Tensors) -> Tensor:
    """Return zero, in the type and on the device of θ: what is allowed costs nothing."""
    return 0 * tree.norm(theta)


PROX = "a function of {name: tensor} that returns such a mapping, of the same names and shapes"
VALUE = "a function of {name: tensor} that returns a tensor of one number"


def _function(allowed: str) -> Callable[[str, Any], Any]:
    return lambda field, value: check.takes(field, value, 1, allowed)


@checked()
def penalty(
    prox: Annotated[
        Callable[[Tensors], Tensors],
        Option(
            "prox_{Ψ/σ}: from a client's difference to its θ, written for one client, for all names together",
            allowed=PROX,
            check=_function(PROX),
            example=tree.zeros_like,
        ),
    ],
    value: Annotated[
        Callable[[Tensors], Tensor] | None,
        Option("Ψ(θ)/σ, to measure the objective (None: it cannot be)", allowed=VALUE),
    ] = None,
    tolerance: Annotated[
        float, Option("the last step of size 1, as a share of the mean pull of the clients", low=0)
    ] = 1e-6,
    iterations: Iterations = 1000,
) -> Penalty:
    """Any convex Ψ by its proximal map: the aggregator that belongs to it follows from the map.

    The server iterates w̃ ← mean w_k − mean prox(w_k − w̃) (Equation 13), with larger steps where they go well,
    and warns where `iterations` do not suffice. As far as it has found the aggregate, the theory holds.

    Use it for a penalty of your own, such as one that lets clients shift a layer but not reshape it.
    """
    options = {"prox": prox, "value": value, "tolerance": tolerance, "iterations": iterations}
    return Penalty("penalty", prox, proximal_center(prox, tolerance, iterations), options, value)


def _penalties(field: str, value: Any) -> dict[str, Penalty]:
    good = isinstance(value, Mapping) and value
    if not good or not all(isinstance(k, str) and isinstance(v, Penalty) for k, v in value.items()):
        raise check.fail(field, value, PENALTIES)
    return dict(value)


PENALTIES = "name patterns with their penalties, such as {'conv*': pt.psi.avg(0.1), '*': pt.psi.comed(0.01)}"


@checked()
def layerwise(
    penalties: Annotated[
        Mapping[str, Penalty],
        Option(
            "a penalty for each pattern of parameter names; the first that matches counts",
            allowed=PENALTIES,
            check=_penalties,
            example={"hidden*": avg(0.1), "*": comed(0.01)},
        ),
    ],
) -> Penalty:
    """A sum of penalties, each on its own layers with its own δ: the hybrids of section 4.4.1.

    Use it to hold early layers together (`avg`) and let the last ones differ (`comed`).
    """

    def prox(x: Tensors) -> Tensors:
        theta: Tensors = {}
        for pattern, names in groups(x, penalties).items():
            theta |= penalties[pattern].prox(tree.pick(x, names))
        return tree.pick(theta, x)

    def value(theta: Tensors) -> Tensor:
        parts = groups(theta, penalties).items()
        return torch.stack([valued(penalties[p])(tree.pick(theta, names)) for p, names in parts]).sum()

    combine = aggregate.layerwise({pattern: p.aggregator for pattern, p in penalties.items()})
    known = all(p.value is not None for p in penalties.values())
    return Penalty("layerwise", prox, combine, {"penalties": penalties}, value if known else None)


def valued(psi: Penalty) -> Callable[[Tensors], Tensor]:
    """Return Ψ/σ, or refuse a penalty that does not say it."""
    if psi.value is None:
        raise check.fail("psi", psi, "a penalty with a value, such as pt.psi.penalty(prox, value=...)")
    return psi.value


def groups(names: Iterable[str], patterns: Mapping[str, Any]) -> dict[str, list[str]]:
    """The names of each pattern, the first that matches; a name without one is refused."""

    def refuse(name: str) -> ValueError:
        return check.fail("penalties", patterns, f"a pattern for {name}; '*' at the end matches the rest")

    return by_pattern(names, patterns, refuse)


def covers(psi: Penalty, names: Iterable[str]) -> None:
    """Refuse names that the penalty says nothing about, before any work."""
    psi.prox(dict.fromkeys(names, torch.zeros(())))
