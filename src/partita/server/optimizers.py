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

import torch
from torch import Tensor

from partita import check
from partita.types import ServerOptimizer, Tensors


def sgd(lr: float = 1.0, momentum: float = 0.0) -> ServerOptimizer:
    """m ← β m + Δ, x ← x − η m. With lr=1 and no momentum this is plain averaging."""
    lr = check.number("server lr", lr, low=0.0, open_low=True)
    momentum = check.number("server momentum", momentum, low=0.0, high=1.0)

    def init(shared: Tensors) -> Tensors:
        return {f"m.{k}": torch.zeros_like(v) for k, v in shared.items()} if momentum else {}

    def step(shared: Tensors, delta: Tensors, opt: Tensors) -> tuple[Tensors, Tensors]:
        if not momentum:
            return {k: torch.sub(x, delta[k], alpha=lr) for k, x in shared.items()}, opt
        m = {k: momentum * opt[f"m.{k}"] + delta[k] for k in shared}
        moments = {f"m.{k}": x for k, x in m.items()}
        return {k: torch.sub(x, m[k], alpha=lr) for k, x in shared.items()}, {**opt, **moments}

    return ServerOptimizer("sgd", init, step, {"lr": lr, "momentum": momentum})


def adagrad(lr: float, beta1: float = 0.0, tau: float = 1e-3) -> ServerOptimizer:
    """v ← v + Δ²."""
    return _adaptive("adagrad", lambda v, d2: v + d2, lr, beta1, None, tau)


def yogi(lr: float, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> ServerOptimizer:
    """v ← v − (1 − β₂) Δ² sign(v − Δ²)."""
    return _adaptive("yogi", lambda v, d2: v - (1 - beta2) * d2 * torch.sign(v - d2), lr, beta1, beta2, tau)


def adam(lr: float, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> ServerOptimizer:
    """v ← β₂ v + (1 − β₂) Δ²."""
    return _adaptive("adam", lambda v, d2: beta2 * v + (1 - beta2) * d2, lr, beta1, beta2, tau)


def _adaptive(
    name: str,
    second: Callable[[Tensor, Tensor], Tensor],
    lr: float,
    beta1: float,
    beta2: float | None,
    tau: float,
) -> ServerOptimizer:
    options = {
        "lr": check.number("server lr", lr, low=0.0, open_low=True),
        "beta1": check.number("beta1", beta1, low=0.0, high=1.0),
        "tau": check.number("tau", tau, low=0.0, open_low=True),
    }
    if beta2 is not None:
        options["beta2"] = check.number("beta2", beta2, low=0.0, high=1.0)

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

    return ServerOptimizer(name, init, step, options)
