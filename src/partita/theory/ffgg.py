"""FFGG: Mishchenko et al., *Partially Personalized Federated Learning* (2023), Theorems 1 and 6 to 8.

F_m(θ) = ∇₁f_m(θ, w_m*(θ)) is 1/L-cocoercive (Assumption 1), F is the mean of the F_m, one θ* has F_m(θ*) = 0
for all m (Assumption 2), and r₀ = ‖θ⁰ − θ*‖.

    exact        γ ≤ 1/L:               min_{r<R} ‖F(θ^r)‖² ≤ L r₀² / (γR)                       Theorem 1
    τ steps      γ ≤ 1/(2L), γ_w = 1/L_w:  min_{r<R} ‖F(θ^r)‖² ≤ 4L r₀² / (γR)  where            Theorem 6
                 τ ≥ L_w/μ_w · max{2 log aR, 2 log(bR/r₀), log(b²R/r₀²)},  a = 2 L_w A/L,  b = 2 L_w C/L
    asynchronous γ ≤ 1/(2L √(2M τ_max)):  min_{r<R} ‖F(θ^r)‖² ≤ 2L ‖θ̂⁰ − θ*‖² / (γR)             Theorem 7
    Byzantine    ‖θ^R − θ*‖² ≤ (1 − γμ/2)^R r₀²  where                                           Theorem 8
                 S = (ρ + 1/(G−1)) ℓ_sim + (ρ − 1) L
                 δ ≤ μ/(8cS)                                                       (22) as its proof needs it
                 γ ≤ 1 / (4 ((ρ − 1)(L + ℓ_sim)/G + L + 2cδS))                                       (23)

Where the text and the proofs differ: Theorem 6 says γ = 1/L, but (9) needs γ ≤ 1/(2L), and its induction
shows 5r₀² where it goes on with r₀². Theorem 7 prints √(2M) τ_max, while the last step of its proof needs
√(2M τ_max), as the remark after it says. (22) prints δ ≤ μ/(2cS): Young's inequality before (25) has γ/(2μ)
where γμ/2 on its other side leaves 2γ/μ, four times as much, and with the printed share the rate is wrong.
All constants of Theorem 8 are those of the G honest clients.
"""

from __future__ import annotations

import math

from partita.core import check

AGGREGATORS = ("coordinate_median", "geometric_median", "krum")


# ---- synchronously


def ffgg_lr(smoothness: float) -> float:
    """Return the largest step γ_θ of Theorem 1: 1/L.

    smoothness  L of Assumption 1; `constants.ell` of a quadratic problem is the smallest
    """
    return 1 / _positive("smoothness", smoothness)


def ffgg_bound(distance: float, *, rounds: int, lr: float, smoothness: float, exact: bool = True) -> float:
    """Return the bound of min_{r<R} ‖F(θ^r)‖²: L r₀²/(γR) of Theorem 1, or four times that of Theorem 6.

    distance  r₀ = ‖θ⁰ − θ*‖
    rounds    R
    lr        γ_θ, up to `ffgg_lr`, or up to half of it for Theorem 6
    exact     whether clients solve for w exactly (Theorem 1) or take `ffgg_steps` steps (Theorem 6)
    """
    L, R = _positive("smoothness", smoothness), check.integer("rounds", rounds, low=1)
    if exact:
        return _bound(distance, R, lr, L, ffgg_lr(L))
    return 4 * _bound(distance, R, lr, L, ffgg_lr(L) / 2)


