"""Learning rates over the rounds of a stage: (round, rounds) -> step size.

Every `lr` of a method is a number or one of these. Within a round the rate is constant, unless it is one
`by_step` or `within_round`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Annotated, Any

from partita.core import check
from partita.core.options import Option, called, checked
from partita.core.parts import Rate, StepRate

Lr = Annotated[float, Option("η, the step size to begin with", low=0, open_low=True, example=0.1)]
Largest = Annotated[float, Option("η, the largest step size", low=0, open_low=True, example=0.1)]
Warmup = Annotated[float, Option("the share of the rounds that warm up", low=0, high=1)]


def _rounds(field: str, value: Sequence[int]) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise check.fail(field, value, "a list of whole numbers from 0")
    return tuple(check.integer(field, v, low=0) for v in value)


class Written:
    """A rate that is printed as one writes it."""

    def __repr__(self) -> str:
        values = [(f, getattr(self, f.name)) for f in fields(self)]  # type: ignore[arg-type]
        options = ", ".join(f"{f.name}={value!r}" for f, value in values if value != f.default)
        return f"pt.optim.{called(type(self))}({options})"


# ---- by round


@dataclass(frozen=True, repr=False)
class Constant(Written):
    """The same step size in every round."""

    lr: Annotated[float, Option("η, the step size", low=0, example=0.1)]

    def __call__(self, t: int, rounds: int) -> float:  # noqa: ARG002
        """η_t = η."""
        return self.lr


@dataclass(frozen=True, repr=False)
class Linear(Written):
    """Linear warm-up over the share `warmup` of the rounds, then linear decay to 0."""

    lr: Largest
    warmup: Warmup = 0.1

    def __call__(self, t: int, rounds: int) -> float:
        """η (T − t) / (T − T_warm) after the warm-up: η at its end, 0 one step after the last round."""
        rise = self.warmup * rounds
        if t < rise:
            return self.lr * (t + 1) / (rise + 1)
        return self.lr * (rounds - t) / max(rounds - rise, 1.0)


@dataclass(frozen=True, repr=False)
class Cosine(Written):
    """Linear warm-up over the share `warmup` of the rounds, then half a cosine down to `final` of η.

    Use it by step, `by_step(cosine(...))`, where transformers are fine-tuned.
    """

    lr: Largest
    warmup: Warmup = 0.1
    final: Annotated[float, Option("the share of η that is left after the last round", low=0, high=1)] = 0.0

    def __call__(self, t: int, rounds: int) -> float:
        """η (φ + (1 − φ) (1 + cos(π (t − T_warm) / (T − T_warm))) / 2) after the warm-up."""
        rise = self.warmup * rounds
        if t < rise:
            return self.lr * (t + 1) / (rise + 1)
        done = min((t - rise) / max(rounds - rise, 1.0), 1.0)
        return self.lr * (self.final + (1 - self.final) * (1 + math.cos(math.pi * done)) / 2)


@dataclass(frozen=True, repr=False)
class Halving(Written):
    """Half the step size after each `every` rounds."""

    lr: Lr
    every: Annotated[int, Option("after how many rounds the step size is halved", low=1, example=10)]

    def __call__(self, t: int, rounds: int) -> float:  # noqa: ARG002
        """η_t = η · 2^(−⌊t / every⌋)."""
        return float(self.lr * 0.5 ** (t // self.every))


@dataclass(frozen=True, repr=False)
class Stepped(Written):
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


# ---- by step


RATE = "a rate such as partita.optim.cosine(0.1), or a function of (step, steps)"


def _by_round(field: str, value: Any) -> Rate:
    if isinstance(value, StepRate):
        raise check.fail(field, value, f"{RATE}: this one goes by step already")
    return check.takes(field, value, 2, RATE)  # type: ignore[no-any-return]


OverSteps = Annotated[
    Rate,
    Option("the rate, whose rounds are steps", allowed=RATE, check=_by_round, example=Cosine(0.1)),
]


@dataclass(frozen=True, repr=False)
class ByStep(Written, StepRate):
    """A rate that goes on from local step to local step: each of them is what a round is to the rate.

    A client that takes S steps in each of T rounds has T·S of them; in step s of round t, the rate is that of
    round t·S + s of T·S. Warm-up and decay are then those of one training of T·S steps, as with schedulers of
    torch that are called after each step. Where S differs between clients, each follows its own, so that all
    reach the end together. S counts the steps of a phase (such as the personal ones of fedalt) that a client
    is to take; a straggler takes the first of them.

    Use it with cosine or linear where rounds are few and long.
    """

    rate: OverSteps

    def at(self, t: int, rounds: int, step: int, steps: int) -> float:
        """η(t S + s, T S)."""
        return self.rate(t * steps + step, rounds * steps)


@dataclass(frozen=True, repr=False)
class WithinRound(Written, StepRate):
    """A rate that begins anew in every round: its rounds are the local steps of one round.

    Use it for a warm-up in each round, where the optimizer begins anew, too.
    """

    rate: OverSteps

    def at(self, t: int, rounds: int, step: int, steps: int) -> float:  # noqa: ARG002
        """η(s, S)."""
        return self.rate(step, steps)


constant, linear, cosine = checked()(Constant), checked()(Linear), checked()(Cosine)
halving, stepped = checked()(Halving), checked()(Stepped)
by_step, within_round = checked()(ByStep), checked()(WithinRound)


# ---- rates made of others


@dataclass(frozen=True)
class _Changed(StepRate):
    rate: StepRate
    change: Callable[[Rate, int, int], float]

    def at(self, t: int, rounds: int, step: int, steps: int) -> float:
        return self.change(lambda t, rounds: self.rate.at(t, rounds, step, steps), t, rounds)


def changed(rate: Rate, change: Callable[[Rate, int, int], float]) -> Rate:
    """Return the rate (t, rounds) -> change(rate, t, rounds); one by step is still one by step."""
    if isinstance(rate, StepRate):
        return _Changed(rate, change)
    return lambda t, rounds: change(rate, t, rounds)


def until_the_end(rate: Rate) -> Rate:
    """After the last round, when clients are evaluated, the rate is still that of the last round."""
    return changed(rate, lambda rate, t, rounds: rate(min(t, rounds - 1), rounds))


def as_rate(lr: float | Rate) -> Rate:
    """A number becomes a constant rate; a rate stays what it is."""
    if getattr(lr, "__module__", None) == __name__ and not is_dataclass(lr):  # linear instead of linear(0.1)
        raise check.fail("lr", lr, "a number from 0, or a rate such as partita.optim.linear(0.1)")
    return lr if callable(lr) else Constant(lr)


def size_of(rate: Any) -> float | None:
    """Return the size η of a rate of this module, whatever its course; None for any other."""
    if isinstance(rate, ByStep | WithinRound):
        return size_of(rate.rate)
    return rate.lr if isinstance(rate, Written) else None  # type: ignore[attr-defined]


def with_size(rate: Any, lr: float) -> Any:
    """Return the rate of the same course with another size."""
    if isinstance(rate, ByStep | WithinRound):
        return replace(rate, rate=with_size(rate.rate, lr))
    return replace(rate, lr=lr)
