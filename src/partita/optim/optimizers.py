"""Optimizers of Kingma & Ba (2015), Loshchilov & Hutter (2019), Reddi et al. (2021) and Chen et al. (2023).

    g is a gradient; at the server the aggregated delta Δ (received − computed) takes its place
    sgd      g ← g + ω x,   m ← β m + g,   x ← x − η m,   or with nesterov   x ← x − η (g + β m)
    adam     g ← g + ω x,   m ← β₁ m + (1 − β₁) g,   v ← β₂ v + (1 − β₂) g²,   from m = v = 0
             x ← x − η m̂ / (√v̂ + ε),   m̂ = m / (1 − β₁ᵗ),   v̂ = v / (1 − β₂ᵗ)
    adamw    x ← x − η ω x, then as adam with ω = 0
    lion     x ← x − η (sign(β₁ m + (1 − β₁) g) + ω x),   then   m ← β₂ m + (1 − β₂) g
    adagrad  v ← v + g²                            these two, and adam with τ instead of ε:
    yogi     v ← v − (1 − β₂) g² sign(v − g²)      x ← x − η m / (√v + τ),   from v = τ²

Each is a pair of pure functions (`partita.core.parts.Optimizer`) that serves clients (`optimizer=`), the
solvers of FFGG and the server (`server=`). A client steps by the `lr` of its method, and its state begins
anew in every round unless the method has `optimizer_state="keep"`; the server steps by the `lr` that is given
here. Adam has two forms: with `eps` it corrects the bias of its means, with `tau` it is that of Reddi et al.,
Algorithm 2, which does not. Without either, clients have the first one (ε = 1e-8) and the server the second
(τ = 1e-3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from torch import Tensor

from partita.core import check, tree
from partita.core.options import Option, Range, checked, given
from partita.core.parts import Optimizer, Rates, Update
from partita.core.types import Tensors

NEVER_ONE = 0.9999  # a mean of β = 1 would never change

ServerLr = Annotated[
    float,
    Option("η, the step size of the server", low=0, open_low=True, search=Range(1e-3, 3.0, log=True)),
]
Lr = Annotated[
    float | None,
    Option("η at the server (None: that of a client, who steps by its method's lr)", low=0, open_low=True),
]
Momentum = Annotated[
    float,
    Option("β, how much of the last step the next one keeps", low=0, high=1, search=Range(0.0, 0.95)),
]
Decay = Annotated[float, Option("ω, weight decay: ω x joins the gradient", low=0)]
Decoupled = Annotated[float, Option("ω, weight decay: each step also takes η ω x from x", low=0)]
Beta1 = Annotated[
    float,
    Option(
        "β₁, how slowly the mean m of the gradients changes",
        low=0,
        high=NEVER_ONE,
        search=Range(0.0, 0.95, asked=True),
    ),
]
Beta2 = Annotated[
    float,
    Option(
        "β₂, how slowly the mean v of their squares changes",
        low=0,
        high=NEVER_ONE,
        search=Range(0.9, 0.999, asked=True),
    ),
]
LionBeta2 = Annotated[
    float,
    Option(
        "β₂, how slowly the mean m that is kept changes",
        low=0,
        high=NEVER_ONE,
        search=Range(0.9, 0.999, asked=True),
    ),
]
Eps = Annotated[float, Option("ε, which keeps the step finite where v is zero", low=0, open_low=True)]
Tau = Annotated[
    float,
    Option(
        "τ, the degree of adaptivity: small is more",
        low=0,
        open_low=True,
        search=Range(1e-5, 1e-1, log=True, asked=True),  # the grid of Reddi et al.
    ),
]
# those of adam, which has two forms
AdamBeta2 = Annotated[
    float | None,
    Option(
        "β₂, how slowly the mean v of the squares changes (None: 0.999 with ε, 0.99 with τ)",
        low=0,
        high=NEVER_ONE,
        search=Range(0.9, 0.999, asked=True),
    ),
]
AdamTau = Annotated[
    float | None,
    Option(
        "τ, for the form of Reddi et al. (None: that with ε; at the server 1e-3)",
        low=0,
        open_low=True,
        search=Range(1e-5, 1e-1, log=True, asked=True),
    ),
]
AdamEps = Annotated[
    float | None,
    Option(
        "ε, for the form of Kingma & Ba, with bias correction (None: 1e-8; at the server τ)",
        low=0,
        open_low=True,
        search=Range(1e-8, 1e-3, log=True, asked=True),
    ),
]

optimizer = checked("optimizer ")


@optimizer
def sgd(
    lr: Lr = None,
    momentum: Momentum = 0.0,
    weight_decay: Decay = 0.0,
    nesterov: Annotated[bool, Option("step by g + β m, where momentum leads, in place of m")] = False,
) -> Optimizer:
    """m ← β m + g + ω x, x ← x − η m: stochastic gradient descent.

    At the server η = 1 by default, which without momentum is plain averaging. For clients, the options
    `momentum` and `weight_decay` of a method are the short form.
    """
    heavy, decays = given(momentum), given(weight_decay)
    if nesterov and not heavy:
        raise check.fail("optimizer nesterov", nesterov, "False, or momentum= above 0, such as momentum=0.9")

    def init(params: Tensors) -> Tensors:
        return {f"m.{k}": torch.zeros_like(x) for k, x in params.items()} if heavy else {}

    def stepping(overwrites: bool) -> Update:
        def update(params: Tensors, g: Tensors, state: Tensors, lr: Rates) -> tuple[Tensors, Tensors]:
            if decays:
                g = tree.axpy(weight_decay, params, g)
            if heavy:
                m = {k: momentum * state[f"m.{k}"] + x for k, x in g.items()}
                state = {**state, **{f"m.{k}": x for k, x in m.items()}}
                g = tree.axpy(momentum, m, g) if nesterov else m
            own = overwrites and not heavy  # else the state is in that memory
            return {k: _minus(params[k], x, lr[k], own) for k, x in g.items()}, state

        return update

    options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
    return Optimizer("sgd", init, stepping(overwrites=False), options, stepping(overwrites=True))


@optimizer
def adam(
    lr: Lr = None,
    beta1: Beta1 = 0.9,
    beta2: AdamBeta2 = None,
    tau: AdamTau = None,
    eps: AdamEps = None,
    weight_decay: Decay = 0.0,
) -> Optimizer:
    """x ← x − η m̂ / (√v̂ + ε): steps along the mean of the gradients, by the size that they have had.

    With `tau` it is FedAdam's x ← x − η m / (√v + τ), without bias correction and from v = τ². That is the
    form at the server (where `lr` is given) unless `eps` is.
    """
    if tau is not None and eps is not None:
        raise check.fail("optimizer tau", tau, "tau or eps, not both: they belong to two forms of Adam")
    corrected = tau is None and (eps is not None or lr is None)
    form = {"eps": eps or 1e-8} if corrected else {"tau": tau or 1e-3}
    beta2 = (0.999 if corrected else 0.99) if beta2 is None else beta2
    options = {"lr": lr, "beta1": beta1, **form, "beta2": beta2, "weight_decay": weight_decay}
    return _adaptive("adam", _mean(beta2), options)


@optimizer
def adamw(
    lr: Lr = None,
    weight_decay: Decoupled = 0.01,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.999,
    eps: Eps = 1e-8,
) -> Optimizer:
    """x ← x − η ω x − η m̂ / (√v̂ + ε): Adam whose weight decay does not pass through the means.

    Use it for clients that train transformers.
    """
    options = {"lr": lr, "weight_decay": weight_decay, "beta1": beta1, "beta2": beta2, "eps": eps}
    return _adaptive("adamw", _mean(beta2), options, decoupled=True)


@optimizer
def lion(
    lr: Lr = None, weight_decay: Decoupled = 0.0, beta1: Beta1 = 0.9, beta2: LionBeta2 = 0.99
) -> Optimizer:
    """x ← x − η (sign(β₁ m + (1 − β₁) g) + ω x): every entry moves by η, whatever its gradient.

    Use it in place of AdamW where memory is short, with a step size three to ten times smaller and a decay as
    many times larger.
    """

    def init(params: Tensors) -> Tensors:
        return {f"m.{k}": torch.zeros_like(x) for k, x in params.items()}

    def update(params: Tensors, gradient: Tensors, state: Tensors, lr: Rates) -> tuple[Tensors, Tensors]:
        new, after = {}, dict(state)
        for k, g in gradient.items():
            x, m = params[k], state[f"m.{k}"]
            direction = torch.sign(beta1 * m + (1 - beta1) * g)
            new[k] = x - _as(lr[k], x) * (direction + weight_decay * x if weight_decay else direction)
            after[f"m.{k}"] = beta2 * m + (1 - beta2) * g
        return new, after

    options = {"lr": lr, "weight_decay": weight_decay, "beta1": beta1, "beta2": beta2}
    return Optimizer("lion", init, update, options)


@optimizer
def yogi(lr: Lr = None, beta1: Beta1 = 0.9, beta2: Beta2 = 0.99, tau: Tau = 1e-3) -> Optimizer:
    """v ← v − (1 − β₂) g² sign(v − g²): as Adam, but the second moment changes slowly."""

    def second(v: Tensor, g2: Tensor) -> Tensor:
        return v - (1 - beta2) * g2 * torch.sign(v - g2)

    return _adaptive("yogi", second, {"lr": lr, "beta1": beta1, "tau": tau, "beta2": beta2})


@optimizer
def adagrad(lr: Lr = None, beta1: Beta1 = 0.0, tau: Tau = 1e-3) -> Optimizer:
    """v ← v + g²: as Adam, but the second moment only grows."""
    return _adaptive("adagrad", lambda v, g2: v + g2, {"lr": lr, "beta1": beta1, "tau": tau})


Second = Callable[[Tensor, Tensor], Tensor]
"""(v, g²) -> v."""


def _mean(beta2: float) -> Second:
    return lambda v, g2: beta2 * v + (1 - beta2) * g2


def _adaptive(name: str, second: Second, options: Mapping[str, Any], decoupled: bool = False) -> Optimizer:
    """Return the optimizer with this second moment, corrected for its bias if there is an ε.

    Weight decay joins the gradient or, `decoupled`, acts on the parameters alone.
    """
    beta1, decay = options["beta1"], options.get("weight_decay", 0.0)
    corrected = "eps" in options
    offset = options["eps"] if corrected else options["tau"]

    def init(params: Tensors) -> Tensors:
        m = {f"m.{k}": torch.zeros_like(x) for k, x in params.items()}
        v = {f"v.{k}": torch.full_like(x, 0.0 if corrected else offset**2) for k, x in params.items()}
        # each name has a count of its own: parts of a model may take steps in turn
        t = {f"t.{k}": x.new_zeros((), dtype=torch.float64) for k, x in params.items()}
        return {**m, **v, **t} if corrected else {**m, **v}

    def update(params: Tensors, gradient: Tensors, state: Tensors, lr: Rates) -> tuple[Tensors, Tensors]:
        new, after = {}, dict(state)
        for k, g in gradient.items():
            x, size = params[k], lr[k]
            if decay and decoupled:
                x = x - _as(size * decay, x) * x
            elif decay:
                g = g + decay * x
            after[f"m.{k}"] = m = beta1 * state[f"m.{k}"] + (1 - beta1) * g
            after[f"v.{k}"] = v = second(state[f"v.{k}"], g**2)
            if corrected:  # η m̂ is (η / (1 − β₁ᵗ)) m
                after[f"t.{k}"] = t = state[f"t.{k}"] + 1
                size, v = size / (1 - beta1**t), v / _as(1 - options["beta2"] ** t, v)
            new[k] = x - _as(size, x) * m / (v.sqrt() + offset)
        return new, after

    return Optimizer(name, init, update, options)


def clipped(optimizer: Optimizer, max_grad_norm: float) -> Optimizer:
    """Return the optimizer for which longer gradients are cut: g ← g · min(1, G / ‖g‖)."""

    def cut(update: Update) -> Update:
        def clipping(params: Tensors, g: Tensors, state: Tensors, lr: Rates) -> tuple[Tensors, Tensors]:
            scale = (max_grad_norm / (tree.norm(g) + 1e-6)).clamp(max=1.0)
            return update(params, {k: x * scale for k, x in g.items()}, state, lr)

        return clipping

    in_place = optimizer.in_place and cut(optimizer.in_place)
    return optimizer._replace(update=cut(optimizer.update), in_place=in_place)


def _as(rate: float | Tensor, x: Tensor) -> float | Tensor:
    """A rate in the type of what it multiplies."""
    return rate.to(x.dtype) if isinstance(rate, Tensor) else rate


def _minus(x: Tensor, g: Tensor, lr: float | Tensor, overwrites: bool) -> Tensor:
    """x − η g in one pass over memory, which may be that of g."""
    if isinstance(lr, Tensor):
        return torch.addcmul(x, g, lr.to(g.dtype), value=-1.0, out=g if overwrites else None)
    return torch.sub(x, g, alpha=lr)
