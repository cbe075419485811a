"""FedAlt.

    client:  τ_v steps   v_i ← v_i − η_v ∇_v F_i(u, v_i)       with the received u fixed
             τ_u steps   u ← u − η_u ∇_u F_i(u, v_i)           with the new v_i fixed
             F_i(u, v_i) = f_i(u, v_i) + (μ/2) ‖v_i − v⁰‖²     v⁰ is the v that the stage began with
    server:  the mean of u; v_i stays with the client
    client that comes after training:  the steps on v_i

An empty personal set makes it fedavg.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Unpack

from partita.algorithms.base import Common, Lr, Part, PersonalL2, PersonalLr, compose, method, settings
from partita.algorithms.local.sgd import finish, move, personal_only, start
from partita.core.options import Option, Range
from partita.core.parts import Algorithm, LocalRule, Phase, Problem
from partita.core.types import RoundContext, Work
from partita.optim.rates import as_rate

STEPS = Range(1, 50, log=True, asked=True)


@method(
    paper="FedAlt: Pillutla et al., Federated Learning with Partial Model Personalization (2022), "
    "Algorithm 2",
    use="Use it first when clients differ: it nearly matches full personalization with a small "
    "personal part.",
)
def fedalt(
    personal: Part,
    lr: Lr,
    personal_lr: PersonalLr = None,
    personal_steps: Annotated[
        int | None, Option("τ_v, steps on v_i (None: as the run says)", low=1, search=STEPS)
    ] = None,
    shared_steps: Annotated[
        int | None, Option("τ_u, steps on u (None: as the run says)", low=1, search=STEPS)
    ] = None,
    personal_l2: PersonalL2 = 0.0,
    **options: Unpack[Common],
) -> Algorithm:
    """A shared model with a personal part, trained in turn: first the personal part, then the shared one."""
    common, eta = settings(options), as_rate(lr)
    eta_v = eta if personal_lr is None else as_rate(personal_lr)
    work_v, work_u = _work(personal_steps), _work(shared_steps)

    def local(problem: Problem) -> LocalRule:
        u, v = problem.partition
        step_v = move(problem, v, optimizer=common.optimizer, personal_l2=personal_l2)
        step_u = move(problem, u, optimizer=common.optimizer)
        phases = (Phase(step_v, (eta_v,), work_v), Phase(step_u, (eta,), work_u))
        needed = tuple(phase for phase, names in zip(phases, (v, u)) if names)
        return LocalRule(start(problem, common.optimizer), needed, finish(problem))

    def newcomer(problem: Problem) -> LocalRule:
        return personal_only(problem, eta_v, common.optimizer, work=work_v, personal_l2=personal_l2)

    return compose(local, common, personal=personal, newcomer=newcomer)


def _work(steps: int | None) -> Callable[[RoundContext], Work] | None:
    return None if steps is None else lambda now: replace(now.work, steps=steps, epochs=None)
