"""Every client alone.

    v_i ← v_i − η ∇f_i(v_i)

The baseline without federation: nothing is ever sent, the whole model is personal.
"""

from __future__ import annotations

from typing import Unpack

from partita.algorithms.base import Common, compose, method, rate, settings
from partita.local.sgd import together
from partita.types import Algorithm, Rate


@method
def local(lr: float | Rate, **options: Unpack[Common]) -> Algorithm:
    """Each client trains its own model on its own data and never communicates.

    Use it to learn whether federation helps a client at all.
    """
    common, eta = settings(options), rate("lr", lr)
    return compose(lambda problem: together(problem, eta, common.optimizer), common, personal="all")
