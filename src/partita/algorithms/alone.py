"""Every client alone: no paper, the baseline without federation.

    v_i ← v_i − η ∇f_i(v_i)

Nothing is ever sent, the whole model is personal.
"""

from __future__ import annotations

from typing import Unpack

from partita.algorithms.base import Common, Lr, compose, method, settings
from partita.algorithms.local.sgd import together
from partita.core.parts import Algorithm
from partita.optim.rates import as_rate


@method(
    paper="Every client alone: no paper, the baseline without federation",
    use="Use it to learn whether federation helps a client at all.",
)
def local(lr: Lr, **options: Unpack[Common]) -> Algorithm:
    """Each client trains its own model on its own data and never communicates."""
    common, eta = settings(options), as_rate(lr)
    return compose(
        lambda problem: together(problem, eta, common.optimizer),
        common,
        personal="all",
        synchronous_only="clients send nothing",
    )
