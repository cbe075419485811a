"""Gradient steps on some of a client's tensors: the piece that most methods are made of.

g ← ∇f(w; batch) + μ (w − w^t)            pull towards what was received, if any
g ← g · min(1, G / ‖g‖)                   clipping at `max_grad_norm`, if any
g ← g + ω w                               weight decay
m ← β m + g                               momentum, from zero in every round
w ← w − η m
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from partita.core import check, tree
from partita.core.parts import LocalRule, Phase, Problem, Rate
from partita.core.types import Batch, ClientState, Download, RoundContext, Tensors, Upload, Work


@dataclass(frozen=True)
class Sgd:
    """The client's optimizer: β, ω and G above."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        check.number("momentum", self.momentum, low=0.0, high=1.0)
        check.number("weight_decay", self.weight_decay, low=0.0)
        if self.max_grad_norm is not None:
            check.number("max_grad_norm", self.max_grad_norm, low=0.0, open_low=True)

    def init(self, params: Tensors, names: Sequence[str]) -> Tensors:
        """m = 0."""
        return tree.zeros_like(tree.pick(params, names)) if self.momentum else {}

    def update(
        self, w: Tensors, g: Tensors, m: Tensors, lr: dict[str, Tensor], overwrite: bool = False
    ) -> tuple[Tensors, Tensors]:
        """One step on the names of g, each with its own rate; m keeps its other entries.

        `overwrite` allows the result to take the memory of g.
        """
        if self.max_grad_norm is not None:
            scale = (self.max_grad_norm / (tree.norm(g) + 1e-6)).clamp(max=1.0)
            g = {k: v * scale for k, v in g.items()}
        if self.weight_decay:
            g = tree.axpy(self.weight_decay, w, g)
        if self.momentum:
            g = {k: self.momentum * m[k] + v for k, v in g.items()}
            m, overwrite = {**m, **g}, False
        new = {}
        for k, v in g.items():  # w − η m in one pass over memory
            new[k] = torch.addcmul(w[k], v, lr[k].to(v.dtype), value=-1.0, out=v if overwrite else None)
        return new, m


class Carry(NamedTuple):
    """What passes from step to step: the whole model, what was received, momenta, the sum of losses."""

    params: Tensors
    received: Tensors
    momenta: Tensors
    loss: Tensor
    steps: Tensor


def start(problem: Problem, optimizer: Sgd) -> Callable[[Download, ClientState], Carry]:
    """w = (u, v_i): what was received, with the client's own part in place."""

    def begin(download: Download, state: ClientState) -> Carry:
        params = {**download.shared, **state.personal}
        zero = torch.zeros((), device=next(iter(params.values())).device)
        return Carry(params, download.shared, optimizer.init(params, problem.trainable), zero, zero)

    return begin


def move(
    problem: Problem, *groups: Sequence[str], optimizer: Sgd, pull: float = 0.0
) -> Callable[[Carry, Batch, tuple[Tensor, ...]], Carry]:
    """A step on the groups of names, all gradients at the same point, one rate per group.

    Buffers among the names (BatchNorm statistics) follow the forward pass; all other names stay fixed.
    """
    names = {name for group in groups for name in group}
    moving = tuple(n for n in problem.trainable if n in names)
    statistics = tuple(n for n in problem.buffers if n in names)

    def step(carry: Carry, batch: Batch, lr: tuple[Tensor, ...]) -> Carry:
        w = carry.params
        loss, g, buffers = problem.grad(w, batch, wrt=moving)
        if pull:  # ∇ (μ/2)‖w − w^t‖² = μ (w − w^t), where w^t was received
            g = {k: v + pull * (w[k] - carry.received[k]) if k in carry.received else v for k, v in g.items()}
        rate = {k: lr[i] for i, group in enumerate(groups) for k in group}
        new, momenta = optimizer.update(w, g, carry.momenta, rate, problem.owns_gradients)
        params = {**w, **new, **tree.pick(buffers, statistics)}
        return Carry(params, carry.received, momenta, carry.loss + loss, carry.steps + 1)

    return step


def finish(
    problem: Problem, send: Sequence[str] | None = None
) -> Callable[[Carry, Download, ClientState], tuple[Upload, ClientState]]:
    """Δ = u^t − u_i for the names that are sent (all shared ones); the personal ones stay."""
    sent = problem.partition.shared if send is None else tuple(send)

    def end(carry: Carry, download: Download, state: ClientState) -> tuple[Upload, ClientState]:
        delta = {k: download.shared[k] - carry.params[k] for k in sent}
        loss = carry.loss / carry.steps.clamp(min=1)
        personal = tree.pick(carry.params, problem.partition.personal)
        return Upload(delta, metrics={"loss": loss, "steps": carry.steps}), ClientState(
            personal, state.memory
        )

    return end


def one_pass(now: RoundContext) -> Work:
    """Each of the client's samples once, in the run's batches: for a gradient over all of them."""
    return Work(epochs=1, batch=now.work.batch, shuffle=False)


def together(
    problem: Problem, lr: Rate, optimizer: Sgd, *, personal_lr: Rate | None = None, pull: float = 0.0
) -> LocalRule:
    """Simultaneous steps on all shared and personal tensors."""
    shared, personal = problem.partition
    step = move(problem, shared, personal, optimizer=optimizer, pull=pull)
    return LocalRule(start(problem, optimizer), (Phase(step, (lr, personal_lr or lr)),), finish(problem))
