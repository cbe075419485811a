"""Steps on the Moreau envelope: T. Dinh et al., *Personalized FL with Moreau Envelopes* (2020).

F(w)   = min_θ f(θ) + (λ/2) ‖θ − w‖²
∇F(w)  = λ (w − θ̃),   θ̃ ≈ the minimizer, by gradient steps on a minibatch from θ = w
w      ← w − η λ (w − θ̃)

The client's optimizer takes the inner steps along ∇f̃(θ) + λ (θ − w), which is clipped before; its state begins
anew with every new θ̃. BatchNorm statistics follow the inner
passes, for both w and θ̃.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from partita.algorithms.local.pair import Pair, add, everything
from partita.algorithms.local.sgd import Carry
from partita.core import tree
from partita.core.parts import Optimizer, Problem
from partita.core.types import Batch, Tensors

Solve = Callable[[Tensors, Batch, Tensor], tuple[Tensors, Tensor]]
"""(w, batch, inner step size) -> θ̃ with its statistics, and f̃(w)."""


def proximal(
    problem: Problem, lam: float, steps: int, optimizer: Optimizer, nu: float | None = None
) -> Solve:
    """At most `steps` gradient steps; with `nu`, θ stays where ‖∇f̃(θ) + λ (θ − w)‖ ≤ ν."""
    moving = problem.trainable

    def solve(w: Tensors, batch: Batch, lr: Tensor) -> tuple[Tensors, Tensor]:
        theta, opt, losses = w, optimizer.init(tree.pick(w, moving)), []
        for _ in range(steps):
            loss, g, buffers = problem.grad(theta, batch, wrt=moving)
            h = {k: v + lam * (theta[k] - w[k]) for k, v in g.items()}
            new, opt = optimizer.update(theta, h, opt, dict.fromkeys(moving, lr))
            new |= buffers
            losses.append(loss)
            if nu is not None:
                going = ~(tree.norm(h) <= nu)  # what is not a number goes on, and shows
                if _nobody(going):
                    break
                new = {k: torch.where(going, v, theta[k]) for k, v in new.items()}
            theta = {**theta, **new}
        return theta, losses[0]

    return solve


def _nobody(going: Tensor) -> bool:
    """Whether it is false for all clients that are stacked behind it, so that nothing would change."""
    stacked = torch._C._functorch
    while stacked.is_functorch_wrapped_tensor(going):
        going = stacked.get_unwrapped(going)
    return not bool(going.any())


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
