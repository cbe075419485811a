"""Ditto.

    client:  w ← w − η ∇f_i(w), from w = w^t                            as fedavg
             v_i ← v_i − η_v (∇f_i(v_i) + λ (v_i − w^t))                w^t as received
    server:  the mean of w; v_i, a whole model, stays with the client
    client that comes after training:  the steps on v_i

The global model is fedavg's whatever λ is. λ = 0 trains v_i alone, a large λ ties it to the global model.
"""

from __future__ import annotations

from typing import Annotated, Unpack

from partita.algorithms.base import Common, Lr, PersonalLr, compose, method, settings
from partita.algorithms.local.pair import (
    KEPT_BY_BOTH,
    all_twice,
    copies,
    everything,
    finish,
    on_own,
    on_shared,
    start,
)
from partita.algorithms.local.sgd import move, personal_only
from partita.core.options import Option, Range
from partita.core.parts import Algorithm, LocalRule, Phase, Problem
from partita.optim.rates import as_rate


@method(
    paper="Ditto: Li et al., Ditto: Fair and Robust Federated Learning Through Personalization (2021), "
    "Algorithm 1",
    use="Use it when every client can keep a whole model of its own and the global one is needed, too.",
)
def ditto(
    lr: Lr,
    lam: Annotated[
        float,
        Option("λ, the weight of the pull to the global model", low=0, search=Range(0.01, 3.0, log=True)),
    ] = 0.1,
    personal_lr: PersonalLr = None,
    **options: Unpack[Common],
) -> Algorithm:
    """A global model by fedavg and, beside it, a personal model of each client that is pulled to it."""
    common, eta = settings(options), as_rate(lr)
    eta_v = eta if personal_lr is None else as_rate(personal_lr)

    def local(problem: Problem) -> LocalRule:
        names = everything(problem)
        w = on_shared(move(problem, names, optimizer=common.optimizer))
        v = on_own(move(problem, names, optimizer=common.optimizer, pull=lam))
        phases = (
            Phase(w, (eta,)),
            Phase(v, (eta_v,)),
        )  # w first: fedavg's batches are those of a first phase
        return LocalRule(start(problem, common.optimizer), phases, finish(problem))

    def newcomer(problem: Problem) -> LocalRule:
        return personal_only(problem, eta_v, common.optimizer, pull=lam)

    return compose(
        local, common, partition=all_twice, init_client=copies, newcomer=newcomer, kept=KEPT_BY_BOTH
    )
