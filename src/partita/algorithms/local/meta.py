"""Steps on the MAML objective: Fallah et al., *Personalized Federated Learning* (2020), Algorithm 1.

F(w)   = f(w − α ∇f(w))
∇̃F(w)  = [I − α ∇²f̃(w, D'')] ∇f̃(w − α ∇f̃(w, D'), D)          three independent batches

The product with the Hessian, d being the gradient at the adapted model:

exact  ∇²f(w) d, forward over reverse
hf     (∇f(w + δ d) − ∇f(w − δ d)) / (2 δ)
fo     left out: ∇f̃(w − α ∇f̃(w, D'), D)

The client's optimizer takes the step along ∇̃F, which is clipped before. The α-steps are plain
gradient steps. BatchNorm statistics follow the pass on D, that of the adapted model.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from partita.algorithms.local.pair import add
from partita.algorithms.local.sgd import Carry
from partita.core import tree
from partita.core.options import given
from partita.core.parts import Optimizer, Personalize, Phase, Problem, Rate
from partita.core.types import Batch, ClientState, Download, Tensors, Work

HESSIANS = ("exact", "hf", "fo")


def meta(problem: Problem, lr: Rate, alpha: float, optimizer: Optimizer, hessian: str, delta: float) -> Phase:
    """Steps along ∇̃F. The batches of a step are D, D' and D''."""
    moving = problem.trainable
    second, plain = _curvature(problem, hessian, delta), not given(alpha)

    def step(carry: Carry, batches: tuple[Batch, ...], lr: tuple[Tensor, ...]) -> Carry:
        w = carry.params
        if plain:  # plain gradient steps, to the bit
            loss, g, buffers = problem.grad(w, batches[0], wrt=moving)
        else:
            _, inner, _ = problem.grad(w, batches[1], wrt=moving)
            near = {**w, **tree.axpy(-alpha, inner, tree.pick(w, moving))}
            loss, g, buffers = problem.grad(near, batches[0], wrt=moving)
            if second is not None:  # g − α ∇²f(w) g
                g = tree.axpy(-alpha, second(w, batches[2], g), g)
        new, opt = optimizer.update(w, g, carry.opt, dict.fromkeys(moving, lr[0]))
        return add(carry, {**w, **new, **buffers}, loss, opt=opt)

    return Phase(step, (lr,), batches=2 if second is None else 3)


def _curvature(
    problem: Problem, hessian: str, delta: float
) -> Callable[[Tensors, Batch, Tensors], Tensors] | None:
    """(w, batch, d) -> ∇²f(w) d; None: left out."""

    def differences(w: Tensors, batch: Batch, d: Tensors) -> Tensors:
        around = [{**w, **tree.axpy(s * delta, d, tree.pick(w, d))} for s in (1.0, -1.0)]
        ahead, behind = (problem.grad(point, batch, wrt=tuple(d))[1] for point in around)
        return {k: (ahead[k] - behind[k]) / (2 * delta) for k in d}

    return {"exact": problem.hvp, "hf": differences, "fo": None}[hessian]


def adapted(problem: Problem, alpha: float, steps: int = 1, batch: int | None = None) -> Personalize:
    """The model of a client: w − α ∇f_i(w), one step on all of its training data, or several on minibatches.

    w is what it received with its own part in place. With α = 0 that is its model.
    """

    def start(download: Download, state: ClientState) -> Tensors:
        return {**download.shared, **tree.pick(state.personal, problem.partition.personal)}

    def step(w: Tensors, batch: Batch, lr: tuple[Tensor, ...]) -> Tensors:  # noqa: ARG001
        _, g, buffers = problem.grad(w, batch, wrt=problem.trainable)
        return {**w, **tree.axpy(-alpha, g, tree.pick(w, problem.trainable)), **buffers}

    phase = Phase(step, work=lambda now: Work(steps=steps, batch=batch))  # noqa: ARG005
    return Personalize(start, (phase,) if alpha else (), lambda w, download, state: w)  # noqa: ARG005
