"""FedAlt: Pillutla et al., *Federated Learning with Partial Model Personalization* (2022), Algorithm 2.

    client:  τ_v steps   v_i ← v_i − η_v ∇_v f_i(u, v_i)       with the received u fixed
             τ_u steps   u ← u − η_u ∇_u f_i(u, v_i)           with the new v_i fixed
    server:  the mean of u; v_i stays with the client

An empty personal set makes it fedavg.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Unpack

from partita import check
from partita.algorithms.base import Common, compose, method, rate, settings
from partita.local.sgd import finish, move, start
from partita.partition import Personal
from partita.types import Algorithm, LocalRule, Phase, Problem, Rate, Work


@method
def fedalt(
    personal: Personal,
    lr: float | Rate,
    personal_lr: float | Rate | None = None,
    personal_steps: int | None = None,
    shared_steps: int | None = None,
    **options: Unpack[Common],
) -> Algorithm:
    """A shared model with a personal part, trained in turn: first the personal part, then the shared one.

    Use it first when clients differ: it nearly matches full personalization with a small personal part.
    """
    common, eta = settings(options), rate("lr", lr)
    eta_v = eta if personal_lr is None else rate("personal_lr", personal_lr)
    work_v, work_u = _work("personal_steps", personal_steps), _work("shared_steps", shared_steps)

    def local(problem: Problem) -> LocalRule:
        u, v = problem.partition
        step_v = move(problem, v, optimizer=common.optimizer)
        step_u = move(problem, u, optimizer=common.optimizer)
        phases = (Phase(step_v, (eta_v,), work_v), Phase(step_u, (eta,), work_u))
        some = tuple(phase for phase, names in zip(phases, (v, u)) if names)
        return LocalRule(start(problem, common.optimizer), some, finish(problem))

    return compose(local, common, personal=personal)


def _work(field: str, steps: int | None) -> Callable[[Work], Work] | None:
    if steps is None:
        return None
    check.integer(field, steps, low=1)
    return lambda run: replace(run, steps=steps, epochs=None)
