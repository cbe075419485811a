"""Full personalization, control variates and robust means, plainly: see `plain.py`.

A client's own model is a whole one here. New clients begin with the model that the stage began with, which is
kept under "start" in `World.opt`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from reference.plain import (
    ALL,
    B1,
    B2,
    W1,
    W2,
    Given,
    Params,
    Rate,
    World,
    at,
    descend,
    fedavg,
    logits,
    loss_and_gradient,
)

# ---- arithmetic, and the client's step


def plus(x: Params, a: float, y: Params) -> Params:
    """x + a y."""
    return {k: x[k] + a * y[k] for k in x}


def zeros(x: Params) -> Params:
    return {k: np.zeros_like(v) for k, v in x.items()}


def mean(x: Sequence[Params], weight: Sequence[float]) -> Params:
    """Σ w_i x_i / Σ w_i; zero when nobody has weight."""
    total = sum(weight)
    return {k: sum(w * p[k] for w, p in zip(weight, x)) / (total or 1.0) for k in ALL}


def moved(w: Params, g: Params, m: Params, eta: float, options: dict[str, Any]) -> tuple[Params, Params]:
    """g ← g min(1, G/‖g‖);  g ← g + ω w;  m ← β m + g;  w ← w − η m."""
    if options.get("max_grad_norm"):
        length = np.sqrt(sum((v**2).sum() for v in g.values()))
        g = {k: v * min(1.0, options["max_grad_norm"] / length) for k, v in g.items()}
    g = plus(g, options.get("weight_decay", 0.0), w)
    m = {k: options.get("momentum", 0.0) * m[k] + g[k] for k in g}
    return plus(w, -eta, m), m


def curvature(w: Params, x: np.ndarray, y: np.ndarray, d: Params) -> Params:
    """∇²f(w) d: the derivative along d of every line of `loss_and_gradient` (Pearlmutter 1994)."""
    n, a = len(y), x @ w[W1].T + w[B1]
    on, h, z = a > 0, np.maximum(a, 0), logits(w, x)
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    dz = (p - np.eye(z.shape[1])[y]) / n
    r_h = (x @ d[W1].T + d[B1]) * on
    r_z = r_h @ w[W2].T + h @ d[W2].T + d[B2]
    r_dz = p * (r_z - (p * r_z).sum(1, keepdims=True)) / n
    r_da = (r_dz @ w[W2] + dz @ d[W2]) * on
    return {W1: r_da.T @ x, B1: r_da.sum(0), W2: r_dz.T @ h + dz.T @ r_h, B2: r_dz.sum(0)}


# ---- one round


class Done(NamedTuple):
    """After a round: the model that a client sends, its own, its memory, losses, what else it sends."""

    w: Params
    v: Params
    memory: Params
    losses: list[float]
    extra: Params | None = None


def begun(world: World) -> World:
    """Remember the model that the stage begins with."""
    return world if world.opt else world._replace(opt={"start": world.model})


def own(world: World, i: int) -> Params:
    """A client's own model."""
    return world.personal.get(i, world.opt["start"])


def together(
    world: World,
    given: Given,
    client: Callable[[int], Done],
    options: dict[str, Any],
    server: Callable[[Params, Params], Params] = lambda old, new: new,  # noqa: ARG005
    weighting: str = "uniform",
    combine: Callable[[Sequence[Params], Sequence[float]], Params] = mean,
    keeps_models: bool = True,
) -> tuple[World, list[Done], list[float]]:
    """Clients train from the server's w, which becomes a mean of theirs; what each has and its weight."""
    by_samples = options.get("weighting", weighting) == "samples"
    done = [client(i) for i in given.cohort]
    weight = [float(given.n[i] if by_samples else given.n[i] > 0) for i in given.cohort]
    away = [plus(d.w, -1.0, world.model) for d in done]
    model = server(world.model, plus(world.model, 1.0, combine(away, weight)))
    losses = [(np.mean(d.losses), given.n[i]) for d, i in zip(done, given.cohort) if d.losses]
    total = sum(n for _, n in losses)
    loss = float(sum(value * n for value, n in losses) / total) if total else None
    personal, memory = dict(world.personal), dict(world.memory)
    if given.keeps:
        memory |= {i: d.memory for d, i in zip(done, given.cohort)}
        personal |= {i: d.v for d, i in zip(done, given.cohort)} if keeps_models else {}
    return world._replace(model=model, personal=personal, memory=memory, loss=loss), done, weight


# ---- full personalization


def ditto(
    world: World, given: Given, lr: Rate, lam: float, personal_lr: Rate | None = None, **options: Any
) -> World:
    """w_k ← w − η ∇F_k(w);  v_k ← v_k − η (∇F_k(v_k) + λ (v_k − w^t)). Li et al. (2021), Algorithm 1."""
    world = begun(world)
    eta, eta_v = at(lr, given), at(lr if personal_lr is None else personal_lr, given)

    def client(i: int) -> Done:
        w, first = descend(world.model, given, given.batches(i, 0, None), dict.fromkeys(ALL, eta), options)
        rates, batches = dict.fromkeys(ALL, eta_v), given.batches(i, 1, None)
        v, then = descend(own(world, i), given, batches, rates, options, pull=lam, to=world.model)
        return Done(w, v, {}, first + then)

    return together(world, given, client, options, weighting="samples")[0]._replace(own=own)


