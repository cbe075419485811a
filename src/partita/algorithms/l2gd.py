"""L2GD.

    all clients toss one coin; with probability
    1 − p:   x_i ← x_i − α/(n (1 − p)) ∇f_i(x_i)              a local step
    p:       x_i ← x_i − α λ/(n p) (x_i − x̄)                  x̄ = mean of x_i

Only the first p after local steps needs communication. A round here is what lies between two meetings: the
pull to the received x̄, then the local steps until the coin says p again, a geometric number that is the same
for all clients (it may be 0). The run's own `steps` or `epochs` do not count; its `batch` does. n counts all
clients of the run. A round's pull is one p: a second p in a row is a round without local steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Unpack

from torch import Tensor

from partita.algorithms.base import Common, Lr, compose, method, settings
from partita.algorithms.local.pair import all_twice, everything
from partita.algorithms.local.sgd import Carry, finish, move, start
from partita.core import check, draws
from partita.core.options import Option, Range
from partita.core.parts import Algorithm, LocalRule, Phase, Problem, Rate
from partita.core.types import Batch, RoundContext, Work
from partita.optim.rates import as_rate, changed

ONCE = Work(steps=1, batch=1, shuffle=False)
"""The pull looks at no data; a client without data has no model to pull."""


def _inside(field: str, value: Any) -> float:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
    if not 0.0 < number < 1.0:
        raise check.fail(field, value, "a number above 0 and below 1")
    return float(number)


@method(
    paper="L2GD: Hanzely & Richtárik, Federated Learning of a Mixture of Global and Local Models "
    "(2020), Alg. 1",
    use="Use it to go from local models (λ = 0) to nearly one global model (large λ) with a single number.",
    weighting="uniform",
)
def l2gd(
    lr: Lr,
    lam: Annotated[
        float,
        Option(
            "λ, the weight of the distance between the clients' models",
            low=0,
            search=Range(0.01, 10.0, log=True),
        ),
    ] = 1.0,
    p: Annotated[
        float,
        Option(
            "the probability that a step is a pull to the mean: 1/p − 1 local steps in a round, on average",
            allowed="a number above 0 and below 1",
            check=_inside,
            search=Range(0.05, 0.95),
        ),
    ] = 0.2,
    **options: Unpack[Common],
) -> Algorithm:
    """Every client has its own model; λ says how much the models may differ."""
    common, eta = settings(options), as_rate(lr)

    def local(problem: Problem) -> LocalRule:
        n, step = problem.clients, move(problem, everything(problem), optimizer=common.optimizer)
        steps = Phase(
            step, (_over(eta, n * (1 - p)),), lambda now: replace(now.work, steps=tails(now, p), epochs=None)
        )
        pull = (Phase(_pull(problem), (_over(eta, n * p / lam),), lambda now: ONCE),) if lam else ()  # noqa: ARG005
        return LocalRule(start(problem, common.optimizer), (*pull, steps), finish(problem))

    reason = "all clients toss one coin in each round"
    return compose(local, common, partition=all_twice, synchronous_only=reason)


def tails(now: RoundContext, p: float) -> int:
    """How often the coin of this round says "local step" before it says p: the same for all clients."""
    assert isinstance(now.round, int)  # it is synchronous only
    return int(draws.generator(now.own_seed, "coin", now.round).geometric(p)) - 1


def _over(rate: Rate, number: float) -> Rate:
    return changed(rate, lambda rate, t, rounds: rate(t, rounds) / number)


def _pull(problem: Problem) -> Callable[[Carry, Batch, tuple[Tensor, ...]], Carry]:
    """x_i ← x_i − α λ/(n p) (x_i − x̄), where x̄ was received."""

    def step(carry: Carry, batch: Batch, lr: tuple[Tensor, ...]) -> Carry:  # noqa: ARG001
        x, mean = carry.params, carry.received
        moving = [k for k in problem.trainable if k in mean]
        return carry._replace(
            params={**x, **{k: x[k] - lr[0].to(x[k].dtype) * (x[k] - mean[k]) for k in moving}}
        )

    return step
