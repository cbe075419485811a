"""Learning rates over the rounds of a stage: (round, rounds) -> step size.

Every `lr` of a method is a number or one of these. Within a round the rate is constant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Annotated

from partita.core import check
from partita.core.options import Option, checked
from partita.core.parts import Rate

Lr = Annotated[float, Option("η, the step size to begin with", low=0, open_low=True, example=0.1)]


def _rounds(field: str, value: Sequence[int]) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise check.fail(field, value, "a list of whole numbers from 0")
    return tuple(check.integer(field, v, low=0) for v in value)


@dataclass(frozen=True)
class Constant:
    """The same step size in every round."""

    lr: Annotated[float, Option("η, the step size", low=0, example=0.1)]

    def __call__(self, t: int, rounds: int) -> float:  # noqa: ARG002
        """η_t = η."""
        return self.lr


@dataclass(frozen=True)
class Linear:
    """Linear warm-up over the share `warmup` of the rounds, then linear decay to 0."""

    lr: Annotated[float, Option("η, the largest step size", low=0, open_low=True, example=0.1)]
    warmup: Annotated[float, Option("the share of the rounds that warm up", low=0, high=1)] = 0.1

    def __call__(self, t: int, rounds: int) -> float:
        """η (T − t) / (T − T_warm) after the warm-up: η at its end, 0 one step after the last round."""
        rise = self.warmup * rounds
        if t < rise:
            return self.lr * (t + 1) / (rise + 1)
        return self.lr * (rounds - t) / max(rounds - rise, 1.0)


@dataclass(frozen=True)
class Halving:
    """Half the step size after each `every` rounds."""

    lr: Lr
    every: Annotated[int, Option("after how many rounds the step size is halved", low=1, example=10)]

    def __call__(self, t: int, rounds: int) -> float:  # noqa: ARG002
        """η_t = η · 2^(−⌊t / every⌋)."""
        return float(self.lr * 0.5 ** (t // self.every))


@dataclass(frozen=True)
class Stepped:
    """Times `factor` at each of the given rounds."""

    lr: Lr
    at: Annotated[
        Sequence[int],
        Option("the rounds that change it", allowed="whole numbers from 0", check=_rounds, example=[10, 15]),
    ]
    factor: Annotated[float, Option("what it is multiplied with", low=0, open_low=True)] = 0.1

    def __call__(self, t: int, rounds: int) -> float:  # noqa: ARG002
        """η_t = η · factor^(number of `at` rounds that have passed)."""
        return float(self.lr * self.factor ** sum(t >= a for a in self.at))


constant, linear = checked()(Constant), checked()(Linear)
halving, stepped = checked()(Halving), checked()(Stepped)


def until_the_end(rate: Rate) -> Rate:
    """After the last round, when clients are evaluated, the rate is still that of the last round."""
    return lambda t, rounds: rate(min(t, rounds - 1), rounds)


def as_rate(lr: float | Rate) -> Rate:
    """A number becomes a constant rate; a rate stays what it is."""
    if getattr(lr, "__module__", None) == __name__ and not is_dataclass(lr):  # linear instead of linear(0.1)
        raise check.fail("lr", lr, "a number from 0, or a rate such as partita.optim.linear(0.1)")
    return lr if callable(lr) else Constant(lr)
