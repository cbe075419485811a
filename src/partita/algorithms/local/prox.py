"""Steps on the Moreau envelope: T. Dinh et al., *Personalized FL with Moreau Envelopes* (2020).

F(w)   = min_θ f(θ) + (λ/2) ‖θ − w‖²
∇F(w)  = λ (w − θ̃),   θ̃ ≈ the minimizer, by gradient steps on a minibatch from θ = w
w      ← w − η λ (w − θ̃)

The client's optimizer takes the inner steps along ∇f̃(θ) + λ (θ − w), which is clipped before; its state
begins anew with every new θ̃. BatchNorm statistics follow the inner passes, for both w and θ̃.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from partita.algorithms.local import sgd
from partita.algorithms.local.pair import Pair, add, everything
from partita.algorithms.local.sgd import Carry
from partita.core import tree
from partita.core.parts import LocalRule, Optimizer, Phase, Problem, Rate
from partita.core.types import Batch, Tensors


class Solve(Protocol):
    """(w, batch, inner step size) -> θ̃ with its statistics, and f̃ where the steps begin (None: at w)."""

    def __call__(
        self, w: Tensors, batch: Batch, lr: Tensor, begin: Tensors | None = None
    ) -> tuple[Tensors, Tensor]: ...


class Inner(NamedTuple):
    """θ, and the state of the optimizer that finds θ̃."""

    theta: Tensors
    opt: Tensors


def proximal(
    problem: Problem, lam: float, steps: int, optimizer: Optimizer, nu: float | None = None
) -> Solve:
    """At most `steps` gradient steps; with `nu`, θ stays where ‖∇f̃(θ) + λ (θ − w)‖ ≤ ν."""
    moving = problem.trainable

    def solve(w: Tensors, batch: Batch, lr: Tensor, begin: Tensors | None = None) -> tuple[Tensors, Tensor]:
        losses: list[Tensor] = []

        def step(inner: Inner) -> tuple[Inner, Tensor | None]:
            theta = inner.theta
            loss, g, buffers = problem.grad(theta, batch, wrt=moving)
            losses.append(loss)
            h = {k: v + lam * (theta[k] - w[k]) for k, v in g.items()}
            new, opt = optimizer.update(theta, h, inner.opt, dict.fromkeys(moving, lr))
            done = None if nu is None else tree.norm(h) <= nu  # what is not a number goes on, and shows
            return Inner({**theta, **new, **buffers}, opt), done

        first = Inner(w if begin is None else begin, optimizer.init(tree.pick(w, moving)))
        theta: Tensors = problem.repeat(step, first, steps).theta
        return theta, losses[0]

    return solve


def descent(
    problem: Problem, lam: float, solve: Solve
) -> Callable[[Carry, Batch, tuple[Tensor, ...]], tuple[Carry, Tensors]]:
    """w ← w − η λ (w − θ̃), and θ̃. Rates: η, and that of the inner steps."""
    statistics = [k for k in problem.buffers if k in everything(problem)]

    def step(carry: Carry, batch: Batch, lr: tuple[Tensor, ...]) -> tuple[Carry, Tensors]:
        w, (eta, inner) = carry.params, lr
        theta, loss = solve(w, batch, inner)
        new = {k: w[k] - (eta * lam).to(w[k].dtype) * (w[k] - theta[k]) for k in problem.trainable}
        return add(carry, {**w, **new, **tree.pick(theta, statistics)}, loss), theta

    return step


def envelope(
    problem: Problem, lam: float, steps: int, optimizer: Optimizer, nu: float | None = None
) -> Callable[[Pair, Batch, tuple[Tensor, ...]], Pair]:
    """w ← w − η λ (w − θ̃); the client's own model is θ̃. Rates: η, and that of the inner steps."""
    down = descent(problem, lam, proximal(problem, lam, steps, optimizer, nu))

    def step(pair: Pair, batch: Batch, lr: tuple[Tensor, ...]) -> Pair:
        shared, theta = down(pair.shared, batch, lr)
        return Pair(shared, pair.own._replace(params=theta))

    return step


def around(problem: Problem, lam: float, steps: int, optimizer: Optimizer, inner: Rate) -> LocalRule:
    """θ ← `steps` gradient steps on f̃(θ) + (λ/2) ‖θ − w‖² for each minibatch; w as received, nothing sent."""
    solve = proximal(problem, lam, steps, optimizer)

    def step(carry: Carry, batch: Batch, lr: tuple[Tensor, ...]) -> Carry:
        w = {**carry.params, **carry.received}
        theta, loss = solve(w, batch, lr[0], begin=carry.params)
        return add(carry, theta, loss)

    return LocalRule(sgd.start(problem, optimizer), (Phase(step, (inner,)),), sgd.finish(problem, send=()))
