"""FedAsync and FedBuff.

    client:  w ← w − η (∇f_i(w; batch) + ρ (w − w^{t−τ})), from w = w^{t−τ}, the newest model when it asked
             w_i = w,   Δ_i = w^{t−τ} − w_i
    server:  w ← w − β s(τ) Δ_i                                on every arrival            (fedasync)
             w ← (1 − β s(τ)) w + β s(τ) w_i                   on every arrival            (mixing=True)
             w ← w − β Σ_i s(τ_i) Δ_i / K                      on every K-th arrival       (fedbuff)

τ counts the server's steps since the client downloaded; `partita.schedule` has the functions s. The first is
the fedasync of Toghani et al. (2022), option A, where s = 1: the server moves along the client's delta, and
ρ = 0. The second is that of Xie et al. (2019), Algorithm 1, with their α_t = α s(t − τ) as β s(τ): the server
mixes the client's model into its own, and so forgets a part of what others sent meanwhile. Where τ = 0 the
two are the same.

With `schedule=partita.schedule.synchronous()` they are fedavg (ρ > 0: fedprox) with the step β at the server;
fedbuff counts clients equally.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Unpack

from partita.algorithms.base import Common, Lr, ServerLr, having, method
from partita.algorithms.fedavg import fedavg
from partita.algorithms.fedprox import fedprox
from partita.core.options import Option, Range
from partita.core.parts import Algorithm
from partita.optim import sgd
from partita.schedule.staleness import OfMethod as Stale

WHOLE = "with mixing=True what a device does not hold cannot be told from what it left as it was"
PAPER = "FedAsync: Xie et al., Asynchronous Federated Optimization (2019); FedBuff: Nguyen et al. (2022)"


@method(
    paper=PAPER,
    use="Use it when clients differ much in speed, so that a round would wait for the slowest.",
    without=("server",),
)
def fedasync(
    lr: Lr,
    server_lr: ServerLr = 1.0,
    staleness: Stale = None,
    mixing: Annotated[
        bool, Option("mix the client's model into the server's, as Xie et al.; else add the client's delta")
    ] = False,
    rho: Annotated[
        float,
        Option(
            "ρ, the weight of the pull to the model that a client received",
            low=0,
            search=Range(1e-3, 1.0, log=True, asked=True),
        ),
    ] = 0.0,
    **options: Unpack[Common],
) -> Algorithm:
    """One global model, asynchronously: what a client sends is applied as soon as it arrives."""
    synchronous = fedprox(lr, rho, **having(options, server=sgd(server_lr)))
    return replace(
        synchronous,
        asynchronous={"buffer": 1, "staleness": staleness},
        mixes=mixing,
        needs_full_model=WHOLE if mixing else "",
    )


@method(
    paper=PAPER,
    use="Use it instead of fedasync with many clients at work: a mean is less noisy than its deltas.",
    weighting="uniform",
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
