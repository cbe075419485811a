"""Learning rates over the rounds of a stage: (round, rounds) -> step size.

Every `lr` of a method is a number or one of these. Within a round the rate is constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from partita import check
from partita.types import Rate


@dataclass(frozen=True)
class Constant:
    """η_t = η."""

    lr: float

    def __call__(self, t: int, rounds: int) -> float:  # noqa: ARG002
        return self.lr


@dataclass(frozen=True)
class Linear:
    """Linear warm-up to η over a share of the rounds, then linear decay to 0."""

    lr: float
    warmup: float

    def __call__(self, t: int, rounds: int) -> float:
        rise = self.warmup * rounds
        if t < rise:
            return self.lr * (t + 1) / (rise + 1)
        # η (T − t) / (T − T_warm): η at the end of the warm-up, 0 one step after the last round
        return self.lr * (rounds - t) / max(rounds - rise, 1.0)


@dataclass(frozen=True)
class Halving:
    """η_t = η · 2^(−⌊t / every⌋)."""

    lr: float
    every: int

    def __call__(self, t: int, rounds: int) -> float:  # noqa: ARG002
        return float(self.lr * 0.5 ** (t // self.every))


@dataclass(frozen=True)
class Stepped:
    """η_t = η · factor^(number of `at` rounds that have passed)."""

    lr: float
    at: tuple[int, ...]
    factor: float

    def __call__(self, t: int, rounds: int) -> float:  # noqa: ARG002
        return float(self.lr * self.factor ** sum(t >= a for a in self.at))


def constant(lr: float) -> Constant:
    """The same step size in every round."""
    return Constant(check.number("lr", lr, low=0.0))


def linear(lr: float, warmup: float = 0.1) -> Linear:
    """Linear warm-up over the share `warmup` of the rounds, then linear decay to 0."""
    return Linear(
        check.number("lr", lr, low=0.0, open_low=True), check.number("warmup", warmup, low=0.0, high=1.0)
    )


def halving(lr: float, every: int) -> Halving:
    """Half the step size after each `every` rounds."""
    return Halving(check.number("lr", lr, low=0.0, open_low=True), check.integer("every", every, low=1))


def stepped(lr: float, at: Sequence[int], factor: float = 0.1) -> Stepped:
    """Times `factor` at each of the given rounds."""
    rounds = tuple(check.integer("at", a, low=0) for a in at)
    return Stepped(
        check.number("lr", lr, low=0.0, open_low=True),
        rounds,
        check.number("factor", factor, low=0.0, open_low=True),
    )


def as_rate(field: str, value: Any) -> Rate:
    """A number becomes a constant rate; a rate stays what it is."""
    if isinstance(value, Constant | Linear | Halving | Stepped):
        return value
    if callable(value):
        return value  # type: ignore[no-any-return]
    return Constant(check.number(field, value, low=0.0))
