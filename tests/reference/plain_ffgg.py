"""FFGG once more, plainly: Mishchenko et al. (2023), Algorithms 1, 2, 4 and 5. See `plain`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from reference.plain import (
    ALL,
    B1,
    B2,
    PARTS,
    W1,
    W2,
    Given,
    Params,
    Rate,
    World,
    at,
    descend,
    logits,
    loss_and_gradient,
)

Solver = Callable[[Params, Sequence[str], Given, int, dict[str, Any]], Params]
"""(model, names of w, given, client, options) -> the model with w ≈ argmin_w f(θ, w)."""
Combine = Callable[[list[Params], list[float], Given], Params]
"""(Δ of each client, their weights, given) -> one Δ."""


# ---- Algorithm 1, line 4: solve w ≈ argmin_w f_m(θ, w)


def begin(w: Params, mine: Sequence[str], given: Given, i: int, start: str) -> Params:
    """Algorithm 2, line 1: each tensor from N(mean, std) of the model's own."""
    if start == "model":
        return w
    assert given.noise is not None
    z = given.noise(i)
    return {**w, **{k: w[k].mean() + w[k].std() * z[k] for k in mine}}


def afterwards(given: Given) -> Given:
    """The input of evaluation; after the last round, rates stay what they were."""
    assert given.after is not None
    now = given.after()
    return now._replace(t=min(now.t, now.rounds - 1))


def gd(steps: int | None, lr: Rate) -> Solver:
    """w ← w − γ ∇₂f(θ, w). Algorithm 2."""

    def solve(w: Params, mine: Sequence[str], given: Given, i: int, options: dict[str, Any]) -> Params:
        return descend(w, given, given.batches(i, 0, steps), dict.fromkeys(mine, at(lr, given)), options)[0]

    return solve