def pfedme(
    world: World,
    given: Given,
    lr: Rate,
    lam: float,
    inner_lr: float,
    inner_steps: int,
    beta: float = 1.0,
    nu: float = 0.0,
    **options: Any,
) -> World:
    """θ̃ ≈ argmin h_i(θ; w, D);  w ← w − η λ (w − θ̃);  w^{t+1} = (1 − β) w^t + β Σ w_i / S. Algorithm 1."""
    world, eta = begun(world), at(lr, given)

    def client(i: int) -> Done:
        w, theta, losses = world.model, own(world, i), []
        for rows in given.batches(i, 0, None):
            x, y = given.x[rows], given.y[rows]
            theta, m = w, zeros(w)
            losses.append(loss_and_gradient(w, x, y)[0])
            for _ in range(inner_steps):
                g = plus(loss_and_gradient(theta, x, y)[1], lam, plus(theta, -1.0, w))
                if np.sqrt(sum((v**2).sum() for v in g.values())) <= nu:
                    break
                theta, m = moved(theta, g, m, inner_lr, options)
            w = plus(w, -eta * lam, plus(w, -1.0, theta))
        return Done(w, theta, {}, losses)

    def server(old: Params, new: Params) -> Params:
        return {k: (1 - beta) * old[k] + beta * new[k] for k in ALL}

    return together(world, given, client, options, server)[0]._replace(own=own)


def perfedavg(
    world: World,
    given: Given,
    lr: Rate,
    alpha: float,
    hessian: str = "exact",
    hf_delta: float = 1e-3,
    **options: Any,
) -> World:
    """w̃ = w − α ∇̃f(w, D);  w ← w − β (I − α ∇̃²f(w, D'')) ∇̃f(w̃, D'). Fallah et al. (2020), Algorithm 1."""
    eta = at(lr, given)

    def gradient(w: Params, rows: np.ndarray) -> Params:
        return loss_and_gradient(w, given.x[rows], given.y[rows])[1]

    def product(w: Params, rows: np.ndarray, d: Params) -> Params:
        if hessian == "exact":
            return curvature(w, given.x[rows], given.y[rows], d)
        ahead, behind = (gradient(plus(w, s * hf_delta, d), rows) for s in (1.0, -1.0))
        return {k: (ahead[k] - behind[k]) / (2 * hf_delta) for k in d}

    def client(i: int) -> Done:
        w, m, losses = world.model, zeros(world.model), []
        draws = [given.batches(i, j << 16, None) for j in range(3)]  # three batches for each step
        for outer, inner, third in zip(*draws):
            adapted = plus(w, -alpha, gradient(w, inner))
            loss, g = loss_and_gradient(adapted, given.x[outer], given.y[outer])
            losses.append(loss)
            if hessian != "fo":
                g = plus(g, -alpha, product(w, third, g))
            w, m = moved(w, g, m, eta, options)
        return Done(w, {}, {}, losses)

    def adapted(after: World, i: int) -> Params:
        return plus(after.model, -alpha, gradient(after.model, given.rows(i))) if given.n[i] else after.model

    return together(world, given, client, options, keeps_models=False)[0]._replace(own=adapted)


def apfl(
    world: World, given: Given, lr: Rate, alpha: float = 0.5, learn_alpha: bool = True, **options: Any
) -> World:
    """v̄ = α v + (1 − α) w; w, v and α step along the gradients of f(w) and f(v̄). Deng et al. (2020)."""
    world, eta, share = begun(world), at(lr, given), alpha

    def memory(after: World, i: int) -> float:
        return float(after.memory[i]["alpha"]) if i in after.memory else share

    def mixture(a: float, v: Params, w: Params) -> Params:
        return {k: a * v[k] + (1 - a) * w[k] for k in ALL}

    def client(i: int) -> Done:
        w, v, a, losses = world.model, own(world, i), memory(world, i), []
        m_w, m_v = zeros(w), zeros(w)
        for rows in given.batches(i, 0, None):
            x, y = given.x[rows], given.y[rows]
            (loss_w, g_w), (loss_v, g_v) = (loss_and_gradient(z, x, y) for z in (w, mixture(a, v, w)))
            slope = sum(((v[k] - w[k]) * g_v[k]).sum() for k in ALL)  # ∂f(v̄)/∂α
            w, m_w = moved(w, g_w, m_w, eta, options)
            v, m_v = moved(v, {k: a * g for k, g in g_v.items()}, m_v, eta, options)  # ∇_v f(v̄) = α ∇f(v̄)
            a = float(np.clip(a - eta * slope, 0.0, 1.0)) if learn_alpha else a
            losses += [loss_w, loss_v]
        return Done(w, v, {"alpha": np.array(a)}, losses)

    def mine(after: World, i: int) -> Params:
        return mixture(memory(after, i), own(after, i), after.model)

    return together(world, given, client, options)[0]._replace(own=mine)