def ffgg_steps(
    rounds: int,
    *,
    smoothness: float,
    personal_smoothness: float,
    personal_convexity: float,
    slope: float,
    offset: float,
    distance: float,
) -> int:
    """Return the local steps τ of Theorem 6, of size 1/L_w from w = 0, for R rounds; it grows with log R.

    smoothness           L
    personal_smoothness  L_w: both ∇₁f_m and ∇₂f_m are L_w-Lipschitz in w
    personal_convexity   μ_w: f_m is μ_w-strongly convex in w
    slope, offset        A and C: ‖w_m*(θ)‖ ≤ A ‖θ − θ*‖ + C. Where w begins elsewhere, C + ‖w⁰‖
    distance             r₀, at least ‖θ⁰ − θ*‖
    """
    R, r0 = check.integer("rounds", rounds, low=1), _positive("distance", distance)
    L, L_w = _positive("smoothness", smoothness), _positive("personal_smoothness", personal_smoothness)
    mu_w = check.number("personal_convexity", personal_convexity, low=0, high=L_w, open_low=True)
    a = 2 * L_w * check.number("slope", slope, low=0) / L
    b = 2 * L_w * check.number("offset", offset, low=0) / L
    terms = [2 * _log(a * R), 2 * _log(b * R / r0), _log(b**2 * R / r0**2)]
    return max(1, math.ceil(L_w / mu_w * max(terms))) if max(terms) > 0 else 1


# ---- asynchronously


def ffgg_async_lr(smoothness: float, active: int, delay: int) -> float:
    """Return the largest step γ_θ of Theorem 7, taken on each arrival: 1/(2L √(2M τ_max)).

    smoothness  L of Assumption 1
    active      M, clients at work at a time
    delay       τ_max, server steps from a client's download to the one along its gradient, that one included:
                the largest staleness and one
    """
    M, tau = check.integer("active", active, low=1), check.integer("delay", delay, low=1)
    return 1 / (2 * _positive("smoothness", smoothness) * math.sqrt(2 * M * tau))


def ffgg_async_bound(
    distance: float, *, arrivals: int, lr: float, smoothness: float, active: int, delay: int
) -> float:
    """Return the bound of Theorem 7 for min_{r<R} E‖F(θ^r)‖²: 2L ‖θ̂⁰ − θ*‖²/(γR).

    It holds with exact solutions, and where the next client is drawn at random, all with the same chance.

    distance  ‖θ̂⁰ − θ*‖ with θ̂⁰ = θ⁰ − γ Σ F_m(θ⁰) over the clients that are at work at first (15)
    arrivals  R, steps of the server
    lr        γ_θ, up to `ffgg_async_lr`
    """
    L, R = _positive("smoothness", smoothness), check.integer("arrivals", arrivals, low=1)
    return 2 * _bound(distance, R, lr, L, ffgg_async_lr(L, active, delay))


# ---- with Byzantine clients


def ffgg_robust_share(
    *, convexity: float, smoothness: float, similarity: float, honest: int, c: float, rho: float = 1.0
) -> float:
    """Return the share δ of Byzantine clients up to which Theorem 8 holds: infinite where all agree.

    It is a quarter of what (22) prints, for which the theorem does not hold (see the module).
    An aggregator has a breakdown point of its own, below ½. The constants are those of honest clients:

    convexity   μ: all F_m are μ-quasi-strongly monotone (21)
    smoothness  L of Assumption 1
    similarity  ℓ_sim of (20), at most L
    honest      G
    c           of the aggregator (Definition 2), see `aggregator_constant`
    rho         ρ of (19): E‖g_m‖² ≤ ρ‖F_m‖² for the unbiased g_m that clients send; 1 where g_m = F_m
    """
    mu = _positive("convexity", convexity)
    apart = _positive("c", c) * _apart(smoothness, similarity, honest, rho)
    return mu / (8 * apart) if apart else math.inf


def ffgg_robust_lr(
    *, smoothness: float, similarity: float, honest: int, byzantine: int, c: float, rho: float = 1.0
) -> float:
    """Return the largest step γ_θ of Theorem 8, by (23), where δ = B/(G + B) is at most `ffgg_robust_share`.

    byzantine  B, fewer than G; the other arguments as there
    """
    S, G = _apart(smoothness, similarity, honest, rho), honest
    delta = check.integer("byzantine", byzantine, low=0, high=G - 1) / (G + byzantine)
    noise = (rho - 1) * (smoothness + similarity) / G
    return 1 / (4 * (noise + smoothness + 2 * _positive("c", c) * delta * S))


