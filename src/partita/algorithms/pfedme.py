"""pFedMe.

    client:  θ̃ ≈ argmin_θ f̃_i(θ) + (λ/2) ‖θ − w‖²      K gradient steps on one minibatch, from θ = w, or
                                                        until the gradient is no longer than ν
             w ← w − η λ (w − θ̃)                        from w = w^t
    server:  w^{t+1} = (1 − β) w^t + β · mean of w
    client's model: the last θ̃
    client that comes after training:  K gradient steps on f̃_i(θ) + (λ/2) ‖θ − w‖² for each minibatch,
             from where θ is, beginning at w, which stays

The paper leaves open where the inner steps begin; the authors' program goes on from the last θ̃. Here they
begin at w, so that θ̃ is a function of w and the minibatch alone.
"""

from __future__ import annotations

from typing import Annotated, Unpack

from partita.algorithms.base import RATE, RATES, Common, Lr, compose, method, settings
from partita.algorithms.local.pair import all_twice, copies, finish, start
from partita.algorithms.local.prox import NEW_THETA, Solve, around, counted, envelope, proximal
from partita.core.options import Option, Range
from partita.core.parts import Algorithm, LocalRule, Phase, Problem, Rate
from partita.optim import sgd
from partita.optim.rates import as_rate

Lam = Annotated[
    float,
    Option("λ, how close the personal model stays to the shared one", low=0, search=Range(0.3, 30, log=True)),
]
InnerLr = Annotated[
    float | Rate | None,
    Option(
        "the step size of the inner gradient steps (None: lr)", low=0, allowed=RATE, search=RATES, like="lr"
    ),
]
INNER_STEPS = 5  # K in the paper
MOST = 100
"""Inner steps with `nu` alone, where ν is not reached before."""

InnerSteps = Annotated[
    int | None,
    Option(
        f"K, gradient steps to find θ̃; with nu, at most (None: {INNER_STEPS}, or {MOST} with nu)",
        low=1,
        search=Range(1, 20, log=True),
    ),
]
Nu = Annotated[
    float | None,
    Option(
        "ν: θ̃ is found where the gradient of h̃ is no longer than this (None: after K steps)",
        low=0,
        search=Range(1e-4, 1.0, log=True, asked=True),
    ),
]


def most_steps(inner_steps: int | None, nu: float | None) -> int:
    """Return K, or the most inner steps where an accuracy is asked for."""
    return inner_steps or (INNER_STEPS if nu is None else MOST)


@method(
    paper="pFedMe: T. Dinh et al., Personalized Federated Learning with Moreau Envelopes (2020), Algorithm 1",
    use="Use it when personal models should stay close to a common one, and gradients "
    "are cheap: each local step takes `inner_steps` of them.",
    weighting="uniform",
    without=("server",),
    refuses={"optimizer_state": NEW_THETA},
)
def pfedme(
    lr: Lr,
    lam: Lam = 5.0,
    inner_lr: InnerLr = None,
    inner_steps: InnerSteps = None,
    beta: Annotated[
        float,
        Option(
            "β, the step of the server towards the mean",
            low=0,
            open_low=True,
            search=Range(0.5, 2.0, asked=True),
        ),
    ] = 1.0,
    nu: Nu = None,
    **options: Unpack[Common],
) -> Algorithm:
    """A shared model whose clients each keep their own minimizer near it."""
    common = settings(options, server=sgd(beta))
    rates = (as_rate(lr), as_rate(lr if inner_lr is None else inner_lr))

    def solver(problem: Problem) -> Solve:
        return proximal(problem, lam, most_steps(inner_steps, nu), common.optimizer, nu)

    def local(problem: Problem) -> LocalRule:
        step = envelope(problem, lam, solver(problem))
        rule = LocalRule(start(problem, common.optimizer), (Phase(step, rates),), finish(problem))
        return counted(rule, nu)

    def newcomer(problem: Problem) -> LocalRule:
        return around(problem, solver(problem), common.optimizer, rates[1])

    return compose(local, common, partition=all_twice, init_client=copies, newcomer=newcomer)
