"""Every method once more, plainly: NumPy, float64, one client after another, written from the papers.

Random input is given: who takes part, and which rows each step sees. All else is computed here, and nothing
of Partita is used. A method is a function of one round, (world, given, its options) -> world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

Params = dict[str, np.ndarray]
Rate = float | Callable[[int, int], float]

# A multilayer perceptron of two layers, with the names of partita.models.mlp
W1, B1, W2, B2 = ALL = (
    "hidden1.linear.weight",
    "hidden1.linear.bias",
    "output.linear.weight",
    "output.linear.bias",
)
PARTS = {"none": (), "all": ALL, "input": (W1, B1), "output": (W2, B2), "*.bias": (B1, B2)}


class Given(NamedTuple):
    """The input of one round.

    x, y     rows of all clients
    n        training samples of each client
    cohort   who takes part
    batches  (client, phase, steps) -> the rows of each step; steps=None: as many as the run says
    t        the round within its stage, of `rounds`
    keeps    whether clients keep their own part until the next round
    rows     client -> the rows of all its training samples
    noise    client -> for each name a standard normal number for each entry, anew in every round
    order    n -> a random order of n uploads
    after    the input of evaluation after this round
    coins    p -> how often a coin says no before its first yes, which has this probability
    """

    x: np.ndarray
    y: np.ndarray
    n: np.ndarray
    cohort: Sequence[int]
    batches: Callable[[int, int, int | None], list[np.ndarray]]
    t: int
    rounds: int
    keeps: bool
    rows: Callable[[int], np.ndarray] | None = None
    noise: Callable[[int], Params] | None = None
    order: Callable[[int], np.ndarray] | None = None
    after: Callable[[], Given] | None = None
    coins: Callable[[float], int] | None = None


class World(NamedTuple):
    """What there is between rounds.

    model     the server's; for a personal part, what a new client starts from
    personal  the own part of each client that was seen
    opt       the moments of the server's optimizer, or what else it keeps
    loss      of the last round: minibatch losses before each step, mean per client, weighted by n_i
    memory    what else each client that was seen keeps
    own       (world, client) -> the model it deploys, where that is not (u, v_i)
    """

    model: Params
    personal: dict[int, Params]
    opt: dict[str, Params]
    loss: float | None = None
    memory: dict[int, Params] = {}  # noqa: RUF012
    own: Callable[[World, int], Params] | None = None


# ---- the model


def logits(w: Params, x: np.ndarray) -> np.ndarray:
    """z = W₂ max(0, W₁ x + b₁) + b₂."""
    return np.maximum(x @ w[W1].T + w[B1], 0) @ w[W2].T + w[B2]


def loss_and_gradient(w: Params, x: np.ndarray, y: np.ndarray) -> tuple[float, Params]:
    """f(w) = mean of −log softmax(z)_y, and ∇f by the chain rule."""
    n, a = len(y), x @ w[W1].T + w[B1]
    h, z = np.maximum(a, 0), logits(w, x)
    log_p = z - z.max(1, keepdims=True)
    log_p = log_p - np.log(np.exp(log_p).sum(1, keepdims=True))
    dz = (np.exp(log_p) - np.eye(z.shape[1])[y]) / n
    da = (dz @ w[W2]) * (a > 0)
    return -log_p[np.arange(n), y].mean(), {W1: da.T @ x, B1: da.sum(0), W2: dz.T @ h, B2: dz.sum(0)}


def accuracy(w: Params, x: np.ndarray, y: np.ndarray) -> float:
    """The share of rows whose largest logit is the label's."""
    return float((logits(w, x).argmax(1) == y).mean())


# ---- the client's steps and their rates


def descend(
    w: Params,
    given: Given,
    batches: list[np.ndarray],
    rates: dict[str, float],
    options: dict[str, Any],
    pull: float = 0.0,
    to: Params | None = None,
) -> tuple[Params, list[float]]:
    """A step per batch on the names that have a rate; the others stay. Returns the losses before each step.

    g = ∇f(w; batch) + μ (w − w^t);  g ← g min(1, G/‖g‖);  g ← g + ω w;  m ← β m + g;  w ← w − η m
    """
    m = {k: np.zeros_like(w[k]) for k in rates}
    losses = []
    for rows in batches:
        loss, g = loss_and_gradient(w, given.x[rows], given.y[rows])
        losses.append(loss)
        g = {k: g[k] + (pull * (w[k] - to[k]) if to and k in to else 0.0) for k in rates}
        if options.get("max_grad_norm"):
            length = np.sqrt(sum((v**2).sum() for v in g.values()))
            g = {k: v * min(1.0, options["max_grad_norm"] / length) for k, v in g.items()}
        g = {k: v + options.get("weight_decay", 0.0) * w[k] for k, v in g.items()}
        m = {k: options.get("momentum", 0.0) * m[k] + g[k] for k in rates}
        w = {**w, **{k: w[k] - rates[k] * m[k] for k in rates}}
    return w, losses


