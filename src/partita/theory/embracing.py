"""EmbracingFL: Lee et al., *Embracing Federated Learning* (2024), Theorem 1.

x = (y, z): the s strong of m clients train y, all clients train z, τ steps of size η in each of T rounds. For
k of y and z, ∇_k F_i is L_k-Lipschitz, a stochastic gradient has variance σ_k² at most, and clients differ by
σ̄_k²: E‖∇_k F_i − ∇_k F‖² ≤ σ̄_k². With η ≤ min{1/(τL), 1/(4L√(τ(τ−1)))}, L = max(L_y, L_z),

    (1/T) Σ_t E‖∇F(x_t)‖² ≤ 14/(3Tητ) (F(x_0) − F*)
        + (7 L_y η/(3s) + 16/3 L_y² η² (τ−1)) σ_y²  +  (14/(3s) + 64/3 L_y² η² τ(τ−1)) σ̄_y²
        + (7 L_z η/(3m) +  8/3 L_z² η² (τ−1)) σ_z²  +            32/3 L_z² η² τ(τ−1)  σ̄_z²        (2)

The theorem rests on two things that it does not say. Which clients are strong has nothing to do with their
data (Lemma 3 takes clients as independent): it holds on average over a random choice, and for one choice
14/3 σ̄_y² may remain however many are strong. And y and z are not coupled: (15) and (18) bound the change of a
gradient by the move of its own part alone. All clients count alike and take part in every round.
"""

from __future__ import annotations

import math

from partita.core import check

Pair = tuple[float, float]
"""A constant of y, the part that strong clients train, and of z, the part that all train."""


def embracing_lr(smoothness: Pair, steps: int) -> float:
    """Return the largest step size of Theorem 1: min{1/(τL), 1/(4L√(τ(τ−1)))}.

    smoothness  (L_y, L_z); L is the larger one
    steps       τ, local steps of a round
    """
    largest, tau = max(_pair("smoothness", smoothness)), check.integer("steps", steps, low=1)
    if largest == 0:
        raise check.fail("smoothness", smoothness, "at least one number above 0")
    return 1 / (largest * max(tau, 4 * math.sqrt(tau * (tau - 1))))


def embracing_bound(
    gap: float,
    *,
    rounds: int,
    lr: float,
    steps: int,
    strong: int,
    clients: int,
    smoothness: Pair,
    noise: Pair = (0.0, 0.0),
    heterogeneity: Pair = (0.0, 0.0),
) -> float:
    """Return the bound (2) of the mean of E‖∇F(x_t)‖² over the rounds, t = 0 ... T−1.

    It holds on average over which clients are strong, for steps up to `embracing_lr`; others are refused.

    gap            F(x_0) − F*
    rounds         T
    lr             η
    steps          τ, local steps of a round
    strong         s, clients that train the whole model
    clients        m, all clients
    smoothness     (L_y, L_z)
    noise          (σ_y², σ_z²), variances of a stochastic gradient
    heterogeneity  (σ̄_y², σ̄_z²), mean squared distances of the clients' gradients to their mean
    """
    check.number("gap", gap, low=0)
    check.integer("rounds", rounds, low=1)
    most = embracing_lr(smoothness, steps)
    check.number("lr", lr, low=0, open_low=True, high=most * (1 + 1e-12))
    floor = embracing_floor(_pair("heterogeneity", heterogeneity)[0], strong, clients)
    (l_y, l_z), (noise_y, noise_z) = smoothness, _pair("noise", noise)
    far_y, far_z = heterogeneity
    drift, again = lr**2 * (steps - 1), lr**2 * steps * (steps - 1)
    return (
        14 * gap / (3 * rounds * lr * steps)
        + (7 * l_y * lr / (3 * strong) + 16 / 3 * l_y**2 * drift) * noise_y
        + (7 * l_z * lr / (3 * clients) + 8 / 3 * l_z**2 * drift) * noise_z
        + floor
        + 64 / 3 * l_y**2 * again * far_y
        + 32 / 3 * l_z**2 * again * far_z
    )


def embracing_floor(heterogeneity: float, strong: int, clients: int) -> float:
    """Return 14 σ̄_y²/(3s), what is left of the bound however long and with however small steps one trains.

    It falls with the number s of strong clients and with nothing else: weak clients do not lower it, since y
    is trained by the strong ones alone (Remark 2). Where all clients are strong there is no y, and nothing is
    left.

    heterogeneity  σ̄_y², the mean squared distance of the clients' gradients for y to their mean
    strong         s, clients that train the whole model
    clients        m, all clients
    """
    check.number("heterogeneity", heterogeneity, low=0)
    check.integer("clients", clients, low=1)
    check.integer("strong", strong, low=1, high=clients)
    return 0.0 if strong == clients else 14 * heterogeneity / (3 * strong)


def _pair(field: str, values: Pair) -> Pair:
    if not isinstance(values, tuple | list) or len(values) != 2:
        raise check.fail(
            field, values, "two numbers: of the part that strong clients train, and of the other"
        )
    y, z = (check.number(field, value, low=0) for value in values)
    return y, z
