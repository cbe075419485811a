"""FedAsync.

    client:  w ← w − η ∇f_i(w; batch), from w = w^{t−τ}, the newest model when it asked
             Δ_i = w^{t−τ} − w
    server:  w ← w − β s(τ) Δ_i                                on every arrival            (fedasync)
             w ← w − β Σ_i n_i s(τ_i) Δ_i / Σ_i n_i            on every K-th arrival       (fedbuff)

τ counts the server's steps since the client downloaded; `partita.schedule` has the functions s. This is the
fedasync of Toghani et al. (2022), option A, where s = 1: the server moves along the client's delta.
Xie et al. mix the client's model into the server's, w ← (1 − β) w + β w_i; where τ = 0 the two are the same.

With `schedule=partita.schedule.synchronous()` both are fedavg with the step β at the server.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Unpack

from partita.algorithms.base import Common, Lr, ServerLr, having, method
from partita.algorithms.fedavg import fedavg
from partita.core.options import Option, Range
from partita.core.parts import Algorithm
from partita.optim import sgd
from partita.schedule.staleness import OfMethod as Stale

PAPER = "FedAsync: Xie et al., Asynchronous Federated Optimization (2019); FedBuff: Nguyen et al. (2022)"


@method(
    paper=PAPER,
    use="Use it when clients differ much in speed, so that a round would wait for the slowest.",
    without=("server",),
)
def fedasync(
    lr: Lr, server_lr: ServerLr = 1.0, staleness: Stale = None, **options: Unpack[Common]
) -> Algorithm:
    """One global model, asynchronously: each client's delta is applied as soon as it arrives."""
    synchronous = fedavg(lr, **having(options, server=sgd(server_lr)))
    return replace(synchronous, asynchronous={"buffer": 1, "staleness": staleness})


@method(
    paper=PAPER,
    use="Use it instead of fedasync with many clients at work: a mean is less noisy than its deltas.",
    without=("server",),
)
def fedbuff(
    lr: Lr,
    server_lr: ServerLr = 1.0,
    buffer: Annotated[
        int,
        Option("K, how many arrivals make a server step", low=1, search=Range(2, 50, log=True, asked=True)),
    ] = 10,
    staleness: Stale = "sqrt",
    **options: Unpack[Common],
) -> Algorithm:
    """One global model, asynchronously: the server steps along the mean of each `buffer` arrivals."""
    synchronous = fedavg(lr, **having(options, server=sgd(server_lr)))
    return replace(synchronous, asynchronous={"buffer": buffer, "staleness": staleness})
