"""Steps on the Moreau envelope: T. Dinh et al., *Personalized FL with Moreau Envelopes* (2020).

F(w)   = min_θ f(θ) + (λ/2) ‖θ − w‖²
∇F(w)  = λ (w − θ̃),   θ̃ ≈ the minimizer, by gradient steps on a minibatch from θ = w
w      ← w − η λ (w − θ̃)

The client's optimizer takes the inner steps along ∇f̃(θ) + λ (θ − w), which is clipped before; its state
begins anew with every new θ̃. BatchNorm statistics follow the inner passes, for both w and θ̃. Where an
accuracy ν is asked for, each client counts the steps whose θ̃ took all inner steps without reaching it
(whether the last of them did would take another gradient).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from partita.algorithms.local import sgd
from partita.algorithms.local.pair import Pair, add, everything
from partita.algorithms.local.sgd import Carry
from partita.core import tree
from partita.core.parts import LocalRule, Optimizer, Phase, Problem, Rate
from partita.core.types import Batch, ClientState, Download, Tensors, Upload

NEW_THETA = "its optimizer finds θ̃, and begins anew with every θ̃"
"""Why no state of the client's optimizer is kept between rounds."""


class Solution(NamedTuple):
    """θ̃ with its statistics, f̃ where the inner steps began, and 1 where they ended before ν (None: no ν)."""

    theta: Tensors
    loss: Tensor
    missed: Tensor | None


class Solve(Protocol):
    """(w, batch, inner step size, where the inner steps begin; None: at w) -> θ̃."""

    def __call__(self, w: Tensors, batch: Batch, lr: Tensor, begin: Tensors | None = None) -> Solution: ...


class Inner(NamedTuple):
    """θ, the state of the optimizer that finds θ̃, and the steps so far (None: nobody asks)."""

    theta: Tensors
    opt: Tensors
    taken: Tensor | None


class Counted(NamedTuple):
    """What passes from step to step, and how many θ̃ have missed ν so far."""

    carry: Any
    missed: Tensor


def proximal(
    problem: Problem, lam: float, steps: int, optimizer: Optimizer, nu: float | None = None
) -> Solve:
    """At most `steps` gradient steps; with `nu`, θ stays where ‖∇f̃(θ) + λ (θ − w)‖ ≤ ν."""
    moving = problem.trainable

    def solve(w: Tensors, batch: Batch, lr: Tensor, begin: Tensors | None = None) -> Solution:
        losses: list[Tensor] = []

        def step(inner: Inner) -> tuple[Inner, Tensor | None]:
            theta = inner.theta
            loss, g, buffers = problem.grad(theta, batch, wrt=moving)
            losses.append(loss)
            h = {k: v + lam * (theta[k] - w[k]) for k, v in g.items()}
            new, opt = optimizer.update(theta, h, inner.opt, dict.fromkeys(moving, lr))
            done = None if nu is None else tree.norm(h) <= nu  # what is not a number goes on, and shows
            taken = None if inner.taken is None else inner.taken + 1
            return Inner({**theta, **new, **buffers}, opt, taken), done

        taken = None if nu is None else torch.zeros((), device=lr.device)
        first = Inner(w if begin is None else begin, optimizer.init(tree.pick(w, moving)), taken)
        last: Inner = problem.repeat(step, first, steps)
        missed = None if last.taken is None else (last.taken >= steps).to(last.taken.dtype)
        return Solution(last.theta, losses[0], missed)

    return solve


def descent(
    problem: Problem, lam: float, solve: Solve
) -> Callable[[Carry, Batch, tuple[Tensor, ...]], tuple[Carry, Solution]]:
    """w ← w − η λ (w − θ̃), and θ̃. Rates: η, and that of the inner steps."""
    statistics = [k for k in problem.buffers if k in everything(problem)]

    def step(carry: Carry, batch: Batch, lr: tuple[Tensor, ...]) -> tuple[Carry, Solution]:
        w, (eta, inner) = carry.params, lr
        solution = solve(w, batch, inner)
        theta = solution.theta
        new = {k: w[k] - (eta * lam).to(w[k].dtype) * (w[k] - theta[k]) for k in problem.trainable}
        return add(carry, {**w, **new, **tree.pick(theta, statistics)}, solution.loss), solution

    return step


def envelope(
    problem: Problem, lam: float, solve: Solve
) -> Callable[[Pair, Batch, tuple[Tensor, ...]], tuple[Pair, Solution]]:
    """w ← w − η λ (w − θ̃); the client's own model is θ̃. Rates: η, and that of the inner steps."""
    down = descent(problem, lam, solve)

    def step(pair: Pair, batch: Batch, lr: tuple[Tensor, ...]) -> tuple[Pair, Solution]:
        shared, solution = down(pair.shared, batch, lr)
        return Pair(shared, pair.own._replace(params=solution.theta)), solution

    return step


def counted(rule: LocalRule, nu: float | None) -> LocalRule:
    """Return a rule whose step also returns the solution as one whose step does not.

    With `nu`, each client also tells how many of its θ̃ have missed it, as `unsolved`.
    """
    (phase,) = rule.phases
    start, step, finish = rule.start, phase.step, rule.finish
    if nu is None:
        return rule._replace(phases=(phase._replace(step=lambda c, batch, lr: step(c, batch, lr)[0]),))

    def begin(download: Download, state: ClientState) -> Counted:
        zero = torch.zeros((), device=next(iter(download.shared.values())).device)
        return Counted(start(download, state), zero)

    def count(c: Counted, batch: Batch, lr: tuple[Tensor, ...]) -> Counted:
        carry, solution = step(c.carry, batch, lr)
        return Counted(carry, c.missed + solution.missed)

    def end(c: Counted, download: Download, state: ClientState) -> tuple[Upload, ClientState]:
        upload, new = finish(c.carry, download, state)
        return upload._replace(metrics={**upload.metrics, "unsolved": c.missed}), new

    return LocalRule(begin, (phase._replace(step=count),), end)


def around(problem: Problem, solve: Solve, optimizer: Optimizer, inner: Rate) -> LocalRule:
    """θ ← gradient steps on f̃(θ) + (λ/2) ‖θ − w‖² for each minibatch; w as received, nothing sent."""

    def step(carry: Carry, batch: Batch, lr: tuple[Tensor, ...]) -> Carry:
        w = {**carry.params, **carry.received}
        solution = solve(w, batch, lr[0], begin=carry.params)
        return add(carry, solution.theta, solution.loss)

    return LocalRule(sgd.start(problem, optimizer), (Phase(step, (inner,)),), sgd.finish(problem, send=()))
