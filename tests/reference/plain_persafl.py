"""Asynchronous methods, plainly: Toghani, Lee & Uribe (2022), Algorithms 1 and 2. See `plain.py`.

Here a server step is one of a whole cohort that has just downloaded: nothing is stale, every s(0) is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from reference.plain import Given, Params, Rate, World, at, descend, loss_and_gradient
from reference.plain_ffgg import ffgg
from reference.plain_full import Done, curvature, moved, plus, together, zeros

MOST = 100  # inner steps where only an accuracy is asked for

Update = Callable[[int, Params], tuple[Params, list[float]]]
"""(client, w as downloaded) -> w after Q local steps, and the losses on the way."""


def arrived(
    world: World, given: Given, local: Update, beta: float, weighting: str, options: dict[str, Any]
) -> World:
    """w^{t+1} = w^t − β Δ, Δ = w_{i,0} − w_{i,Q}; of several arrivals, their mean. Algorithm 1, step 4."""

    def client(i: int) -> Done:
        w, losses = local(i, world.model)
        return Done(w, {}, {}, losses)

    def server(old: Params, new: Params) -> Params:
        return plus(old, -beta, plus(old, -1.0, new))

    return together(world, given, client, options, server, weighting=weighting, keeps_models=False)[0]


# ---- Xie, Koyejo & Gupta (2019), Algorithm 1, with stale clients


def in_order_of_arrival(
    w: np.ndarray,
    solve: Callable[[int, np.ndarray], np.ndarray],
    turn: Sequence[float],
    updates: int,
    alpha: float,
    s: Callable[[int], float],
    mixing: bool,
) -> np.ndarray:
    """Client i works for turn[i], and asks again at once: x_new ← solve(i, x_τ) on its own.

    Server: α_t ← α s(t − τ);  x_t ← (1 − α_t) x_{t−1} + α_t x_new. Without mixing, as Toghani et al. do:
    x_t ← x_{t−1} + α_t (x_new − x_τ).
    """
    at_work = [(length, i, 0, w) for i, length in enumerate(turn)]  # arrival, client, τ, what it received
    for t in range(updates):
        now, i, tau, received = min(at_work, key=lambda job: job[0])
        at_work = [job for job in at_work if job[1] != i]
        new, share = solve(i, received), alpha * s(t - tau)
        w = (1 - share) * w + share * new if mixing else w + share * (new - received)
        at_work.append((now + turn[i], i, t + 1, w))
    return w


# ---- option A, Algorithm 2, step 7


def fedasync(
    world: World,
    given: Given,
    lr: Rate,
    server_lr: float = 1.0,
    staleness: Any = None,  # noqa: ARG001
    mixing: bool = False,  # noqa: ARG001
    rho: float = 0.0,
    weighting: str = "samples",
    **options: Any,
) -> World:
    """w ← w − η (∇f̃_i(w, D) + ρ (w − w^t))."""

    def local(i: int, w: Params) -> tuple[Params, list[float]]:
        rates = dict.fromkeys(w, at(lr, given))
        return descend(w, given, given.batches(i, 0, None), rates, options, pull=rho, to=w)

    return arrived(world, given, local, server_lr, weighting, options)


def fedbuff(world: World, given: Given, lr: Rate, buffer: int = 1, **options: Any) -> World:  # noqa: ARG001
    """The mean of the buffer; in step there is nothing to wait for."""
    return fedasync(world, given, lr, **{"weighting": "uniform", **options})


# ---- option B, steps 8 and 9


def persafl_maml(
    world: World,
    given: Given,
    lr: Rate,
    alpha: float,
    server_lr: float = 1.0,
    hessian: str = "exact",
    hf_delta: float = 1e-3,
    **options: Any,
) -> World:
    """w ← w − η [I − α ∇²f̃_i(w, D'')] ∇f̃_i(w − α ∇f̃_i(w, D'), D); equation (9)."""
    eta = at(lr, given)

    def slope(w: Params, rows: np.ndarray) -> Params:
        return loss_and_gradient(w, given.x[rows], given.y[rows])[1]

    def hessian_times(w: Params, rows: np.ndarray, u: Params) -> Params:
        if hessian == "fo":
            return zeros(u)
        if hessian == "exact":
            return curvature(w, given.x[rows], given.y[rows], u)
        difference = plus(slope(plus(w, hf_delta, u), rows), -1.0, slope(plus(w, -hf_delta, u), rows))
        return {k: v / (2 * hf_delta) for k, v in difference.items()}  # (D1) forgets the 2

    def local(i: int, w: Params) -> tuple[Params, list[float]]:
        m, losses = zeros(w), []
        for d, d1, d2 in zip(*(given.batches(i, j << 16, None) for j in range(3))):
            loss, g = loss_and_gradient(plus(w, -alpha, slope(w, d1)), given.x[d], given.y[d])
            w, m = moved(w, plus(g, -alpha, hessian_times(w, d2, g)), m, eta, options)
            losses.append(loss)
        return w, losses

    def one_step(after: World, i: int) -> Params:
        return plus(after.model, -alpha, slope(after.model, given.rows(i))) if given.n[i] else after.model

    return arrived(world, given, local, server_lr, "uniform", options)._replace(own=one_step)


# ---- option C, steps 10 to 12


def persafl_me(
    world: World,
    given: Given,
    lr: Rate,
    lam: float,
    inner_lr: Rate,
    inner_steps: int | None = None,
    nu: float | None = None,
    server_lr: float = 1.0,
    **options: Any,
) -> World:
    """θ̃ with ‖∇h̃_i(θ̃, w, D)‖ ≤ ν, h̃_i(θ, w, D) = f̃_i(θ, D) + (λ/2) ‖θ − w‖²;  w ← w − η λ (w − θ̃)."""
    eta = at(lr, given)

    def inner(w: Params, rows: np.ndarray, size: float) -> Iterator[tuple[Params, float]]:
        """Every θ on the way, the first of them w, and ‖∇h̃(θ)‖."""
        theta, m = w, zeros(w)
        while True:
            g = loss_and_gradient(theta, given.x[rows], given.y[rows])[1]
            h = plus(g, lam, plus(theta, -1.0, w))
            yield theta, float(np.sqrt(sum((v**2).sum() for v in h.values())))
            theta, m = moved(theta, h, m, size, options)

    def solved(w: Params, rows: np.ndarray, size: float) -> Params:
        for k, (theta, length) in enumerate(inner(w, rows, size)):
            if k == (inner_steps or MOST) or (nu is not None and length <= nu):
                return theta
        raise AssertionError

    def local(i: int, w: Params) -> tuple[Params, list[float]]:
        losses = []
        for rows in given.batches(i, 0, None):
            losses.append(loss_and_gradient(w, given.x[rows], given.y[rows])[0])
            theta = solved(w, rows, at(inner_lr, given))
            w = plus(w, -eta * lam, plus(w, -1.0, theta))
        return w, losses

    def nearby(after: World, i: int) -> Params:
        now = given._replace(t=min(given.t + 1, given.rounds - 1))
        return solved(after.model, given.rows(i), at(inner_lr, now)) if given.n[i] else after.model

    return arrived(world, given, local, server_lr, "uniform", options)._replace(own=nearby)


# ---- FFGG, Mishchenko et al. (2023), Algorithm 3

ffgg_async = ffgg
