"""FedAlt and FedSim: Pillutla et al., *FL with Partial Model Personalization* (2022), Theorems 1 to 3, 11.

F(u, V) is the mean of F_i(u, v_i) over n clients, of whom m take part in a round, drawn uniformly; all count
alike. ∇_u F_i is L_u-Lipschitz in u, ∇_v F_i is L_v-Lipschitz in v_i, and each L_uv-Lipschitz in the other:

    χ = L_uv / √(L_u L_v)                                                                             (5)

Stochastic gradients have variances σ_u² and σ_v² at most, and clients differ by (Assumption 3')

    (1/n) Σ_i ‖∇_u F_i(u, v_i) − ∇_u F(u, V)‖² ≤ δ² + ρ² ‖∇_u F(u, V)‖²                               (9)

With γ_u = η/(L_u τ_u) and γ_v = η/(L_v τ_v), Δ_u = ‖∇_u F‖² and Δ_v = (1/n) Σ_i ‖∇_v F_i‖² at (u^t, V^t),

    (1/T) Σ_{t<T} E[Δ_u/L_u + (m/n) Δ_v/L_v] ≤ c (ΔF₀/(ηT) + η s₁ + η² s₂)

    FedAlt  η ≤ min{1/(24(1+ρ²)), m/(128χ²(n−m)), √(m/(64χ²n))},                     c = 32   Theorem 3
            s₁ = (σ_u² + 6δ²(1−m/n))/(mL_u) + 4σ_v²(m/n + χ²(1−m/n))/L_v
            s₂ = 8(σ_u² + 2δ²)(1−1/τ_u)/L_u + 4σ_v²(m/n)(1−1/τ_v)/L_v + χ²σ_v²/L_v
    FedSim  η ≤ min{1/(12(1+χ²)(1+ρ²)), √(m/(196n(1−1/τ)(1+χ²)(1+ρ²)))},             c = 8    Theorem 11
            s₁ = (1+χ²)(σ_u²/(2L_u) + σ_v²m/(L_v n) + 6δ²(1−m/n)/(mL_u))
            s₂ = (1+χ²)(1−1/τ)(24δ²/L_u + 4σ_u²/L_u + 4σ_v²/L_v)

The theorems leave out absolute constants; these are the constants of their proofs. Where the two differ: the
last condition of Theorem 3 lacks the 64 that the end of its proof needs; δ² has the factor 6 of Claim 7,
which becomes 3 and then 2 on the way; the last σ_v² of Theorem 11's proof stands over L_u.
"""

from __future__ import annotations

import math

from partita.core import check

Pair = tuple[float, float]
"""A constant of u, the shared part, and of v, the personal one."""


def coupling(smoothness: Pair, cross: float) -> float:
    """Return χ = L_uv/√(L_u L_v), how much each part's gradient depends on the other part (5).

    It is 0 where the loss is a sum of one in u and one in v, and at most 1 for a convex quadratic.

    smoothness  (L_u, L_v)
    cross       L_uv, the largest norm of the mixed second derivative
    """
    l_u, l_v = _pair("smoothness", smoothness, above=True)
    return check.number("cross", cross, low=0) / math.sqrt(l_u * l_v)


def partial_lr(eta: float, smoothness: Pair, steps: tuple[int, int]) -> Pair:
    """Return the step sizes (γ_u, γ_v) = (η/(L_u τ_u), η/(L_v τ_v)) of Theorems 1 and 2.

    They are `lr` and `personal_lr` of `fedalt` and `fedsim`. More local steps make each one smaller.

    eta         η, at most `fedalt_eta` or `fedsim_eta`
    smoothness  (L_u, L_v)
    steps       (τ_u, τ_v), local steps on each part in a round; those of FedSim are the same
    """
    check.number("eta", eta, low=0, open_low=True)
    l_u, l_v = _pair("smoothness", smoothness, above=True)
    tau_u, tau_v = _steps(steps)
    return eta / (l_u * tau_u), eta / (l_v * tau_v)


def fedalt_eta(chi: float, *, clients: int, cohort: int, rho: float = 0.0) -> float:
    """Return the largest η of Theorem 3, of FedAlt.

    With all clients in every round the coupling hardly matters; with few of many it must fall like m/n.

    chi      χ, see `coupling`
    clients  n, and `cohort` is m, how many of them take part in a round
    rho      ρ of (9)
    """
    chi, n, m, rho = _checked(chi, clients, cohort, rho)
    sampled = m / (128 * chi**2 * (n - m)) if chi and n > m else math.inf
    coupled = math.sqrt(m / (64 * chi**2 * n)) if chi else math.inf
    return min(1 / (24 * (1 + rho**2)), sampled, coupled)


