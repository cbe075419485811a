"""Gradient steps on some of a client's tensors: the piece that most methods are made of.

g ← ∇f(w; batch) + μ (w − w^t)            pull towards what was received, if any
g_v ← g_v + μ_v (v − v⁰)                  pull of the personal part towards where the stage began, if any
g ← g · min(1, G / ‖g‖)                   clipping at `max_grad_norm`, if any
w ← optimizer(w, g, η)                    w − η g, or as `partita.optim` says; its state begins with the
                                          round, or is what the client has kept of the one before
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from partita.core import tree
from partita.core.options import given
from partita.core.parts import LocalRule, Optimizer, Phase, Problem, Rate, Update
from partita.core.types import Batch, ClientState, Download, RoundContext, Tensors, Upload, Work

KEPT = "optimizer."
"""What the memory calls the state of an optimizer that is kept between rounds: this and its name."""


class Carry(NamedTuple):
    """What passes from step to step: the whole model, what was received, the optimizer's state, losses."""

    params: Tensors
    received: Tensors
    opt: Tensors
    loss: Tensor
    steps: Tensor


def start(
    problem: Problem, optimizer: Optimizer, kept: str = KEPT
) -> Callable[[Download, ClientState], Carry]:
    """w = (u, v_i): what was received, with the client's own part in place.

    `kept` begins the names of the optimizer's state in the client's memory, where it is kept.
    """

    def begin(download: Download, state: ClientState) -> Carry:
        params = {**download.shared, **state.personal}
        zero = torch.zeros((), device=next(iter(params.values())).device)
        new = optimizer.init(tree.pick(params, problem.trainable))
        opt = {k: state.memory.get(kept + k, v) for k, v in new.items()}
        return Carry(params, download.shared, opt, zero, zero)

    return begin


def move(
    problem: Problem,
    *groups: Sequence[str],
    optimizer: Optimizer,
    pull: float = 0.0,
    personal_l2: float = 0.0,
) -> Callable[[Carry, Batch, tuple[Tensor, ...]], Carry]:
    """A step on the groups of names, all gradients at the same point, one rate per group.

    Buffers among the names (BatchNorm statistics) follow the forward pass; all other names stay fixed.
    """
    names = {name for group in groups for name in group}
    moving = tuple(n for n in problem.trainable if n in names)
    statistics = tuple(n for n in problem.buffers if n in names)
    anchored = set(problem.partition.personal) & set(moving) if given(personal_l2) else ()
    update, pulled = update_of(optimizer, problem), given(pull)

    def step(carry: Carry, batch: Batch, lr: tuple[Tensor, ...]) -> Carry:
        w = carry.params
        loss, g, buffers = problem.grad(w, batch, wrt=moving)
        if pulled:  # ∇ (μ/2)‖w − w^t‖² = μ (w − w^t), where w^t was received
            g = {k: v + pull * (w[k] - carry.received[k]) if k in carry.received else v for k, v in g.items()}
        if anchored:  # ∇ (μ/2)‖v − v⁰‖² = μ (v − v⁰), where v⁰ is every client's first personal part
            g |= {k: g[k] + personal_l2 * (w[k] - problem.initial[k]) for k in anchored}
        rate = {k: lr[i] for i, group in enumerate(groups) for k in group}
        new, opt = update(w, g, carry.opt, rate)
        params = {**w, **new, **tree.pick(buffers, statistics)}
        return Carry(params, carry.received, opt, carry.loss + loss, carry.steps + 1)

    return step


def update_of(optimizer: Optimizer, problem: Problem) -> Update:
    """Return the optimizer's update, in the memory of the gradients where the problem allows it."""
    return (problem.owns_gradients and optimizer.in_place) or optimizer.update


def finish(
    problem: Problem, send: Sequence[str] | None = None
) -> Callable[[Carry, Download, ClientState], tuple[Upload, ClientState]]:
    """Δ = u^t − u_i for the names that are sent (all shared ones); the personal ones stay."""
    sent = problem.partition.shared if send is None else tuple(send)

    def end(carry: Carry, download: Download, state: ClientState) -> tuple[Upload, ClientState]:
        delta = {k: download.shared[k] - carry.params[k] for k in sent}
        loss = carry.loss / carry.steps.clamp(min=1)
        personal = tree.pick(carry.params, problem.partition.personal)
        memory = remembered(state.memory, carry)
        return Upload(delta, metrics={"loss": loss, "steps": carry.steps}), ClientState(personal, memory)

    return end


def remembered(memory: Tensors, carry: Carry, kept: str = KEPT) -> Tensors:
    """Return the memory with the state of the optimizer, as far as it has a place for that."""
    return {k: carry.opt.get(k.removeprefix(kept), v) if k.startswith(kept) else v for k, v in memory.items()}


def personal_only(
    problem: Problem,
    lr: Rate,
    optimizer: Optimizer,
    *,
    work: Callable[[RoundContext], Work] | None = None,
    pull: float = 0.0,
    personal_l2: float = 0.0,
) -> LocalRule:
    """v ← v − η (∇_v f(u, v) + a pull on v, if any), with the received u fixed; nothing is sent."""
    own = problem.partition.personal
    step = move(problem, own, optimizer=optimizer, pull=pull, personal_l2=personal_l2)
    phase = Phase(step, (lr,), work)
    return LocalRule(start(problem, optimizer), (phase,) if own else (), finish(problem, send=()))


def one_pass(now: RoundContext) -> Work:
    """Each of the client's samples once, in the run's batches: for a gradient over all of them."""
    return Work(epochs=1, batch=now.work.batch, shuffle=False)


def together(
    problem: Problem,
    lr: Rate,
    optimizer: Optimizer,
    *,
    personal_lr: Rate | None = None,
    pull: float = 0.0,
    personal_l2: float = 0.0,
) -> LocalRule:
    """Simultaneous steps on all shared and personal tensors."""
    shared, personal = problem.partition
    step = move(problem, shared, personal, optimizer=optimizer, pull=pull, personal_l2=personal_l2)
    return LocalRule(start(problem, optimizer), (Phase(step, (lr, personal_lr or lr)),), finish(problem))