def l2gd(world: World, given: Given, lr: Rate, lam: float, p: float, **options: Any) -> World:
    """ξ = 1: x_i ← (1 − αλ/(np)) x_i + αλ/(np) x̄;  ξ = 0: x_i ← x_i − α/(n(1 − p)) ∇f_i(x_i). Algorithm 1."""
    world, n, eta = begun(world), len(given.n), at(lr, given)
    local_steps, share = given.coins(p), eta * lam / (n * p)

    def client(i: int) -> Done:
        x = own(world, i)
        if given.n[i]:
            x = {k: (1 - share) * x[k] + share * world.model[k] for k in ALL}
        batches = given.batches(i, 1 if lam else 0, local_steps)  # without a pull, steps are all there is
        x, losses = descend(x, given, batches, dict.fromkeys(ALL, eta / (n * (1 - p))), options)
        return Done(x, x, {}, losses)

    return together(world, given, client, options)[0]._replace(own=own)


# ---- control variates


def scaffold(
    world: World, given: Given, lr: Rate, option: int = 2, server_lr: float = 1.0, **options: Any
) -> World:
    """y_i ← y_i − η_l (g_i(y_i) + c − c_i);  c ← c + |S|/N mean Δc_i. Karimireddy et al. (2020), Alg. 1."""
    eta, x = at(lr, given), world.model
    c = world.opt.get("c", zeros(x))
    beta = options.get("momentum", 0.0)

    def client(i: int) -> Done:
        c_i = world.memory.get(i, zeros(x))
        y, m, losses, batches = x, zeros(x), [], given.batches(i, 0, None)
        for rows in batches:
            loss, g = loss_and_gradient(y, given.x[rows], given.y[rows])
            losses.append(loss)
            y, m = moved(y, plus(plus(g, 1.0, c), -1.0, c_i), m, eta, options)
        new = c_i
        if option == 1 and given.n[i]:
            rows = given.rows(i)
            new = loss_and_gradient(x, given.x[rows], given.y[rows])[1]
        if option == 2 and batches:  # the j-th of K gradients is in the last K − j + 1 steps, ever weaker
            weights = [sum(beta**s for s in range(len(batches) - j)) for j in range(len(batches))]
            new = plus(plus(c_i, -1.0, c), 1 / (eta * sum(weights)), plus(x, -1.0, y))
        return Done(y, {}, new, losses, plus(new, -1.0, c_i))

    def server(old: Params, new: Params) -> Params:
        return plus(old, server_lr, plus(new, -1.0, old))

    after, done, weight = together(world, given, client, options, server, keeps_models=False)
    heard = sum(w > 0 for w in weight)
    change = mean([d.extra for d in done if d.extra is not None], weight)
    return after._replace(opt={"c": plus(c, heard / len(given.n), change)})


# ---- robust means


def rfa(world: World, given: Given, lr: Rate, **options: Any) -> World:
    """argmin_z Σ α_i ‖z − w_i‖, by Weiszfeld's iteration to its end. Pillutla et al. (2022)."""
    return _combined(world, given, lr, _geometric_median, "samples", options)


def coordinate_median_fedavg(world: World, given: Given, lr: Rate, **options: Any) -> World:
    """The median of each coordinate. Yin et al. (2018), Definition 1."""
    return _combined(world, given, lr, _coordinate_median, "uniform", options)


def _combined(
    world: World, given: Given, lr: Rate, combine: Any, weighting: str, options: dict[str, Any]
) -> World:
    alone = [fedavg(world, given._replace(cohort=[i]), lr, **options) for i in given.cohort]
    losses = [[] if w.loss is None else [w.loss] for w in alone]

    def client(i: int) -> Done:
        place = list(given.cohort).index(i)
        return Done(alone[place].model, {}, {}, losses[place])

    made = together(world, given, client, options, weighting=weighting, combine=combine, keeps_models=False)
    return made[0]


def _geometric_median(x: Sequence[Params], weight: Sequence[float]) -> Params:
    points = np.stack([np.concatenate([p[k].ravel() for k in ALL]) for p in x])
    z = np.average(points, axis=0, weights=weight)
    for _ in range(100_000):
        beta = np.array(weight) / np.maximum(np.linalg.norm(points - z, axis=1), 1e-9)
        last, z = z, beta @ points / beta.sum()
        if np.linalg.norm(z - last) < 1e-14:
            break
    ends = np.cumsum([x[0][k].size for k in ALL])
    return {k: part.reshape(x[0][k].shape) for k, part in zip(ALL, np.split(z, ends[:-1]))}


def _coordinate_median(x: Sequence[Params], weight: Sequence[float]) -> Params:
    """A client of weight n counts as n clients."""
    times = np.array(weight).astype(int)
    return {k: np.median(np.repeat([p[k] for p in x], times, axis=0), axis=0) for k in ALL}
