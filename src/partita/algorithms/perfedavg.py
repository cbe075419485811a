"""Per-FedAvg.

    client:  w ← w − η [I − α ∇²f̃_i(w, D'')] ∇f̃_i(w − α ∇f̃_i(w, D'), D)      from w = w^t
    server:  the mean
    client's model: w − α ∇f_i(w), one step on all of its training data

D, D' and D'' are independent batches. The Hessian times the gradient d is exact (forward over reverse), or,
with `hessian`, "hf": (∇f(w + δ d) − ∇f(w − δ d)) / (2 δ), or "fo": left out. α = 0 is fedavg.
"""

from __future__ import annotations

from typing import Annotated, Unpack

from partita.algorithms.base import Common, Lr, compose, method, settings
from partita.algorithms.local.meta import HESSIANS, adapted, meta
from partita.algorithms.local.sgd import finish, start
from partita.core.options import Option, Range
from partita.core.parts import Algorithm, LocalRule, Problem
from partita.optim.rates import as_rate

Alpha = Annotated[
    float,
    Option(
        "α, the size of the step that makes the model a client's", low=0, search=Range(1e-3, 1.0, log=True)
    ),
]
Hessian = Annotated[str, Option("the Hessian's part: exact, by differences, or left out", choices=HESSIANS)]
Delta = Annotated[
    float,
    Option(
        "δ of hessian='hf': how far the two gradients lie apart",
        low=0,
        open_low=True,
        search=Range(1e-4, 1e-1, log=True, asked=True),
    ),
]


@method(
    paper="Per-FedAvg: Fallah et al., Personalized Federated Learning: A Meta-Learning Approach "
    "(2020), Algorithm 1",
    use="Use it when clients keep nothing, or new ones come later: one step on their data is all they need.",
    weighting="uniform",
)
def perfedavg(
    lr: Lr,
    alpha: Alpha = 0.05,
    hessian: Hessian = "exact",
    hf_delta: Delta = 1e-3,
    **options: Unpack[Common],
) -> Algorithm:
    """A global model from which one gradient step leads to a good model of any client (MAML)."""
    common, eta = settings(options), as_rate(lr)

    def local(problem: Problem) -> LocalRule:
        phase = meta(problem, eta, alpha, common.optimizer, hessian, hf_delta)
        return LocalRule(start(problem, common.optimizer), (phase,), finish(problem))

    return compose(local, common, personalize=lambda problem: adapted(problem, alpha))