def at(lr: Rate, given: Given) -> float:
    """The rate of this round."""
    return lr(given.t, given.rounds) if callable(lr) else lr


def linear(lr: float, warmup: float) -> Rate:
    """From 0 up to η over a share of the rounds, then down to 0; both zeros lie just outside the rounds."""
    return lambda t, rounds: float(np.interp(t, [-1, warmup * rounds, rounds], [0, lr, 0]))


def halving(lr: float, every: int) -> Rate:
    """η / 2^⌊t / every⌋."""
    return lambda t, rounds: lr / 2 ** (t // every)  # noqa: ARG005


def stepped(lr: float, milestones: Sequence[int], factor: float) -> Rate:
    """η, times `factor` from each of these rounds on."""
    return lambda t, rounds: lr * np.prod([factor for a in milestones if t >= a])  # noqa: ARG005


# ---- one round of all methods: Pillutla et al. (2022), Algorithm 1

Client = Callable[[int, Params], tuple[Params, list[float]]]
Server = Callable[[Params, Params, dict[str, Params]], tuple[Params, dict[str, Params]]]


def replace(x: Params, delta: Params, opt: dict[str, Params]) -> tuple[Params, dict[str, Params]]:
    """x ← x + Δ: the mean of the clients' models."""
    return {k: x[k] + delta[k] for k in x}, opt


def federated(
    world: World,
    given: Given,
    client: Client,
    options: dict[str, Any],
    personal: Sequence[str] = (),
    server: Server = replace,
) -> World:
    """u_i, v_i = client(u, v_i);  Δ = Σ α_i (u_i − u) / Σ α_i with α_i = n_i or 1;  u ← server(u, Δ)."""
    u = {k: x for k, x in world.model.items() if k not in personal}
    own = {i: {k: v[k] for k in personal if k in v} for i, v in world.personal.items()}
    delta, total, losses = {k: np.zeros_like(x) for k, x in u.items()}, 0.0, []
    kept = dict(own)
    for i in given.cohort:
        w, seen = client(i, {**world.model, **own.get(i, {})})
        # a client without data has no say, whatever the weighting
        alpha = (
            float(given.n[i]) if options.get("weighting", "samples") == "samples" else float(given.n[i] > 0)
        )
        delta = {k: delta[k] + alpha * (w[k] - u[k]) for k in u}
        total += alpha
        kept[i] = {k: w[k] for k in personal}
        losses += [(np.mean(seen), given.n[i])] if seen else []
    delta = {k: d / total if total else d for k, d in delta.items()}
    new, opt = server(u, delta, world.opt)
    weight = sum(n for _, n in losses)
    loss = float(sum(value * n for value, n in losses) / weight) if weight else None
    return World({**world.model, **new}, kept if given.keeps else own, opt, loss)


# ---- the methods


def local(world: World, given: Given, lr: Rate, **options: Any) -> World:
    """v_i ← v_i − η ∇f_i(v_i); nothing is sent."""
    rates = dict.fromkeys(ALL, at(lr, given))

    def client(i: int, w: Params) -> tuple[Params, list[float]]:
        return descend(w, given, given.batches(i, 0, None), rates, options)

    return federated(world, given, client, options, personal=ALL)


def fedavg(world: World, given: Given, lr: Rate, server: Server = replace, **options: Any) -> World:
    """w_i ← w_i − η ∇f_i(w_i) from w^t;  w^{t+1} = Σ n_i w_i / Σ n_i. McMahan et al. (2017), Algorithm 1."""
    rates = dict.fromkeys(ALL, at(lr, given))

    def client(i: int, w: Params) -> tuple[Params, list[float]]:
        return descend(w, given, given.batches(i, 0, None), rates, options)

    return federated(world, given, client, options, server=server)


def fedprox(world: World, given: Given, lr: Rate, mu: float, **options: Any) -> World:
    """SGD on f_i(w) + (μ/2) ‖w − w^t‖². Li et al. (2020), Equation 2."""
    rates = dict.fromkeys(ALL, at(lr, given))

    def client(i: int, w: Params) -> tuple[Params, list[float]]:
        return descend(w, given, given.batches(i, 0, None), rates, options, pull=mu, to=world.model)

    return federated(world, given, client, options)


def fedavgm(
    world: World, given: Given, lr: Rate, server_lr: float = 1.0, server_momentum: float = 0.9, **options: Any
) -> World:
    """v ← β v + (w − mean w_i),  w ← w − η v. Hsu et al. (2019), section 4.3."""

    def server(x: Params, delta: Params, opt: dict[str, Params]) -> tuple[Params, dict[str, Params]]:
        v = {k: server_momentum * opt["v"][k] - delta[k] if opt else -delta[k] for k in x}
        return {k: x[k] - server_lr * v[k] for k in x}, {"v": v}

    return fedavg(world, given, lr, server, **options)


def fedadam(
    world: World,
    given: Given,
    lr: Rate,
    server_lr: float,
    beta1: float = 0.9,
    beta2: float | None = None,
    tau: float = 1e-3,
    eps: float | None = None,
    **options: Any,
) -> World:
    """v_t = β₂ v_{t−1} + (1 − β₂) Δ_t². Reddi et al. (2021), Algorithm 2; with ε Kingma & Ba, Algorithm 1."""
    if eps is None:
        decay = 0.99 if beta2 is None else beta2
        server = _adaptive(lambda v, d: decay * v + (1 - decay) * d**2, server_lr, beta1, tau)
    else:
        server = _kingma_ba(server_lr, beta1, 0.999 if beta2 is None else beta2, eps)
    return fedavg(world, given, lr, server, **options)


def _kingma_ba(alpha: float, beta1: float, beta2: float, eps: float) -> Server:
    """θ_t = θ_{t−1} − α m̂_t / (√v̂_t + ε) with m̂_t = m_t / (1 − β₁ᵗ), v̂_t = v_t / (1 − β₂ᵗ); here g = −Δ."""

    def server(x: Params, delta: Params, opt: dict[str, Params]) -> tuple[Params, dict[str, Params]]:
        zero = {k: 0.0 * x[k] for k in x}
        before = opt or {"m": zero, "v": zero, "t": {"t": np.zeros(())}}
        t = before["t"]["t"] + 1
        m = {k: beta1 * before["m"][k] - (1 - beta1) * delta[k] for k in x}
        v = {k: beta2 * before["v"][k] + (1 - beta2) * delta[k] ** 2 for k in x}
        hats = {k: (m[k] / (1 - beta1**t), v[k] / (1 - beta2**t)) for k in x}
        new = {k: x[k] - alpha * m_hat / (np.sqrt(v_hat) + eps) for k, (m_hat, v_hat) in hats.items()}
        return new, {"m": m, "v": v, "t": {"t": t}}

    return server


def fedyogi(
    world: World,
    given: Given,
    lr: Rate,
    server_lr: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    **options: Any,
) -> World:
    """v_t = v_{t−1} − (1 − β₂) Δ_t² sign(v_{t−1} − Δ_t²). Reddi et al. (2021), Algorithm 2."""
    return fedavg(
        world,
        given,
        lr,
        _adaptive(lambda v, d: v - (1 - beta2) * d**2 * np.sign(v - d**2), server_lr, beta1, tau),
        **options,
    )


def fedadagrad(
    world: World,
    given: Given,
    lr: Rate,
    server_lr: float,
    beta1: float = 0.0,
    tau: float = 1e-3,
    **options: Any,
) -> World:
    """v_t = v_{t−1} + Δ_t². Reddi et al. (2021), Algorithm 2."""
    return fedavg(world, given, lr, _adaptive(lambda v, d: v + d**2, server_lr, beta1, tau), **options)


def _adaptive(
    second: Callable[[np.ndarray, np.ndarray], np.ndarray], eta: float, beta1: float, tau: float
) -> Server:
    """m_t = β₁ m_{t−1} + (1 − β₁) Δ_t,  x_{t+1} = x_t + η m_t / (√v_t + τ), from m = 0 and v = τ²."""

    def server(x: Params, delta: Params, opt: dict[str, Params]) -> tuple[Params, dict[str, Params]]:
        zero = {"m": {k: 0.0 * x[k] for k in x}, "v": {k: 0.0 * x[k] + tau**2 for k in x}}
        before = opt or zero
        m = {k: beta1 * before["m"][k] + (1 - beta1) * delta[k] for k in x}
        v = {k: second(before["v"][k], delta[k]) for k in x}
        return {k: x[k] + eta * m[k] / (np.sqrt(v[k]) + tau) for k in x}, {"m": m, "v": v}

    return server


def fedsim(
    world: World,
    given: Given,
    personal: str,
    lr: Rate,
    personal_lr: Rate | None = None,
    personal_l2: float = 0.0,
    **options: Any,
) -> World:
    """v_{k+1} = v_k − γ_v ∇_v F_i(u_k, v_k),  u_{k+1} = u_k − γ_u ∇_u F_i(u_k, v_k). Algorithm 3.

    With μ, F_i(u, v) + (μ/2) ‖v − v⁰‖² is in place of F_i, v⁰ being where all clients began.
    """
    mine, gamma_u = PARTS[personal], at(lr, given)
    gamma_v = gamma_u if personal_lr is None else at(personal_lr, given)
    rates = {k: gamma_v if k in mine else gamma_u for k in ALL}
    first = {k: world.model[k] for k in mine}

    def client(i: int, w: Params) -> tuple[Params, list[float]]:
        return descend(w, given, given.batches(i, 0, None), rates, options, personal_l2, first)

    return federated(world, given, client, options, personal=mine)


def fedalt(
    world: World,
    given: Given,
    personal: str,
    lr: Rate,
    personal_lr: Rate | None = None,
    personal_steps: int | None = None,
    shared_steps: int | None = None,
    personal_l2: float = 0.0,
    **options: Any,
) -> World:
    """First v_{k+1} = v_k − γ_v ∇_v F_i(u, v_k), then u_{k+1} = u_k − γ_u ∇_u F_i(u_k, v⁺). Algorithm 2.

    With μ, F_i(u, v) + (μ/2) ‖v − v⁰‖² is in place of F_i.
    """
    mine, gamma_u = PARTS[personal], at(lr, given)
    gamma_v = gamma_u if personal_lr is None else at(personal_lr, given)
    rates_v = dict.fromkeys(mine, gamma_v)
    rates_u = {k: gamma_u for k in ALL if k not in mine}

    def client(i: int, w: Params) -> tuple[Params, list[float]]:
        batches = given.batches(i, 0, personal_steps)
        w, first = descend(w, given, batches, rates_v, options, personal_l2, world.model)
        w, then = descend(w, given, given.batches(i, 1, shared_steps), rates_u, options)
        return w, first + then

    return federated(world, given, client, options, personal=mine)


def finetune(
    world: World, given: Given, personal: str, lr: Rate, personal_l2: float = 0.0, **options: Any
) -> World:
    """SGD on F_i(u, v) + (λ/2) ‖v − v_g‖² over v alone, v_g of the global model. Appendix B.2, step (c)."""
    mine = PARTS[personal]
    rates = dict.fromkeys(mine, at(lr, given))

    def client(i: int, w: Params) -> tuple[Params, list[float]]:
        return descend(w, given, given.batches(i, 0, None), rates, options, personal_l2, world.model)

    def fixed(x: Params, delta: Params, opt: dict[str, Params]) -> tuple[Params, dict[str, Params]]:
        assert not any(d.any() for d in delta.values())
        return x, opt

    return federated(world, given, client, options, personal=mine, server=fixed)


# ---- a run


class Stage(NamedTuple):
    """A method for some rounds."""

    method: Callable[..., World]
    options: dict[str, Any]
    rounds: int


def run(model: Params, stages: Sequence[Stage], given: Callable[[int, int], Given]) -> Iterator[World]:
    """The world after each round; `given` is called with the numbers of the stage and of its round.

    A stage begins with the server's model and the clients' own parts (appendix B.2, warm start).
    """
    world = World(model, {}, {})
    for s, stage in enumerate(stages):
        world = world._replace(opt={})
        for t in range(stage.rounds):
            world = stage.method(world, given(s, t), **stage.options)
            yield world


def client_model(world: World, i: int) -> Params:
    """What a client deploys: the server's model with its own part in place, unless the method says more."""
    if world.own is not None:
        return world.own(world, i)
    return {**world.model, **world.personal.get(i, {})}
