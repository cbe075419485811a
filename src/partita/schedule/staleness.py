"""How much a stale delta counts: Xie et al., *Asynchronous Federated Optimization* (2019), section 5.2.

    x ← x − β · Σ_k n_k s(τ_k) Δ_k / Σ_k n_k      τ_k: server steps since client k downloaded

    constant     s(τ) = 1
    sqrt         s(τ) = (1 + τ)^(−1/2)                            FedBuff: Nguyen et al. (2022)
    inverse      s(τ) = (1 + τ)^(−1)
    polynomial   s(τ) = (1 + τ)^(−a)
    hinge        s(τ) = 1 for τ ≤ b, else 1 / (a (τ − b) + 1)

Staleness scales the delta and the samples weight it, so the two never cancel: a buffer of equally stale
deltas moves x by s(τ) times their mean. The hinge is also written without the + 1; then it jumps after b, and
even above 1 where a (τ − b) < 1. With it, s falls from 1 without a jump.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from partita.core import check
from partita.core.options import Option, checked

Staleness = Callable[[int], float]
"""τ -> s(τ)."""


@checked()
@dataclass(frozen=True)
class Polynomial:
    """s(τ) = (1 + τ)^(−a): a fresh delta counts in full, and an older one less and less.

    Use it when all clients are late now and then.
    """

    a: Annotated[float, Option("how fast a delta loses weight with its age", low=0, example=0.5)]

    def __call__(self, tau: int) -> float:
        return float((1 + tau) ** -self.a)


@checked()
@dataclass(frozen=True)
class Hinge:
    """s(τ) = 1 up to the age b, then 1 / (a (τ − b) + 1).

    Use it when most deltas are about as old as each other, and only stragglers should count less.
    """

    a: Annotated[float, Option("how fast a delta loses weight beyond b", low=0, open_low=True, example=10.0)]
    b: Annotated[float, Option("the age up to which a delta counts in full", low=0, example=4.0)]

    def __call__(self, tau: int) -> float:
        return 1.0 if tau <= self.b else 1.0 / (self.a * (tau - self.b) + 1.0)


polynomial, hinge = Polynomial, Hinge

NAMED: dict[str, Staleness] = {
    "constant": Polynomial(0.0),
    "sqrt": Polynomial(0.5),
    "inverse": Polynomial(1.0),
}
ALLOWED = "a staleness such as partita.schedule.polynomial(0.5)"


def as_staleness(field: str, value: Any) -> Staleness:
    """Return s from a name, one of the classes above or a function of τ; None is constant."""
    if value is None:
        return NAMED["constant"]
    if isinstance(value, str) and value in NAMED:
        return NAMED[value]
    if callable(value):
        discount: Staleness = check.takes(field, value, 1, ALLOWED)
        return discount
    names = ", ".join(map(repr, NAMED))
    raise check.fail(field, value, f"one of {names}{check.meant(value, NAMED)}, or {ALLOWED}")


def checked_staleness(field: str, value: Any) -> Any:
    """Return the value as it was given, if `as_staleness` takes it."""
    as_staleness(field, value)
    return value


def _option(default: str) -> Option:
    text = f"s(τ), how much a delta counts that is τ server steps old (None: {default})"
    return Option(text, choices=tuple(NAMED), allowed=ALLOWED, check=checked_staleness)


OfMethod = Annotated[str | Staleness | None, _option("'constant'")]
OfSchedule = Annotated[str | Staleness | None, _option("as the method wants, or 'constant'")]
