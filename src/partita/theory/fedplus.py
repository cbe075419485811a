"""Fed+: Kundu et al., *Robustness and Personalization in Federated Learning* (2022), section 4.5.

Every ∇f_k is L_f-Lipschitz, gradients are exact, λ = 0, and w̃ is the aggregate of the last models of all N
clients (`over="all"`, or all of them take part): with the aggregate of a cohort alone nothing of this holds.
With η = 1/L_f, whatever the numbers of local steps (from one), F_k of (10) and the objective F_σ of (16):

    F_k(w_k⁺) ≤ F_k(w_k) − ‖∇F_k(w_k)‖² / (2 (L_f + σ))                              Proposition 2, (15)
    F_σ(W⁺)   ≤ F_σ(W) − Σ_{k ∈ S} ‖∇F_k(w_k)‖² / (2N (L_f + σ))                      of a round, (31)
    min_{t<T} E Σ_k ‖∇F_k(w_k^t)‖² ≤ 2N (L_f + σ) (F_σ(W⁰) − F_σ*) / (pT)             Theorem 1, from (30)

with a client in the cohort S with probability p. Theorem 1 states the limit 0; the last line is the sum over
t that its proof ends with.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from partita.core import check


def fedplus_lr(smoothness: float) -> float:
    """Return the step size η = 1/L_f of Proposition 2 and Theorem 1.

    smoothness  L_f: every client's gradient is L_f-Lipschitz
    """
    return 1 / check.number("smoothness", smoothness, low=0, open_low=True)


def fedplus_kappa(lr: float, sigma: float) -> float:
    """Return κ = 1/(1 + ησ), what a step keeps of w − η∇f; the paper recommends 0.9 to 0.999.

    lr     η
    sigma  σ, the weight of the pull
    """
    eta = check.number("lr", lr, low=0, open_low=True)
    return 1 / (1 + eta * check.number("sigma", sigma, low=0))


def fedplus_sigma(kappa: float, lr: float) -> float:
    """Return the σ with which a step size η has this κ: (1/κ − 1)/η.

    kappa  κ, above 0 and at most 1
    lr     η
    """
    kappa = check.number("kappa", kappa, low=0, high=1, open_low=True)
    return (1 / kappa - 1) / check.number("lr", lr, low=0, open_low=True)


def fedplus_descent(
    gradients: float | Sequence[float] | np.ndarray | Tensor,
    smoothness: float,
    sigma: float,
    clients: int = 1,
) -> float:
    """Return by how much a round lowers F_σ at least: Σ ‖∇F_k‖² / (2N (L_f + σ)), with η = 1/L_f.

    With one client, it is by how much its local work lowers F_k (Proposition 2).

    gradients   ‖∇F_k‖ of each client that takes part, before the round: numbers, an array or a tensor
    smoothness  L_f
    sigma       σ
    clients     N, all clients
    """
    try:
        lengths = torch.as_tensor(gradients).double().flatten().tolist()
    except (TypeError, ValueError, RuntimeError):
        raise check.fail("gradients", gradients, "a number from 0, or one for each client") from None
    total = sum(check.number("gradients", g, low=0) ** 2 for g in lengths)
    return total / (2 * check.integer("clients", clients, low=1) * _curvature(smoothness, sigma))


def fedplus_bound(
    gap: float, smoothness: float, sigma: float, clients: int, rounds: int, participation: float = 1.0
) -> float:
    """Return a bound of min_{t<T} E Σ_k ‖∇F_k(w_k^t)‖² after T rounds: 2N (L_f + σ) gap / (pT).

    gap            F_σ(W⁰) − min F_σ; where that is unknown, F_σ(W⁰) less any lower bound of the losses
    smoothness     L_f
    sigma          σ
    clients        N
    rounds         T
    participation  p, the probability that a client takes part in a round; its model counts in every one
    """
    gap, p = check.number("gap", gap, low=0), check.number("participation", participation, low=0, high=1)
    if not p:
        raise check.fail("participation", participation, "a probability above 0")
    n, t = check.integer("clients", clients, low=1), check.integer("rounds", rounds, low=1)
    return 2 * n * _curvature(smoothness, sigma) * gap / (p * t)


def _curvature(smoothness: float, sigma: float) -> float:
    """Return L_f + σ, which ∇F_k is Lipschitz with."""
    return check.number("smoothness", smoothness, low=0, open_low=True) + check.number("sigma", sigma, low=0)
