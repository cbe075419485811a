"""Server optimizers.

    client:  as fedavg; Δ is the mean of the deltas
    server:  m ← β m + Δ,               w ← w − η_s m                      (fedavgm)
             m ← β₁ m + (1 − β₁) Δ,     w ← w − η_s m / (√v + τ)           (the others), with
             v ← v + Δ²                                                    (fedadagrad)
             v ← v − (1 − β₂) Δ² sign(v − Δ²)                              (fedyogi)
             v ← β₂ v + (1 − β₂) Δ²                                        (fedadam)
    fedadam with ε:  w ← w − η_s m̂ / (√v̂ + ε),  m̂ = m / (1 − β₁ᵗ),  v̂ = v / (1 − β₂ᵗ),  from v = 0

Each is fedavg with another `server=`; the same optimizers compose with any other method through `server=`.
"""

from __future__ import annotations

from typing import Unpack

from partita import optim
from partita.algorithms.base import Common, Lr, having, method
from partita.algorithms.fedavg import fedavg
from partita.core.parts import Algorithm
from partita.optim import optimizers

PAPER = "Server optimizers: Reddi et al., Adaptive Federated Optimization (2021); FedAvgM: Hsu et al. (2019)"


@method(
    paper=PAPER,
    use="Use it when the cohort changes a lot from round to round.",
    without=("server",),
)
def fedavgm(
    lr: Lr,
    server_lr: optimizers.ServerLr = 1.0,
    server_momentum: optimizers.Momentum = 0.9,
    **options: Unpack[Common],
) -> Algorithm:
    """fedavg with momentum at the server: m ← β m + Δ, w ← w − η_s m."""
    return fedavg(lr, **having(options, server=optim.sgd(server_lr, server_momentum)))


@method(
    paper=PAPER,
    use="Use it for sparse or badly scaled gradients, such as in language models.",
    without=("server",),
)
def fedadam(
    lr: Lr,
    server_lr: optimizers.ServerLr = 0.1,
    beta1: optimizers.Beta1 = 0.9,
    beta2: optimizers.AdamBeta2 = None,
    tau: optimizers.AdamTau = None,
    eps: optimizers.AdamEps = None,
    **options: Unpack[Common],
) -> Algorithm:
    """fedavg with Adam at the server: that of Reddi et al. with τ, or with `eps` that of Kingma & Ba.

    With `eps` the first steps have the size of `server_lr` however small the deltas are, so that it takes
    smaller rates.
    """
    return fedavg(lr, **having(options, server=optim.adam(server_lr, beta1, beta2, tau, eps)))


@method(
    paper=PAPER,
    use="Use it where Adam's step size jumps.",
    without=("server",),
)
def fedyogi(
    lr: Lr,
    server_lr: optimizers.ServerLr = 0.1,
    beta1: optimizers.Beta1 = 0.9,
    beta2: optimizers.Beta2 = 0.99,
    tau: optimizers.Tau = 1e-3,
    **options: Unpack[Common],
) -> Algorithm:
    """fedavg with Yogi at the server: as Adam, but the second moment changes more slowly."""
    return fedavg(lr, **having(options, server=optim.yogi(server_lr, beta1, beta2, tau)))


@method(
    paper=PAPER,
    use="Use it for sparse gradients when the run is short.",
    without=("server",),
)
def fedadagrad(
    lr: Lr,
    server_lr: optimizers.ServerLr = 0.1,
    beta1: optimizers.Beta1 = 0.0,
    tau: optimizers.Tau = 1e-3,
    **options: Unpack[Common],
) -> Algorithm:
    """fedavg with Adagrad at the server: the second moment only grows."""
    return fedavg(lr, **having(options, server=optim.adagrad(server_lr, beta1, tau)))
