"""FedSim.

    client:  (u, v_i) ← (u − η_u ∇_u F_i(u, v_i), v_i − η_v ∇_v F_i(u, v_i))     both at the same point
             F_i(u, v_i) = f_i(u, v_i) + (μ/2) ‖v_i − v⁰‖²      v⁰ is the v that the stage began with
    server:  the mean of u; v_i stays with the client
    client that comes after training:  v_i ← v_i − η_v ∇_v F_i(u, v_i), u fixed

An empty personal set makes it fedavg.
"""

from __future__ import annotations

from typing import Unpack

from partita.algorithms.base import Common, Lr, Part, PersonalL2, PersonalLr, compose, method, settings
from partita.algorithms.local.sgd import personal_only, together
from partita.core.parts import Algorithm
from partita.optim.rates import as_rate


@method(
    paper="FedSim: Pillutla et al., Federated Learning with Partial Model Personalization (2022), "
    "Algorithm 3",
    use="Use it like fedalt when a round must stay short: it passes over the data once, not twice.",
)
def fedsim(
    personal: Part,
    lr: Lr,
    personal_lr: PersonalLr = None,
    personal_l2: PersonalL2 = 0.0,
    **options: Unpack[Common],
) -> Algorithm:
    """A shared model with a personal part, both trained simultaneously."""
    common, eta = settings(options), as_rate(lr)
    eta_v = eta if personal_lr is None else as_rate(personal_lr)
    return compose(
        lambda problem: together(problem, eta, common.optimizer, personal_lr=eta_v, personal_l2=personal_l2),
        common,
        personal=personal,
        newcomer=lambda problem: personal_only(problem, eta_v, common.optimizer, personal_l2=personal_l2),
    )
