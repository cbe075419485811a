"""APFL.

    client:  v̄ = α_i v_i + (1 − α_i) w                               one minibatch, all at the same point:
             w ← w − η ∇f_i(w)                                       from w = w^t
             v_i ← v_i − η α_i ∇f_i(v̄)
             α_i ← clip(α_i − η ⟨v_i − w, ∇f_i(v̄)⟩, 0, 1)
    server:  the mean of w; v_i and α_i stay with the client
    client's model: α_i v_i + (1 − α_i) w, with the server's w
    client that comes after training:  the steps on v_i and α_i, with the server's w

As in the paper, v̄ has w and v_i as they were before the step. The client's optimizer takes
the steps of w and of v_i, that of α_i is a plain one. BatchNorm statistics of v_i are
those of the mixture's passes. α = 0, not learned, is fedavg; α = 1, not learned, trains every client alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple, Unpack

import torch
from torch import Tensor

from partita.algorithms.base import Common, Lr, compose, method, settings
from partita.algorithms.local import pair
from partita.algorithms.local.pair import Pair
from partita.algorithms.local.sgd import Carry, move
from partita.core import tree
from partita.core.options import Option, Range
from partita.core.parts import Algorithm, LocalRule, Optimizer, Personalize, Phase, Problem
from partita.core.types import Batch, ClientState, Download, Partition, Tensors, Upload
from partita.optim.rates import as_rate

ALPHA = "alpha"


class Mixed(NamedTuple):
    """What passes from step to step: both models, and α_i."""

    both: Pair
    alpha: Tensor


@method(
    paper="APFL: Deng et al., Adaptive Personalized Federated Learning (2020), Algorithm 1",
    use="Use it when some clients resemble the others and some do not, and nobody knows which.",
    weighting="uniform",
)
def apfl(
    lr: Lr,
    alpha: Annotated[
        float,
        Option("α_i to begin with: the share of the own model", low=0, high=1, search=Range(0.0, 1.0)),
    ] = 0.5,
    learn_alpha: Annotated[bool, Option("whether each client learns its α_i")] = True,
    **options: Unpack[Common],
) -> Algorithm:
    """A mixture of the global model and the client's own, in a proportion that each client learns."""
    common, eta = settings(options), as_rate(lr)

    def new(model: Tensors, partition: Partition) -> ClientState:
        state = pair.copies(model, partition)
        number = next(v for v in model.values() if v.is_floating_point()).new_full((), alpha)
        return state._replace(memory={**state.memory, ALPHA: number})

    def rule(problem: Problem, moves_w: bool) -> LocalRule:
        begin, end = pair.start(problem, common.optimizer), pair.finish(problem)

        def finish(c: Mixed, download: Download, state: ClientState) -> tuple[Upload, ClientState]:
            upload, new = end(c.both, download, state._replace(memory={**state.memory, ALPHA: c.alpha}))
            return upload if moves_w else upload._replace(delta={}), new

        return LocalRule(
            lambda download, state: Mixed(begin(download, state), state.memory[ALPHA]),
            (Phase(_step(problem, common.optimizer, learn_alpha, moves_w), (eta,)),),
            finish,
        )

    return compose(
        lambda problem: rule(problem, moves_w=True),
        common,
        partition=pair.all_twice,
        init_client=new,
        personalize=_mixture,
        newcomer=lambda problem: rule(problem, moves_w=False),
        kept=pair.KEPT_BY_BOTH,
    )


def _step(
    problem: Problem, optimizer: Optimizer, learn: bool, moves_w: bool
) -> Callable[[Mixed, Batch, tuple[Tensor, ...]], Mixed]:
    move_w = move(problem, pair.everything(problem), optimizer=optimizer)
    moving = problem.trainable

    def step(carry: Mixed, batch: Batch, lr: tuple[Tensor, ...]) -> Mixed:
        (w, v), alpha = carry
        loss, g, buffers = problem.grad(mix(alpha, v.params, w.params, moving), batch, wrt=moving)
        rates = dict.fromkeys(moving, lr[0])
        new, opt = optimizer.update(v.params, {k: alpha * x for k, x in g.items()}, v.opt, rates)
        v_new: Carry = pair.add(v, {**v.params, **new, **buffers}, loss, opt=opt)
        if learn:
            slope = torch.stack([((v.params[k] - w.params[k]) * x).sum() for k, x in g.items()]).sum()
            alpha = (alpha - (lr[0].to(alpha.dtype) * slope).to(alpha.dtype)).clamp(0.0, 1.0)
        return Mixed(Pair(move_w(w, batch, lr) if moves_w else w, v_new), alpha)

    return step


def mix(alpha: Tensor, v: Tensors, w: Tensors, names: tuple[str, ...]) -> Tensors:
    """α v + (1 − α) w for these names, the rest as in v."""
    return {**v, **{k: alpha * v[k] + (1 - alpha) * w[k] for k in names}}


def _mixture(problem: Problem) -> Personalize:
    def start(download: Download, state: ClientState) -> Tensors:
        w = pair.shared_model(download, state)
        own = tree.pick(state.personal, problem.partition.personal)
        return mix(state.memory[ALPHA], {**w, **own}, w, problem.trainable)

    return Personalize(start, (), lambda carry, download, state: carry)  # noqa: ARG005