def ffgg_robust_rate(lr: float, convexity: float) -> float:
    """Return 1 − γμ/2, by which E‖θ − θ*‖² falls at least in each round (Theorem 8, Equation 24).

    lr         γ_θ, up to `ffgg_robust_lr`, which is never above 1/(4μ): larger ones are refused
    convexity  μ
    """
    mu = _positive("convexity", convexity)
    return 1 - _step(lr, 1 / (4 * mu)) * mu / 2


def aggregator_constant(aggregator: str, clients: int, byzantine: int, bucket: int = 1) -> float:
    """Return c of Definition 2 for an aggregator over random buckets: E‖x̂ − x̄‖² ≤ c (B/M) σ².

    x̄ is the mean of the G = M − B honest vectors and σ² the mean of ‖x_m − x_n‖² over their pairs. At worst
    each Byzantine client spoils a bucket of its own. With n = M/s buckets, g = n − B of them honest, and V
    the mean of their ‖y − x̄‖², whose expectation is σ² (G − s)/(2sG),

        medians   ‖x̂ − x̄‖² ≤ (2g/(g − B))² V
                  as 0 ≥ Σ (‖y − x̂‖ − ‖y − x̄‖) ≥ (g − B) ‖x̂ − x̄‖ − 2 Σ_honest ‖y − x̄‖
        krum      ‖x̂ − x̄‖² ≤ 2g (2q/(g − 1) + 1)/(q − B) V,   q = n − B − 2 neighbours
                  as Krum's score is at most the mean of the honest ones, and q − B neighbours are honest

    The orders are those of Karimireddy et al. (2022, Theorem I), who give no numbers; the coordinate median
    needs no factor d, as the bound of the medians holds for every coordinate. Without buckets c grows like
    1/δ: medians and Krum then err even where nobody is Byzantine.

    aggregator  'coordinate_median', 'geometric_median' or 'krum' (with f = B)
    clients     M
    byzantine   B, at least 1: less than half of the buckets, for Krum at most (n − 3)/2
    bucket      s, clients in a bucket, a divisor of M
    """
    check.choice("aggregator", aggregator, AGGREGATORS)
    M, B = check.integer("clients", clients, low=3), check.integer("byzantine", byzantine, low=1)
    s = check.integer("bucket", bucket, low=1)
    if M % s:
        raise check.fail("bucket", s, f"a divisor of the {M} clients")
    n = M // s
    most = (n - 3) // 2 if aggregator == "krum" else (n - 1) // 2
    if most < B:
        raise check.fail("byzantine", B, f"at most {max(most, 0)} for {aggregator} over {n} buckets")
    g, G = n - B, M - B
    if aggregator == "krum":
        q = n - B - 2
        kappa = 2 * g * (2 * q / (g - 1) + 1) / (q - B)
    else:
        kappa = (2 * g / (g - B)) ** 2
    return kappa * (G - s) / (2 * s * G) * M / B


def _apart(smoothness: float, similarity: float, honest: int, rho: float) -> float:
    """Return S = (ρ + 1/(G−1)) ℓ_sim + (ρ − 1) L: how far what honest clients send lies apart."""
    L, G = _positive("smoothness", smoothness), check.integer("honest", honest, low=2)
    ell, rho = check.number("similarity", similarity, low=0, high=L), check.number("rho", rho, low=1)
    return (rho + 1 / (G - 1)) * ell + (rho - 1) * L


def _bound(distance: float, steps: int, lr: float, smoothness: float, largest: float) -> float:
    """Return L ‖·‖²/(γR), for steps up to the largest; others are refused."""
    return smoothness * check.number("distance", distance, low=0) ** 2 / (_step(lr, largest) * steps)


def _step(lr: float, largest: float) -> float:
    gamma = _positive("lr", lr)
    if gamma > largest * (1 + 1e-9):
        raise check.fail("lr", lr, f"a number above 0 up to {largest:.4g}, for which the theorem holds")
    return gamma


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def _positive(field: str, value: float) -> float:
    return check.number(field, value, low=0, open_low=True)
