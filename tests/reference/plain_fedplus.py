"""Fed+ once more, plainly: NumPy, float64, from Kundu et al. (2022), section 4. See `plain.py`.

The soft threshold is the usual one; (12) of the paper as printed drops negative entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from reference.plain import ALL, Given, Params, Rate, World, at, loss_and_gradient

Prox = Callable[[Params], Params]
Combine = Callable[[Sequence[Params], np.ndarray], Params]
TOLERANCE, ITERATIONS = 1e-6, 1000


class Psi(NamedTuple):
    """prox_{Ψ/σ}, and 𝒜 (models, weights) -> w̃ of Equation 7."""

    prox: Prox
    combine: Combine


# ---- aggregation


def mean(models: Sequence[Params], weight: np.ndarray) -> Params:
    """Σ_k α_k w_k / Σ_k α_k."""
    total = weight.sum()
    return {k: sum(a * w[k] for a, w in zip(weight, models)) / total for k in models[0]}


def iterated(prox: Prox, delta: float, models: Sequence[Params], weight: np.ndarray) -> Params:
    """Equation 13: θ_k ← prox(w_k − w̃), w̃ ← w_mean − mean θ_k, from w_mean until w̃ stands still."""
    average = center = mean(models, weight)
    for _ in range(ITERATIONS):
        theta = [prox({k: w[k] - center[k] for k in w}) for w in models]
        shift = mean(theta, weight)
        before, center = center, {k: average[k] - shift[k] for k in average}
        step = {k: center[k] - before[k] for k in center}
        if still(step, prox, delta):
            break
    return center


def still(step: Params, prox: Prox, delta: float) -> bool:
    """The whole step in units of δ for a geometric median, the largest coordinate for the other."""
    if prox.__name__ == "geometric":
        return bool(np.sqrt(sum((v**2).sum() for v in step.values())) <= TOLERANCE * delta)
    return all(np.abs(v).max() <= TOLERANCE * delta for v in step.values())


# ---- the penalties


def avg(delta: float = 0.1) -> Psi:
    """(σδ/2) ‖·‖₂²: θ = x / (1 + δ), and the mean."""
    return Psi(lambda x: {k: v / (1 + delta) for k, v in x.items()}, mean)


def geomed(delta: float = 0.1) -> Psi:
    """σδ ‖·‖₂: θ = max(0, 1 − δ/‖x‖) x, all names one vector."""

    def geometric(x: Params) -> Params:
        length = np.sqrt(sum((v**2).sum() for v in x.values()))
        scale = 0.0 if length <= delta else 1 - delta / length
        return {k: scale * v for k, v in x.items()}

    return Psi(geometric, lambda models, weight: iterated(geometric, delta, models, weight))


def comed(delta: float = 0.1) -> Psi:
    """σδ ‖·‖₁: θ = sign(x) max(0, |x| − δ). A layer at a time, so that each stops by itself."""

    def soft(x: Params) -> Params:
        return {k: np.sign(v) * np.maximum(0.0, np.abs(v) - delta) for k, v in x.items()}

    def combine(models: Sequence[Params], weight: np.ndarray) -> Params:
        return {k: iterated(soft, delta, [{k: w[k]} for w in models], weight)[k] for k in models[0]}

    return Psi(soft, combine)


def free() -> Psi:
    """Ψ = 0: θ = x."""
    return Psi(lambda x: x, mean)


def fixed() -> Psi:
    """Ψ = ∞ but at 0: θ = 0."""
    return Psi(lambda x: {k: 0 * v for k, v in x.items()}, mean)


def layerwise(penalties: dict[str, Psi]) -> Psi:
    """Another Ψ for each group of layers (section 4.4.1, hybridization)."""

    def part(pattern: str, x: Params) -> Params:
        first = {k: next(p for p in penalties if fnmatchcase(k, p)) for k in x}
        return {k: v for k, v in x.items() if first[k] == pattern}

    def prox(x: Params) -> Params:
        return {k: v for p, psi in penalties.items() for k, v in psi.prox(part(p, x)).items()}

    def combine(models: Sequence[Params], weight: np.ndarray) -> Params:
        found: Params = {}
        for p, psi in penalties.items():
            some = [part(p, w) for w in models]
            found |= psi.combine(some, weight) if some[0] else {}
        return found

    return Psi(prox, combine)


# ---- Algorithm 1


def fedplus(
    world: World,
    given: Given,
    psi: Psi,
    lr: Rate,
    sigma: float,
    lam: float = 0.0,
    over: str = "cohort",
    **options: Any,
) -> World:
    """θ = prox(w_k − w̃); from (1−λ) w_k + λ w̃ steps w ← κ [w − η g] + (1−κ) [w̃ + θ]; w̃ = 𝒜(W)."""
    center, eta = world.model, at(lr, given)
    opt = world.opt or {"first": center, "seen": {}}  # w̃⁰, and the samples of those who have reported
    own, losses = dict(world.personal), []
    kappa = 1 / (1 + eta * sigma)
    reported = {}
    for k in given.cohort:
        w_k = own.get(k, opt["first"])
        theta = psi.prox({n: w_k[n] - center[n] for n in ALL})
        w = {n: (1 - lam) * w_k[n] + lam * center[n] for n in ALL}
        m, seen = {n: np.zeros_like(w[n]) for n in ALL}, []
        for rows in given.batches(k, 0, None):
            loss, g = loss_and_gradient(w, given.x[rows], given.y[rows])
            seen.append(loss)
            m = direction(w, g, m, options)
            w = {n: kappa * (w[n] - eta * m[n]) + (1 - kappa) * (center[n] + theta[n]) for n in ALL}
        reported[k] = w
        losses += [(np.mean(seen), given.n[k])] if seen else []
    counts = {**opt["seen"], **{k: float(given.n[k]) for k in given.cohort}}
    models = {**opt.get("last", {}), **reported}
    by_samples = options.get("weighting", "uniform") == "samples"
    if over == "cohort":
        who = list(given.cohort)
    else:
        who = list(range(len(given.n)))
    weight = np.array([alpha(counts.get(k), by_samples) for k in who])
    if weight.sum() > 0:
        voters = [k for k, a in zip(who, weight) if a > 0]
        center = psi.combine([models.get(k, opt["first"]) for k in voters], weight[weight > 0])
    total = sum(n for _, n in losses)
    loss = float(sum(v * n for v, n in losses) / total) if total else None
    kept = {**own, **reported} if given.keeps else {}
    return World(center, kept, {**opt, "seen": counts, "last": models}, loss, own=client_model)


def alpha(samples: float | None, by_samples: bool) -> float:
    """A client never seen counts as one, or not at all by samples; one without data never."""
    if samples is None:
        return 0.0 if by_samples else 1.0
    return samples if by_samples else float(samples > 0)


def direction(w: Params, g: Params, m: Params, options: dict[str, Any]) -> Params:
    """g ← g min(1, G/‖g‖); g ← g + ω w; m ← β m + g."""
    if options.get("max_grad_norm"):
        length = np.sqrt(sum((v**2).sum() for v in g.values()))
        g = {k: v * min(1.0, options["max_grad_norm"] / length) for k, v in g.items()}
    return {
        k: options.get("momentum", 0.0) * m[k] + g[k] + options.get("weight_decay", 0.0) * w[k] for k in g
    }


def client_model(world: World, k: int) -> Params:
    """The client's own w_k; w̃⁰ before it was ever seen."""
    return world.personal.get(k, world.opt["first"])


def fedavg_plus(world: World, given: Given, lr: Rate, sigma: float, delta: float = 0.1, **more: Any) -> World:
    """Ψ = (σδ/2) ‖·‖₂²."""
    return fedplus(world, given, avg(delta), lr, sigma, **more)


def fedgeomed_plus(
    world: World, given: Given, lr: Rate, sigma: float, delta: float = 0.1, **more: Any
) -> World:
    """Ψ = σδ ‖·‖₂."""
    return fedplus(world, given, geomed(delta), lr, sigma, **more)


def fedcomed_plus(
    world: World, given: Given, lr: Rate, sigma: float, delta: float = 0.1, **more: Any
) -> World:
    """Ψ = σδ ‖·‖₁."""
    return fedplus(world, given, comed(delta), lr, sigma, **more)
