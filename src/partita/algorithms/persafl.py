"""PersA-FL.

    client:  Q steps from w = w^{t−τ}, the newest model when it asked
             w ← w − η [I − α ∇²f̃_i(w, D'')] ∇f̃_i(w − α ∇f̃_i(w, D'), D)       persafl_maml, option B
             θ̃ ≈ argmin_θ f̃_i(θ, D) + (λ/2) ‖θ − w‖²                           persafl_me, option C:
             w ← w − η λ (w − θ̃)                                               K steps, or ‖∇h̃(θ̃)‖ ≤ ν
             Δ_i = w^{t−τ} − w
    server:  w ← w − β s(τ) Δ_i on every arrival; s = 1 in the paper
    client's model, from the server's w now and all of its training data:
             w − α ∇f_i(w)                                                     persafl_maml
             θ̃(w)                                                              persafl_me

h̃ is what θ̃ minimizes, by gradient steps from θ = w. Clients keep nothing. Option A is fedasync, and so is
persafl_maml with α = 0, bit for bit. With `schedule=partita.schedule.synchronous()` persafl_maml is
perfedavg, and the server's model of persafl_me is pfedme's. For `hessian="hf"`, (D1) of the paper divides a
central difference by δ, which is twice the product; ours is divided by 2 δ.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from torch import Tensor

from partita.algorithms.base import Common, Lr, ServerLr, as_is, compose, having, method, settings
from partita.algorithms.local.prox import NEW_THETA, Solve, counted, descent, proximal
from partita.algorithms.local.sgd import finish, start
from partita.algorithms.perfedavg import Alpha, Delta, Hessian, perfedavg
from partita.algorithms.pfedme import InnerLr, InnerSteps, Lam, Nu, most_steps
from partita.core.parts import Algorithm, LocalRule, Personalize, Phase, Problem
from partita.core.types import Batch, Tensors, Work
from partita.optim import sgd
from partita.optim.rates import as_rate, until_the_end
from partita.schedule.staleness import OfMethod as Stale

PAPER = "PersA-FL: Toghani, Lee & Uribe, Personalized Asynchronous Federated Learning (2022), Algorithms 1, 2"


@method(
    paper=PAPER,
    use="Use it like perfedavg, when clients differ much in speed.",
    weighting="uniform",
    without=("server",),
)
def persafl_maml(
    lr: Lr,
    alpha: Alpha = 0.05,
    server_lr: ServerLr = 1.0,
    hessian: Hessian = "exact",
    hf_delta: Delta = 1e-3,
    staleness: Stale = None,
    **options: Unpack[Common],
) -> Algorithm:
    """Asynchronous perfedavg: a global model that is one gradient step from a good one of any client."""
    synchronous = perfedavg(lr, alpha, hessian, hf_delta, **having(options, server=sgd(server_lr)))
    return replace(synchronous, asynchronous={"buffer": 1, "staleness": staleness})


@method(
    paper=PAPER,
    use="Use it like pfedme, when clients differ much in speed, keep nothing, or new ones come later.",
    weighting="uniform",
    without=("server",),
    refuses={"optimizer_state": NEW_THETA},
)
def persafl_me(
    lr: Lr,
    lam: Lam = 5.0,
    inner_lr: InnerLr = None,
    inner_steps: InnerSteps = None,
    nu: Nu = None,
    server_lr: ServerLr = 1.0,
    staleness: Stale = None,
    **options: Unpack[Common],
) -> Algorithm:
    """Asynchronous pfedme without a state: a client's model is its minimizer near the shared one."""
    common = settings(options, server=sgd(server_lr))
    eta, inner = as_rate(lr), as_rate(lr if inner_lr is None else inner_lr)

    def solver(problem: Problem) -> Solve:
        return proximal(problem, lam, most_steps(inner_steps, nu), common.optimizer, nu)

    def local(problem: Problem) -> LocalRule:
        step = descent(problem, lam, solver(problem))
        rule = LocalRule(start(problem, common.optimizer), (Phase(step, (eta, inner)),), finish(problem))
        return counted(rule, nu)

    def personalize(problem: Problem) -> Personalize:
        solve = solver(problem)

        def step(w: Tensors, batch: Batch, lr: tuple[Tensor, ...]) -> Tensors:
            return solve(w, batch, lr[0]).theta

        once = Phase(step, (until_the_end(inner),), lambda now: Work(steps=1, batch=None))  # noqa: ARG005
        return as_is(problem)._replace(phases=(once,))

    return compose(local, common, personalize=personalize, asynchronous={"buffer": 1, "staleness": staleness})
