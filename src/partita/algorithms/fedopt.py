"""Server optimizers: Reddi et al., *Adaptive Federated Optimization* (2021); FedAvgM: Hsu et al. (2019).

    client:  as fedavg
    server:  w^{t+1} = optimizer(w^t, mean of the deltas), equations in `partita.server.optimizers`

Each is fedavg with another `server=`; the same optimizers compose with any other method through `server=`.
"""

from __future__ import annotations

from typing import Unpack

from partita import check
from partita import server as optimizers
from partita.algorithms.base import Common, method
from partita.algorithms.fedavg import fedavg
from partita.types import Algorithm, Rate, ServerOptimizer


@method
def fedavgm(
    lr: float | Rate, server_lr: float = 1.0, server_momentum: float = 0.9, **options: Unpack[Common]
) -> Algorithm:
    """fedavg with momentum at the server: m ← β m + Δ, w ← w − η_s m.

    Use it when the cohort changes a lot from round to round.
    """
    return _with_server(lr, optimizers.sgd(server_lr, server_momentum), options)


@method
def fedadam(
    lr: float | Rate,
    server_lr: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    **options: Unpack[Common],
) -> Algorithm:
    """fedavg with Adam at the server.

    Use it for sparse or badly scaled gradients, such as in language models.
    """
    return _with_server(lr, optimizers.adam(server_lr, beta1, beta2, tau), options)


@method
def fedyogi(
    lr: float | Rate,
    server_lr: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    **options: Unpack[Common],
) -> Algorithm:
    """fedavg with Yogi at the server: as Adam, but the second moment changes more slowly.

    Use it where Adam's step size jumps.
    """
    return _with_server(lr, optimizers.yogi(server_lr, beta1, beta2, tau), options)


@method
def fedadagrad(
    lr: float | Rate,
    server_lr: float,
    beta1: float = 0.0,
    tau: float = 1e-3,
    **options: Unpack[Common],
) -> Algorithm:
    """fedavg with Adagrad at the server: the second moment only grows.

    Use it for sparse gradients when the run is short.
    """
    return _with_server(lr, optimizers.adagrad(server_lr, beta1, tau), options)


def _with_server(lr: float | Rate, server: ServerOptimizer, options: Common) -> Algorithm:
    if options.get("server") is not None:
        raise check.fail("server", options["server"], "nothing: this method chooses the server optimizer")
    options["server"] = server
    return fedavg(lr, **options)
