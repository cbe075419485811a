"""Methods with a loss of their own, plainly: see `plain.py`.

Features are h = max(0, W₁ x + b₁). Gradients are by the chain rule, by hand. The model that the stage began
with is kept under "start" in `World.opt`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from reference.plain import ALL, B1, B2, PARTS, W1, W2, Given, Params, Rate, World, at
from reference.plain_full import moved, plus, zeros

HEAD = PARTS["output"]
Objective = Callable[[Params, np.ndarray, np.ndarray], tuple[float, Params]]


def features(w: Params, x: np.ndarray) -> np.ndarray:
    return np.maximum(x @ w[W1].T + w[B1], 0)


def cross_entropy(z: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    """The mean of −log softmax(z)_y, and its derivative with respect to z."""
    log_p = z - z.max(1, keepdims=True)
    log_p = log_p - np.log(np.exp(log_p).sum(1, keepdims=True))
    return -log_p[np.arange(len(y)), y].mean(), (np.exp(log_p) - np.eye(z.shape[1])[y]) / len(y)


def backwards(w: Params, x: np.ndarray, dz: np.ndarray, dh: np.ndarray | float) -> Params:
    """The gradient, from the derivatives with respect to logits and, beside them, to features."""
    h = features(w, x)
    da = (dz @ w[W2] + dh) * (h > 0)
    return {W1: da.T @ x, B1: da.sum(0), W2: dz.T @ h, B2: dz.sum(0)}


def steps(
    w: Params, given: Given, i: int, f: Objective, eta: float, options: dict[str, Any]
) -> tuple[Params, list[float]]:
    """A step on everything for each batch of the first phase, and the losses before each."""
    m, losses = zeros(w), []
    for rows in given.batches(i, 0, None):
        loss, g = f(w, given.x[rows], given.y[rows])
        losses.append(loss)
        w, m = moved(w, g, m, eta, options)
    return w, losses


def counts(given: Given, i: int, classes: int = 4) -> np.ndarray:
    assert given.rows is not None
    return np.bincount(given.y[given.rows(i)], minlength=classes)


def mean_loss(given: Given, losses: dict[int, list[float]]) -> float | None:
    seen = {i: np.mean(values) for i, values in losses.items() if values}
    weight = sum(given.n[i] for i in seen)
    return float(sum(given.n[i] * value for i, value in seen.items()) / weight) if weight else None


def average(given: Given, models: dict[int, Params], before: Params, options: dict[str, Any]) -> Params:
    """w ← w + Σ α_i (w_i − w) / Σ α_i."""
    uniform = options.get("weighting") == "uniform"
    alpha = {i: float(given.n[i] > 0) if uniform else float(given.n[i]) for i in models}
    total = sum(alpha.values()) or 1.0
    return {k: before[k] + sum(alpha[i] * (models[i][k] - before[k]) for i in models) / total for k in ALL}


# ---- MOON: Li, He & Song (2021), Algorithm 1


def cosine(z: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """cos(z, g) of each row, and its derivative with respect to z; 0 where there is nothing."""
    length, other = (np.maximum(np.linalg.norm(v, axis=1, keepdims=True), 1e-12) for v in (z, g))
    s = (z * g).sum(1, keepdims=True) / (length * other)
    return s[:, 0], g / (length * other) - s * z / length**2


def moon(world: World, given: Given, lr: Rate, mu: float = 1.0, tau: float = 0.5, **options: Any) -> World:
    """−log(e^{sim(z, z_glob)/τ} / (e^{sim(z, z_glob)/τ} + e^{sim(z, z_prev)/τ})) beside the cross entropy."""
    start = world.opt.get("start", world.model)
    memory = world.memory if "start" in world.opt else {}
    models, losses = {}, {}
    for i in given.cohort:
        previous = memory.get(i, start)

        def f(w: Params, x: np.ndarray, y: np.ndarray, previous: Params = previous) -> tuple[float, Params]:
            h = features(w, x)
            loss, dz = cross_entropy(h @ w[W2].T + w[B2], y)
            to_glob, d_glob = cosine(h, features(world.model, x))
            to_prev, d_prev = cosine(h, features(previous, x))
            up, down = np.exp(to_glob / tau), np.exp(to_prev / tau)
            share = down / (up + down)  # the derivative of −log(up / (up + down))
            dh = mu / len(y) * share[:, None] * (d_prev - d_glob) / tau
            return loss + mu * np.mean(-np.log(up / (up + down))), backwards(w, x, dz, dh)

        models[i], losses[i] = steps(world.model, given, i, f, at(lr, given), options)
    kept = {**memory, **models} if given.keeps else memory
    new = average(given, models, world.model, options)
    return World(new, {}, {"start": start}, mean_loss(given, losses), memory=kept)


# ---- FedProto: Tan et al. (2022), Algorithm 1


def fedproto(
    world: World,
    given: Given,
    lr: Rate,
    lam: float = 1.0,
    predict: str = "prototypes",
    **options: Any,
) -> World:
    """λ times the mean squared difference of each feature to that of the prototype of its class."""
    known = world.opt.get("known", {}) if "start" in world.opt else {}
    personal, losses, sent = dict(world.personal), {}, []

    def f(w: Params, x: np.ndarray, y: np.ndarray) -> tuple[float, Params]:
        h = features(w, x)
        loss, dz = cross_entropy(h @ w[W2].T + w[B2], y)
        dh, total = np.zeros_like(h), 0.0
        for row, label in enumerate(y):
            if str(label) in known:
                apart = h[row] - known[str(label)]
                total += lam * (apart**2).mean()
                dh[row] = lam * 2 * apart / len(apart) / len(y)
        return loss + total / len(y), backwards(w, x, dz, dh)

    for i in given.cohort:
        w, losses[i] = steps({**world.model, **personal.get(i, {})}, given, i, f, at(lr, given), options)
        if given.keeps:
            personal[i] = w
        assert given.rows is not None
        rows = given.rows(i)
        for label in np.unique(given.y[rows]):
            of_class = rows[given.y[rows] == label]
            sent.append((str(label), features(w, given.x[of_class]).mean(0), len(of_class)))
    for label in {label for label, _, _ in sent}:
        uniform = options.get("weighting") == "uniform"
        of_class = [(c, 1 if uniform else n) for name, c, n in sent if name == label]
        known = {**known, label: sum(n * c for c, n in of_class) / sum(n for _, n in of_class)}

    def own(world: World, i: int) -> Params:
        w = {**world.model, **world.personal.get(i, {})}
        if predict == "classifier" or not known:
            return w
        points = [known.get(k, np.zeros_like(w[W2][0])) for k in "0123"]
        biases = [-(c**2).sum() if k in known else -1e9 for k, c in zip("0123", points)]
        return {**w, W2: 2 * np.stack(points), B2: np.array(biases)}

    opt = {"start": world.model, "known": known}
    return World(world.model, personal, opt, mean_loss(given, losses), own=own)


# ---- FedRoD: Chen & Chao (2022), Algorithm 1


def fedrod(world: World, given: Given, lr: Rate, personal_lr: Rate | None = None, **options: Any) -> World:
    """Balanced softmax for the generic head; the personal one learns what is missing in its logits."""
    memory = dict(world.memory) if "start" in world.opt else {}
    start = world.opt.get("start", world.model)
    eta, eta_own = at(lr, given), at(lr if personal_lr is None else personal_lr, given)
    models, losses, personal = {}, {}, dict(world.personal)
    for i in given.cohort:
        w, m, losses[i] = world.model, zeros(world.model), []
        psi = memory.get(i, zeros({k: start[k] for k in HEAD}))
        m_own, n = zeros(psi), counts(given, i)
        for rows in given.batches(i, 0, None):
            x, y = given.x[rows], given.y[rows]
            h = features(w, x)
            generic, own = h @ w[W2].T + w[B2], h @ psi[W2].T + psi[B2]
            with np.errstate(divide="ignore"):
                _, dz = cross_entropy(generic + np.log(n), y)
            loss, dz_own = cross_entropy(generic + own, y)
            losses[i].append(loss)
            g_own = {W2: dz_own.T @ h, B2: dz_own.sum(0)}
            w, m = moved(w, backwards(w, x, dz, 0.0), m, eta, options)
            psi, m_own = moved(psi, g_own, m_own, eta_own, options)
        models[i] = w
        if given.keeps:
            memory[i] = psi
            personal[i] = {k: w[k] + psi[k] for k in HEAD}

    def own_model(world: World, i: int) -> Params:
        nothing = zeros({k: start[k] for k in HEAD})
        return {**world.model, **plus({k: world.model[k] for k in HEAD}, 1.0, world.memory.get(i, nothing))}

    new = average(given, models, world.model, options)
    return World(new, personal, {"start": start}, mean_loss(given, losses), memory=memory, own=own_model)