def adam(steps: int | None, lr: Rate, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> Solver:
    """Kingma & Ba (2015), Algorithm 1."""

    def solve(w: Params, mine: Sequence[str], given: Given, i: int, options: dict[str, Any]) -> Params:  # noqa: ARG001
        m, v = ({k: np.zeros_like(w[k]) for k in mine} for _ in range(2))
        for t, rows in enumerate(given.batches(i, 0, steps), start=1):
            g = loss_and_gradient(w, given.x[rows], given.y[rows])[1]
            m = {k: beta1 * m[k] + (1 - beta1) * g[k] for k in mine}
            v = {k: beta2 * v[k] + (1 - beta2) * g[k] ** 2 for k in mine}
            alpha = at(lr, given) * np.sqrt(1 - beta2**t) / (1 - beta1**t)
            small = eps * np.sqrt(1 - beta2**t)
            w = {**w, **{k: w[k] - alpha * m[k] / (np.sqrt(v[k]) + small) for k in mine}}
        return w

    return solve


def cg(steps: int) -> Solver:
    """So many directions of the Krylov space of H, in which the quadratic model is minimized."""

    def solve(w: Params, mine: Sequence[str], given: Given, i: int, options: dict[str, Any]) -> Params:  # noqa: ARG001
        if not given.n[i]:
            return w
        H, g = hessian(w, mine, given, i)
        K = np.zeros((len(g), 0))
        new = g
        for _ in range(steps):  # an orthonormal basis of g, Hg, H²g, ...
            new = new - K @ (K.T @ new)
            new = new - K @ (K.T @ new)
            K = np.column_stack([K, new / np.linalg.norm(new)])
            new = H @ K[:, -1]
        return moved(w, mine, -K @ np.linalg.solve(K.T @ H @ K, K.T @ g))

    return solve


def exact() -> Solver:
    """w ← w − H⁺∇₂f."""

    def solve(w: Params, mine: Sequence[str], given: Given, i: int, options: dict[str, Any]) -> Params:  # noqa: ARG001
        if not given.n[i]:
            return w
        H, g = hessian(w, mine, given, i)
        return moved(w, mine, -np.linalg.pinv(H, rcond=1e-7, hermitian=True) @ g)

    return solve


def hessian(w: Params, mine: Sequence[str], given: Given, i: int) -> tuple[np.ndarray, np.ndarray]:
    """∇²₂₂f = mean of (diag(p) − ppᵀ) ⊗ hhᵀ and ∇₂f of the last layer, on all data of a client."""
    assert tuple(mine) == (W2, B2)
    assert given.rows is not None
    x, y = given.x[given.rows(i)], given.y[given.rows(i)]
    h = np.maximum(x @ w[W1].T + w[B1], 0)
    h = np.column_stack([h, np.ones(len(h))])  # the bias is the weight of a feature that is always 1
    p = np.exp(logits(w, x))
    p /= p.sum(1, keepdims=True)
    S = np.eye(p.shape[1]) * p[:, None, :] - p[:, :, None] * p[:, None, :]
    H = np.einsum("nab,ni,nj->aibj", S, h, h) / len(x)
    n, d = p.shape[1], h.shape[1]
    order = np.arange(n * d).reshape(n, d)
    order = np.concatenate([order[:, :-1].ravel(), order[:, -1]])  # all weights, then all biases
    g = loss_and_gradient(w, x, y)[1]
    return H.reshape(n * d, n * d)[np.ix_(order, order)], np.concatenate([g[k].ravel() for k in mine])


def moved(w: Params, mine: Sequence[str], d: np.ndarray) -> Params:
    """w + d."""
    parts = np.split(d, np.cumsum([w[k].size for k in mine])[:-1])
    return {**w, **{k: w[k] + part.reshape(w[k].shape) for k, part in zip(mine, parts)}}


# ---- the server


def mean() -> Combine:
    """Algorithm 1, line 7."""
    return lambda deltas, alpha, given: {  # noqa: ARG005
        k: sum(a * d[k] for a, d in zip(alpha, deltas)) / sum(alpha) for k in deltas[0]
    }


def coordinate_median() -> Combine:
    """Of equal weights."""

    def combine(deltas: list[Params], alpha: list[float], given: Given) -> Params:  # noqa: ARG001
        assert len(set(alpha)) == 1
        return {k: np.median([d[k] for d in deltas], axis=0) for k in deltas[0]}

    return combine


def federated(
    world: World,
    given: Given,
    client: Callable[[int, Params], tuple[Params, float | None]],
    deployed: Callable[[World, int], Params],
    mine: Sequence[str],
    combine: Combine,
    options: dict[str, Any],
) -> World:
    """θ ← θ − combine(Δ_m), with the Δ_m and the loss of each client; nobody keeps anything."""
    deltas, alpha, losses = [], [], []
    for i in given.cohort:
        delta, loss = client(i, world.model)
        if given.n[i]:
            deltas.append(delta)
            alpha.append(float(given.n[i]) if options.get("weighting") == "samples" else 1.0)
            losses += [] if loss is None else [(loss, given.n[i])]
    theta = {k: x for k, x in world.model.items() if k not in mine}
    total = combine(deltas, alpha, given)
    loss = sum(x * n for x, n in losses) / sum(n for _, n in losses)
    model = {**world.model, **{k: theta[k] - total[k] for k in theta}}
    return World(model, {}, world.opt, loss, own=deployed)


# ---- the methods


def ffgg(
    world: World,
    given: Given,
    personal: str,
    lr: Rate,
    solver: Solver,
    start: str = "random",
    aggregate: Combine | None = None,
    evaluate: Solver | None = None,
    gradient: str = "full",
    **options: Any,
) -> World:
    """Δ_m = γ_θ ∇₁f_m(θ, w_m) over all data of the client, or over a batch after gd. Algorithms 1 and 5."""
    mine, rest = PARTS[personal], [k for k in ALL if k not in PARTS[personal]]

    def solved(model: Params, now: Given, i: int, by: Solver) -> Params:
        return by(begin(model, mine, now, i, start), mine, now, i, options)

    def client(i: int, model: Params) -> tuple[Params, float | None]:
        if not given.n[i]:
            return {}, None
        assert given.rows is not None
        w = solved(model, given, i, solver)
        seen = [given.rows(i)] if gradient == "full" else given.batches(i, 1, 1)
        once = {k: v for k, v in options.items() if k != "momentum"}
        after, (loss,) = descend(w, given, seen, dict.fromkeys(rest, at(lr, given)), once)
        return {k: w[k] - after[k] for k in rest}, loss

    def deployed(after: World, i: int) -> Params:
        return solved(after.model, afterwards(given), i, evaluate or solver)

    return federated(world, given, client, deployed, mine, aggregate or mean(), options)


def ffgg_robust(world: World, given: Given, *, aggregate: Combine | None = None, **options: Any) -> World:
    """Algorithm 5. By default buckets of 2, whose means have a median."""

    def bucketed(deltas: list[Params], alpha: list[float], given: Given) -> Params:
        assert len(set(alpha)) == 1
        assert given.order is not None
        order = given.order(len(deltas))
        pairs = [order[b : b + 2] for b in range(0, len(order), 2)]
        means = [{k: np.mean([deltas[j][k] for j in pair], axis=0) for k in deltas[0]} for pair in pairs]
        sizes = [len(pair) for pair in pairs]  # a bucket counts as much as those in it
        doubled = [m for m, n in zip(means, sizes) for _ in range(n)]
        return {k: np.median([d[k] for d in doubled], axis=0) for k in deltas[0]}

    return ffgg(world, given, aggregate=aggregate or bucketed, **options)


def ffgg_local(
    world: World,
    given: Given,
    personal: str,
    lr: Rate,
    personal_lr: Rate | None = None,
    solver: Solver | None = None,
    start: str = "random",
    evaluate: Solver | None = None,
    **options: Any,
) -> World:
    """Lines 5 to 9 of Algorithm 4."""
    mine, rest = PARTS[personal], [k for k in ALL if k not in PARTS[personal]]
    gamma_w = lr if personal_lr is None else personal_lr
    first = solver or gd(None, gamma_w)
    momentum = {k: v for k, v in options.items() if k != "momentum"}, options.get("momentum", 0.0)

    def solved(model: Params, now: Given, i: int, by: Solver) -> Params:
        return by(begin(model, mine, now, i, start), mine, now, i, options)

    def client(i: int, model: Params) -> tuple[Params, float | None]:
        w = solved(model, given, i, first)
        plainly, beta = momentum
        before, losses, last = w, [], {k: np.zeros_like(x) for k, x in w.items()}
        for rows in given.batches(i, 1, None):
            for names, rate in ((mine, gamma_w), (rest, lr)):
                # a step without momentum is w − γ g: its length is γ times the new term of the momentum
                after, (loss,) = descend(w, given, [rows], dict.fromkeys(names, 1.0), plainly)
                last |= {k: beta * last[k] + (w[k] - after[k]) for k in names}
                w = {**w, **{k: w[k] - at(rate, given) * last[k] for k in names}}
                losses.append(loss)
        return {k: before[k] - w[k] for k in rest}, float(np.mean(losses)) if losses else None

    def deployed(after: World, i: int) -> Params:
        return solved(after.model, afterwards(given), i, evaluate or first)

    return federated(world, given, client, deployed, mine, mean(), options)
