"""PersA-FL: Toghani, Lee & Uribe, *Personalized Asynchronous Federated Learning* (2022), Theorems 1 to 3.

An asynchronous server takes T steps with β = 1 along what single clients send, drawn uniformly, after Q local
steps of size η; no upload is older than τ server steps. All f_i are L-smooth, a minibatch gradient has
variance σ_g²/b at most, and clients differ by γ_g²: (1/n) Σ_i ‖∇f_i − ∇f‖² ≤ γ_g². With

    η = 1/(Q √(L T)),    T ≥ 160 L (Q + 7) (τ + 1)³

    (1/T) Σ_t E‖∇f(w^t)‖² ≤ 4 √L (f(w⁰) − f*)/√T + 8 √L (σ_g²/b + γ_g²)/√T
                              + 80 L (1 + Q) (τ² + 1) (σ_g²/b + γ_g²)/T                        (Theorem 1)

The same holds for the objectives F of PersA-FL with constants of their own, and a bias μ of their gradients,
which no number of steps removes:

    F_i(w) = f_i(w − α ∇f_i(w))                    ‖∇f_i‖ ≤ G, ∇²f_i is ρ-Lipschitz        (option B: MAML)
        L_b = L (1 + α L)² + α ρ G                                                              (Lemma 1)
        μ_b = α L (1 + α L) σ_g/√b                                                              (Lemma 2)
        σ_b² = 3 (1 + αL)² σ_g² (1 + α²L²)/b + 3 α² G² σ_h²/b + 3 α² σ_g² σ_h² (1 + α²L²)/b²
        γ_b² = 12 (1 + αL)² (1 + α²L²) γ_g² + 12 α² G² γ_h²,    G_b = (1 + αL) G            (Lemmas 3, 4)
        bound: 4 √L_b (F(w⁰) − f*)/√T + 8 √L_b (σ_b² + γ_b²)/√T
               + 20 Q L_b (G_b² + σ_b²) (τ² + 1)/T + 4 Q μ_b²,    T ≥ 64 L_b                  (Theorem 2)

    F_i(w) = min_θ f_i(θ) + (λ/2) ‖θ − w‖²         θ up to ‖∇h‖ ≤ ν                       (option C: ME)
        L_c = λ L/(λ − L),  μ_c = λ ν/(λ − L),  σ_c² = 2 λ²/(λ − L)² (σ_g²/b + ν²)          (Lemmas 5, 6)
        γ_c² = 16 λ² γ_g²/(λ² − 48 L²),  λ ≥ 7 L                                                (Lemma 7)
        bound: 4 √L_c (F(w⁰) − f*)/√T + 8 √L_c (σ_c² + γ_c²)/√T
               + 144 L_c (1 + Q) (τ² + 1) (σ_c² + γ_c²)/T + 4 Q μ_c²                          (Theorem 3)

L_c is Lemma 5's with κ = λ/L. In two places Theorem 3 is printed with less than its proof uses, and we follow
the proof: γ_g² for γ_c² in its third term (C62), and T ≥ 288 L_c (Q + 7) (τ + 1)² where the factor of (C61),
which has to stay above 1/2, has τ (τ + 1)² and Theorem 1 has the cube: here it is (τ + 1)³.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from partita.core import check


class Objective(NamedTuple):
    """Constants of an objective F that clients minimize together, and of the estimates of its gradients.

    smoothness     L of F
    noise          σ², variance of an estimate
    heterogeneity  γ², mean squared distance of the clients' gradients to their mean
    bias           μ, how far the mean of an estimate is from the gradient
    gradient       G, length of the longest gradient (0: no theorem asks for it)
    kind           the method whose theorem it is: 'fedasync', 'persafl_maml' or 'persafl_me'
    """

    smoothness: float
    noise: float
    heterogeneity: float
    bias: float = 0.0
    gradient: float = 0.0
    kind: str = "fedasync"


def fedasync_objective(smoothness: float, noise: float = 0.0, heterogeneity: float = 0.0) -> Objective:
    """Return the constants of f, option A: they are its own.

    smoothness     L
    noise          σ_g²/b, variance of a minibatch gradient
    heterogeneity  γ_g²
    """
    check.number("smoothness", smoothness, low=0, open_low=True)
    check.number("noise", noise, low=0)
    check.number("heterogeneity", heterogeneity, low=0)
    return Objective(smoothness, noise, heterogeneity)


def persafl_maml_objective(
    smoothness: float,
    alpha: float,
    gradient: float,
    *,
    sample_noise: float = 0.0,
    heterogeneity: float = 0.0,
    batch: int = 1,
    hessian_lipschitz: float = 0.0,
    hessian_noise: float = 0.0,
    hessian_heterogeneity: float = 0.0,
) -> Objective:
    """Return the constants of f_i(w − α ∇f_i(w)), option B (Lemmas 1 to 4).

    smoothness             L of the f_i
    alpha                  α
    gradient               G, length of the longest ∇f_i
    sample_noise           σ_g², variance of the gradient of one sample
    heterogeneity          γ_g²
    batch                  b, samples of each minibatch
    hessian_lipschitz      ρ
    hessian_noise          σ_h², variance of the Hessian of one sample
    hessian_heterogeneity  γ_h²
    """
    check.number("smoothness", smoothness, low=0, open_low=True)
    check.integer("batch", batch, low=1)
    given = {
        "alpha": alpha,
        "gradient": gradient,
        "sample_noise": sample_noise,
        "heterogeneity": heterogeneity,
        "hessian_lipschitz": hessian_lipschitz,
        "hessian_noise": hessian_noise,
        "hessian_heterogeneity": hessian_heterogeneity,
    }
    for name, value in given.items():
        check.number(name, value, low=0)
    step = alpha * smoothness  # αL
    spread = (1 + step**2) / batch
    noise = (
        3 * (1 + step) ** 2 * sample_noise * spread
        + 3 * alpha**2 * gradient**2 * hessian_noise / batch
        + 3 * alpha**2 * sample_noise * hessian_noise * spread / batch
    )
    apart = 12 * (1 + step) ** 2 * (1 + step**2) * heterogeneity
    return Objective(
        smoothness=smoothness * (1 + step) ** 2 + alpha * hessian_lipschitz * gradient,
        noise=noise,
        heterogeneity=apart + 12 * alpha**2 * gradient**2 * hessian_heterogeneity,
        bias=step * (1 + step) * math.sqrt(sample_noise / batch),
        gradient=(1 + step) * gradient,
        kind="persafl_maml",
    )


def persafl_me_objective(
    smoothness: float, lam: float, nu: float = 0.0, *, noise: float = 0.0, heterogeneity: float = 0.0
) -> Objective:
    """Return the constants of min_θ f_i(θ) + (λ/2) ‖θ − w‖², option C (Lemmas 5 to 7).

    smoothness     L of the f_i
    lam            λ, at least 7 L
    nu             ν, accuracy of the inner problems
    noise          σ_g²/b, variance of a minibatch gradient
    heterogeneity  γ_g²
    """
    check.number("smoothness", smoothness, low=0, open_low=True)
    check.number("lam", lam, low=7 * smoothness)
    for name, value in {"nu": nu, "noise": noise, "heterogeneity": heterogeneity}.items():
        check.number(name, value, low=0)
    stretch = lam / (lam - smoothness)
    return Objective(
        smoothness=stretch * smoothness,
        noise=2 * stretch**2 * (noise + nu**2),
        heterogeneity=16 * lam**2 * heterogeneity / (lam**2 - 48 * smoothness**2),
        bias=stretch * nu,
        kind="persafl_me",
    )


def persafl_lr(smoothness: float, steps: int, rounds: int) -> float:
    """Return the step size of Theorems 1 to 3: η = 1/(Q √(L T)).

    smoothness  L of the objective, such as `persafl_me_objective(...).smoothness`
    steps       Q, local steps
    rounds      T, server steps
    """
    check.number("smoothness", smoothness, low=0, open_low=True)
    check.integer("steps", steps, low=1)
    check.integer("rounds", rounds, low=1)
    return 1 / (steps * math.sqrt(smoothness * rounds))


def persafl_rounds(objective: Objective, steps: int, staleness: int) -> int:
    """Return the least number of server steps T for which the objective's theorem holds.

    steps      Q, local steps
    staleness  τ, server steps since the download of the oldest upload
    """
    check.integer("steps", steps, low=1)
    check.integer("staleness", staleness, low=0)
    delayed = (steps + 7) * (staleness + 1) ** 3
    factor = {"fedasync": 160 * delayed, "persafl_maml": 64, "persafl_me": 288 * delayed}[objective.kind]
    return max(1, math.ceil(factor * objective.smoothness))


def persafl_bound(gap: float, objective: Objective, *, rounds: int, steps: int, staleness: int) -> float:
    """Return the bound of Theorem 1, 2 or 3 of the mean of E‖∇F(w^t)‖² over t = 0 ... T−1.

    It holds for β = 1 and steps of `persafl_lr`, from `persafl_rounds` server steps on; fewer are refused.

    gap        F(w⁰) − f*, where f* is the least value of any client's f_i
    objective  `fedasync_objective`, `persafl_maml_objective` or `persafl_me_objective`
    rounds     T, server steps
    steps      Q, local steps
    staleness  τ, server steps since the download of the oldest upload
    """
    check.number("gap", gap, low=0)
    check.integer("rounds", rounds, low=persafl_rounds(objective, steps, staleness))
    smoothness, apart = objective.smoothness, objective.noise + objective.heterogeneity
    slow = math.sqrt(smoothness / rounds)
    delay = smoothness * (staleness**2 + 1) / rounds
    of_delay = {
        "fedasync": 80 * (1 + steps) * apart,
        "persafl_maml": 20 * steps * (objective.gradient**2 + objective.noise),
        "persafl_me": 144 * (1 + steps) * apart,
    }
    floor = 4 * steps * objective.bias**2
    return 4 * slow * gap + 8 * slow * apart + delay * of_delay[objective.kind] + floor
