"""Server optimizers of Reddi et al., *Adaptive Federated Optimization* (2021), Algorithm 2.

Δ is the aggregated delta (received − computed), so −Δ is the paper's pseudo-update:

    m ← β₁ m + (1 − β₁) Δ
    v ← v + Δ²                                (adagrad)
    v ← v − (1 − β₂) Δ² sign(v − Δ²)          (yogi)
    v ← β₂ v + (1 − β₂) Δ²                    (adam)
    x ← x − η m / (√v + τ)

As in the paper, there is no bias correction and v starts at τ².
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor

from partita.core.options import Option, checked
from partita.core.parts import ServerOptimizer
from partita.core.types import Tensors

Lr = Annotated[float, Option("η, the step size of the server", low=0, open_low=True, example=0.1)]
Momentum = Annotated[float, Option("β, how much of the last step the next one keeps", low=0, high=1)]
Beta1 = Annotated[float, Option("β₁, how slowly the mean m of the deltas changes", low=0, high=1)]
Beta2 = Annotated[float, Option("β₂, how slowly the mean v of their squares changes", low=0, high=1)]
Tau = Annotated[float, Option("τ, the degree of adaptivity: small is more", low=0, open_low=True)]

optimizer = checked("server ")


@optimizer
def sgd(lr: Lr = 1.0, momentum: Momentum = 0.0) -> ServerOptimizer:
    """m ← β m + Δ, x ← x − η m. With lr=1 and no momentum this is plain averaging."""

    def init(shared: Tensors) -> Tensors:
        return {f"m.{k}": torch.zeros_like(v) for k, v in shared.items()} if momentum else {}

    def step(shared: Tensors, delta: Tensors, opt: Tensors) -> tuple[Tensors, Tensors]:
        if not momentum:
            return {k: torch.sub(x, delta[k], alpha=lr) for k, x in shared.items()}, opt
        m = {k: momentum * opt[f"m.{k}"] + delta[k] for k in shared}
        moments = {f"m.{k}": x for k, x in m.items()}
        return {k: torch.sub(x, m[k], alpha=lr) for k, x in shared.items()}, {**opt, **moments}

    return ServerOptimizer("sgd", init, step, {"lr": lr, "momentum": momentum})


@optimizer
def adagrad(lr: Lr, beta1: Beta1 = 0.0, tau: Tau = 1e-3) -> ServerOptimizer:
    """v ← v + Δ²: the second moment only grows."""
    return _adaptive("adagrad", lambda v, d2: v + d2, lr=lr, beta1=beta1, tau=tau)


@optimizer
def yogi(lr: Lr, beta1: Beta1 = 0.9, beta2: Beta2 = 0.99, tau: Tau = 1e-3) -> ServerOptimizer:
    """v ← v − (1 − β₂) Δ² sign(v − Δ²): the second moment changes slowly."""

    def second(v: Tensor, d2: Tensor) -> Tensor:
        return v - (1 - beta2) * d2 * torch.sign(v - d2)

    return _adaptive("yogi", second, lr=lr, beta1=beta1, tau=tau, beta2=beta2)


@optimizer
def adam(lr: Lr, beta1: Beta1 = 0.9, beta2: Beta2 = 0.99, tau: Tau = 1e-3) -> ServerOptimizer:
    """v ← β₂ v + (1 − β₂) Δ²: the second moment is a running mean."""

    def second(v: Tensor, d2: Tensor) -> Tensor:
        return beta2 * v + (1 - beta2) * d2

    return _adaptive("adam", second, lr=lr, beta1=beta1, tau=tau, beta2=beta2)


def _adaptive(
    name: str,
    second: Callable[[Tensor, Tensor], Tensor],
    *,
    lr: float,
    beta1: float,
    tau: float,
    **more: float,
) -> ServerOptimizer:

    def init(shared: Tensors) -> Tensors:
        m = {f"m.{k}": torch.zeros_like(x) for k, x in shared.items()}
        return m | {f"v.{k}": torch.full_like(x, tau**2) for k, x in shared.items()}

    def step(shared: Tensors, delta: Tensors, opt: Tensors) -> tuple[Tensors, Tensors]:
        new: Tensors = {}
        moments: Tensors = {}
        for k, x in shared.items():
            m = beta1 * opt[f"m.{k}"] + (1 - beta1) * delta[k]
            v = second(opt[f"v.{k}"], delta[k] ** 2)
            new[k] = x - lr * m / (v.sqrt() + tau)
            moments[f"m.{k}"], moments[f"v.{k}"] = m, v
        return new, {**opt, **moments}

    return ServerOptimizer(name, init, step, {"lr": lr, "beta1": beta1, "tau": tau, **more})