def fedsim_eta(chi: float, *, clients: int, cohort: int, steps: int, rho: float = 0.0) -> float:
    """Return the largest η of Theorem 11, of FedSim.

    chi      χ, see `coupling`
    clients  n, and `cohort` is m, how many of them take part in a round
    steps    τ, local steps of a round
    rho      ρ of (9)
    """
    chi, n, m, rho = _checked(chi, clients, cohort, rho)
    again, both = 1 - 1 / check.integer("steps", steps, low=1), (1 + chi**2) * (1 + rho**2)
    drift = math.sqrt(m / (196 * n * again * both)) if again else math.inf
    return min(1 / (12 * both), drift)


def fedalt_bound(
    gap: float,
    *,
    rounds: int,
    eta: float,
    smoothness: Pair,
    chi: float,
    clients: int,
    cohort: int,
    steps: tuple[int, int] = (1, 1),
    noise: Pair = (0.0, 0.0),
    diversity: float = 0.0,
    rho: float = 0.0,
) -> float:
    """Return the bound of Theorem 3: of the mean of E[Δ_u/L_u + (m/n) Δ_v/L_v] over the rounds, for FedAlt.

    It holds for the step sizes `partial_lr(eta, smoothness, steps)` with η up to `fedalt_eta`; others are
    refused. With all clients and without noise it falls like 1/T where clients do not differ (δ = 0) or take
    one step on u; else η has to fall with T, too.

    gap         ΔF₀ = F(u⁰, V⁰) − F*
    rounds      T
    eta         η
    smoothness  (L_u, L_v)
    chi         χ, see `coupling`
    clients     n, and `cohort` is m, how many of them take part in a round
    steps       (τ_u, τ_v), local steps on each part
    noise       (σ_u², σ_v²), variances of a stochastic gradient
    diversity   δ² of (9), and `rho` its ρ
    """
    most = fedalt_eta(chi, clients=clients, cohort=cohort, rho=rho)
    first = _first(gap, rounds, eta, most)
    (l_u, l_v), (noise_u, noise_v) = _pair("smoothness", smoothness, above=True), _pair("noise", noise)
    delta, share = check.number("diversity", diversity, low=0), cohort / clients
    tau_u, tau_v = _steps(steps)
    s1 = (noise_u + 6 * delta * (1 - share)) / (cohort * l_u)
    s1 += 4 * noise_v * (share + chi**2 * (1 - share)) / l_v
    s2 = 8 * (noise_u + 2 * delta) * (1 - 1 / tau_u) / l_u
    s2 += (4 * share * (1 - 1 / tau_v) + chi**2) * noise_v / l_v
    return 32 * (first + eta * s1 + eta**2 * s2)


def fedsim_bound(
    gap: float,
    *,
    rounds: int,
    eta: float,
    smoothness: Pair,
    chi: float,
    clients: int,
    cohort: int,
    steps: int = 1,
    noise: Pair = (0.0, 0.0),
    diversity: float = 0.0,
    rho: float = 0.0,
) -> float:
    """Return the bound of Theorem 11: of the mean of E[Δ_u/L_u + (m/n) Δ_v/L_v] over the rounds, for FedSim.

    As `fedalt_bound`, but for η up to `fedsim_eta`, and with τ `steps` on both parts together.
    """
    most = fedsim_eta(chi, clients=clients, cohort=cohort, steps=steps, rho=rho)
    first = _first(gap, rounds, eta, most)
    (l_u, l_v), (noise_u, noise_v) = _pair("smoothness", smoothness, above=True), _pair("noise", noise)
    delta, share = check.number("diversity", diversity, low=0), cohort / clients
    s1 = noise_u / (2 * l_u) + noise_v * share / l_v + 6 * delta * (1 - share) / (cohort * l_u)
    s2 = (1 - 1 / steps) * (24 * delta / l_u + 4 * noise_u / l_u + 4 * noise_v / l_v)
    return 8 * (first + (1 + chi**2) * (eta * s1 + eta**2 * s2))


def _first(gap: float, rounds: int, eta: float, most: float) -> float:
    """Return ΔF₀/(ηT)."""
    check.number("eta", eta, low=0, open_low=True, high=most * (1 + 1e-12))
    return check.number("gap", gap, low=0) / (eta * check.integer("rounds", rounds, low=1))


def _checked(chi: float, clients: int, cohort: int, rho: float) -> tuple[float, int, int, float]:
    n = check.integer("clients", clients, low=1)
    m = check.integer("cohort", cohort, low=1, high=n)
    return check.number("chi", chi, low=0), n, m, check.number("rho", rho, low=0)


def _pair(field: str, values: Pair, above: bool = False) -> Pair:
    if not isinstance(values, tuple | list) or len(values) != 2:
        raise check.fail(field, values, "two numbers: of the shared part, and of the personal one")
    u, v = (check.number(field, value, low=0, open_low=above) for value in values)
    return u, v


def _steps(values: tuple[int, int]) -> tuple[int, int]:
    if not isinstance(values, tuple | list) or len(values) != 2:
        raise check.fail(
            "steps", values, "two whole numbers: steps on the shared part, and on the personal one"
        )
    u, v = (check.integer("steps", value, low=1) for value in values)
    return u, v
