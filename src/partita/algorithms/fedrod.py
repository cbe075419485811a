"""FedRoD.

    client:  w = (u, h) ← w − η ∇ mean of ℓ(z_G + log n_i, y),   z_G = f(x; u, h)           from w = w^t
             ψ_i ← ψ_i − η_ψ ∇_ψ mean of ℓ(z_G + f(x; u, ψ_i), y)                  u and h are constants
    server:  the mean of w; ψ_i stays with the client, and h + ψ_i as its personal part
    client's model:  z_G + f(x; u, ψ_i)
    client that comes after training:  the steps on ψ_i, with the server's w

n_i has the client's training samples of each class: with the cross entropy, ℓ(z + log n, y) is the balanced
softmax, which makes up for classes that a client has often or never. Both steps are at the same point. ψ_i
begins at zero, so that a client that was never seen has the generic model. The last layer is linear: so the
sum of both predictions is that of the one head h + ψ_i. If all classes are as frequent, w is fedavg's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Unpack

from torch import Tensor, nn

from partita.algorithms.base import Common, Lr, PersonalLr, compose, method, own_part, settings
from partita.algorithms.local import sgd
from partita.algorithms.local.head import linear_head
from partita.algorithms.local.pair import add
from partita.algorithms.local.sgd import Carry
from partita.core import tree
from partita.core.parts import Algorithm, LocalRule, Optimizer, Personalize, Phase, Problem
from partita.core.terms import of_output
from partita.core.types import Batch, ClientState, Download, Partition, Tensors, Upload
from partita.optim.rates import as_rate

PSI = "added."
"""What the memory calls ψ_i: this and the name of a tensor of the head."""
KEPT_BY_PSI = "optimizer_of_added."
"""What it calls the state of ψ_i's optimizer, where that is kept."""
LEAST = 1e-12  # samples that a class counts for of which a client has none


class Heads(NamedTuple):
    """What passes from step to step: the generic model w, and ψ_i."""

    generic: Carry
    own: Carry


@method(
    paper="FedRoD: Chen & Chao, On Bridging Generic and Personalized Federated Learning for Image "
    "Classification (2022), Algorithm 1 with a linear head",
    use="Use it when clients have different classes, and both a global model for all classes and a personal "
    "one are needed.",
)
def fedrod(lr: Lr, personal_lr: PersonalLr = None, **options: Unpack[Common]) -> Algorithm:
    """A global model trained as if classes were balanced, and a personal head that adds to its logits."""
    common, eta = settings(options), as_rate(lr)
    eta_own = eta if personal_lr is None else as_rate(personal_lr)

    def balanced(output: Tensor, class_counts: Tensor) -> Tensor:
        return output + class_counts.clamp(min=LEAST).log()

    def rule(problem: Problem, moves_generic: bool) -> LocalRule:
        step = _step(problem, common.optimizer, moves_generic)
        end = _finish(problem, moves_generic)
        return LocalRule(_start(problem, common.optimizer), (Phase(step, (eta, eta_own)),), end)

    return compose(
        lambda problem: rule(problem, moves_generic=True),
        common,
        partition=_all_and_the_head,
        init_client=_new,
        personalize=_sum,
        loss=partial(of_output, change=balanced),
        newcomer=lambda problem: rule(problem, moves_generic=False),
        kept=(sgd.KEPT, KEPT_BY_PSI),
    )


def _all_and_the_head(model: nn.Module, names: Sequence[str]) -> Partition:
    return Partition(shared=tuple(names), personal=linear_head(model, names, "fedrod"))


def head_of(partition: Partition) -> tuple[str, ...]:
    """Return the names of ψ_i: what is shared and personal; a part that is personal alone has one copy."""
    return tuple(k for k in partition.personal if k in partition.shared)


def _new(model: Tensors, partition: Partition) -> ClientState:
    """ψ_i = 0."""
    zero = tree.zeros_like(tree.pick(model, head_of(partition)))
    return own_part(model, partition)._replace(memory={PSI + k: v for k, v in zero.items()})


def _start(problem: Problem, optimizer: Optimizer) -> Callable[[Download, ClientState], Heads]:
    head = head_of(problem.partition)
    begin, begin_own = sgd.start(problem, optimizer), sgd.start(problem, optimizer, KEPT_BY_PSI)

    def start(download: Download, state: ClientState) -> Heads:
        psi = {k: state.memory[PSI + k] for k in head}
        alone = {k: v for k, v in state.personal.items() if k not in head}
        generic = begin(download, state._replace(personal=alone))
        return Heads(generic, begin_own(download, state)._replace(params=psi))

    return start


def _step(
    problem: Problem, optimizer: Optimizer, moves_generic: bool
) -> Callable[[Heads, Batch, tuple[Tensor, ...]], Heads]:
    plain, head = problem.plain, head_of(problem.partition)
    move = sgd.move(problem, (*problem.trainable, *problem.buffers), optimizer=optimizer)

    def step(carry: Heads, batch: Batch, lr: tuple[Tensor, ...]) -> Heads:
        (w, psi), rates = carry, dict.fromkeys(head, lr[1])
        # ∇_ψ ℓ(f(x; u, h) + f(x; u, ψ)) = ∇_ψ ℓ(f(x; u, h + ψ))
        loss, g, _ = plain.grad(summed(w.params, psi.params), batch, wrt=head)
        new, opt = optimizer.update(psi.params, g, psi.opt, rates)
        return Heads(move(w, batch, lr[:1]) if moves_generic else w, add(psi, new, loss, opt=opt))

    return step


def _finish(
    problem: Problem, moves_generic: bool
) -> Callable[[Heads, Download, ClientState], tuple[Upload, ClientState]]:
    """w^t − w is sent, ψ_i stays; the loss is that of the client's own predictions."""
    head, send = head_of(problem.partition), None if moves_generic else ()
    end = sgd.finish(problem, send)

    def finish(c: Heads, download: Download, state: ClientState) -> tuple[Upload, ClientState]:
        generic = c.generic._replace(loss=c.own.loss, steps=c.own.steps)
        upload, new = end(generic, download, state)
        psi = {PSI + k: v for k, v in c.own.params.items()}
        both = tree.pick(summed(c.generic.params, c.own.params), head)
        memory = sgd.remembered(new.memory, c.own, KEPT_BY_PSI)
        return upload, ClientState({**new.personal, **both}, {**memory, **psi})

    return finish


def summed(w: Tensors, psi: Tensors) -> Tensors:
    """Return the model whose logits are those of both heads together."""
    return {**w, **{k: w[k] + added for k, added in psi.items()}}


def _sum(problem: Problem) -> Personalize:
    head = head_of(problem.partition)

    def start(download: Download, state: ClientState) -> Tensors:
        generic = {**state.personal, **download.shared}
        return summed(generic, {k: state.memory[PSI + k] for k in head})

    return Personalize(start, (), lambda carry, download, state: carry)  # noqa: ARG005
