"""Solvers of w ≈ argmin_w f(θ, w), θ fixed: Mishchenko et al., *Partially Personalized FL* (2023), section 3.

    gd      w ← w − γ ∇₂f(θ, w), or as the client's optimizer says               Algorithm 2
    adam    m ← β₁ m + (1 − β₁) ∇₂f,   v ← β₂ v + (1 − β₂) (∇₂f)²                Kingma & Ba (2015)
            w ← w − γ m̂ / (√v̂ + ε),    m̂ = m / (1 − β₁ᵗ),   v̂ = v / (1 − β₂ᵗ)
    cg      H d = −∇₂f(θ, w⁰),   H = ∇²₂₂f(θ, w⁰),   w = w⁰ + d, from r = p = −∇₂f(θ, w⁰) by
            α = rᵀr / pᵀHp,   d ← d + α p,   r⁺ = r − α Hp,   p ← r⁺ + (r⁺ᵀr⁺ / rᵀr) p
    exact   w ← w⁰ − H⁺ ∇₂f(θ, w⁰)

cg and exact solve the quadratic model of f at w⁰, which is f itself where f is quadratic in w. exact moves
w only in directions in which f curves upwards; cg ends at the first p in which it does not, or when r is zero
but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from partita import optim
from partita.algorithms.local.sgd import update_of
from partita.core import check, tree
from partita.core.options import Option, checked
from partita.core.parts import Optimizer, Phase, Problem, Rate
from partita.core.types import Batch, RoundContext, Tensors, Work
from partita.optim.optimizers import Beta1, Beta2, Eps
from partita.optim.rates import as_rate, until_the_end

__all__ = ["adam", "cg", "exact", "gd"]

LARGEST = 2000  # parameters of which `exact` forms a Hessian
TOGETHER = 64  # of its columns at once
ROUNDING = 16  # a residual of so many roundings is none


class Fit(NamedTuple):
    """What passes from step to step: the whole model, and what the solver remembers."""

    params: Tensors
    memory: Any


class Task(NamedTuple):
    """What is solved: the problem, the names of w, its statistics, which follow the forward pass.

    `optimizer` is the client's.
    """

    problem: Problem
    names: tuple[str, ...]
    statistics: tuple[str, ...]
    optimizer: Optimizer

    def gradient(self, params: Tensors, batch: Batch) -> tuple[Tensors, Tensors]:
        """∇₂f, and the statistics after the pass."""
        _, g, buffers = self.problem.grad(params, batch, wrt=self.names)
        return g, tree.pick(buffers, self.statistics)


Step = Callable[[Tensors, Any, Any, Any], tuple[Tensors, Any]]
"""(params, memory, batch, lr) -> params, memory."""


@dataclass(frozen=True, repr=False)
class Solver:
    """A way to find w. Its fields are its options.

    A solver has a memory, the same structure before and after each step, and phases of steps.
    """

    def remember(self, task: Task, params: Tensors) -> Any:
        """The memory to begin with."""
        raise NotImplementedError

    def phases(self, task: Task) -> tuple[Phase, ...]:
        """Its steps, on a carry that has `params` and `memory`."""
        raise NotImplementedError

    def fits(self, parameters: int) -> None:
        """Refuse a w that is too large."""

    def __repr__(self) -> str:
        values = [(f, getattr(self, f.name)) for f in fields(self)]
        options = [f"{f.name}={value!r}" for f, value in values if not (f.kw_only and value == f.default)]
        return f"pt.{type(self).__name__.lower()}({', '.join(options)})"


def solve(
    problem: Problem, solver: Solver, optimizer: Optimizer
) -> tuple[Callable[[Tensors], Any], tuple[Phase, ...]]:
    """The solver's memory for a model, and its phases on a carry that has `params` and `memory`.

    Without personal parameters there is nothing to do.
    """
    mine = set(problem.partition.personal)
    names, statistics = (tuple(n for n in x if n in mine) for x in (problem.trainable, problem.buffers))
    task = Task(problem, names, statistics, optimizer)
    phases = solver.phases(task) if names else ()
    return lambda params: solver.remember(task, params) if names else (), phases


def _phase(
    step: Step,
    work: Callable[[RoundContext], Work] | None,
    lr: float | Rate | None = None,
    until: Callable[[Any], Tensor] | None = None,
) -> Phase:
    def carried(carry: Any, batch: Any, lr: Any) -> Any:
        params, memory = step(carry.params, carry.memory, batch, lr)
        return carry._replace(params=params, memory=memory)

    finished = None if until is None else lambda carry: until(carry.memory)
    return Phase(carried, () if lr is None else (until_the_end(as_rate(lr)),), work, until=finished)


def _work(steps: int | None, epochs: int | None) -> Callable[[RoundContext], Work] | None:
    if steps is None and epochs is None:
        return None
    return lambda now: replace(now.work, steps=steps, epochs=epochs)


def _full(steps: int) -> Callable[[RoundContext], Work]:
    return lambda now: Work(steps=steps)  # noqa: ARG005


# ---- gradient descent

RATE = "a rate such as partita.optim.linear(0.1)"
Steps = Annotated[
    int | None, Option("τ, how many steps (None: `epochs`, or as the run says)", low=1, example=10)
]
Lr = Annotated[
    float | Rate, Option("γ, the step size on the personal part", low=0, allowed=RATE, example=0.1)
]
Epochs = Annotated[
    int | None,
    Option("passes over the client's data in place of steps, in batches of the run (None: by steps)", low=1),
]


@dataclass(frozen=True, repr=False)
class Gd(Solver):
    """Gradient descent on the personal part, on minibatches if the run has a batch size.

    The client's optimizer takes the steps, with its momentum, decay and clipping.

    Use it for any model: a few steps cost no more than those of fedalt.
    """

    steps: Steps = None
    lr: Lr = 0.1
    epochs: Epochs = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise check.fail("epochs", self.epochs, f"nothing beside steps={self.steps}: one of the two")

    def optimizer(self, task: Task) -> Optimizer:
        """Return what takes the steps."""
        return task.optimizer

    def remember(self, task: Task, params: Tensors) -> Tensors:
        """Return the optimizer's state."""
        return self.optimizer(task).init(tree.pick(params, task.names))

    def phases(self, task: Task) -> tuple[Phase, ...]:
        """One."""
        update = update_of(self.optimizer(task), task.problem)

        def step(params: Tensors, opt: Tensors, batch: Batch, lr: tuple[Tensor]) -> tuple[Tensors, Tensors]:
            g, statistics = task.gradient(params, batch)
            new, opt = update(params, g, opt, dict.fromkeys(task.names, lr[0]))
            return {**params, **new, **statistics}, opt

        return (_phase(step, _work(self.steps, self.epochs), self.lr),)


@dataclass(frozen=True, repr=False)
class Adam(Gd):
    """Adam on the personal part, with bias correction.

    Use it where gradient descent needs a step size for each layer, as with adapters of a large model.
    """

    lr: Lr = 1e-3
    beta1: Beta1 = 0.9
    beta2: Beta2 = 0.999
    eps: Eps = 1e-8

    def optimizer(self, task: Task) -> Optimizer:  # noqa: ARG002
        """Return Adam, whatever the client's optimizer is."""
        return optim.adam(beta1=self.beta1, beta2=self.beta2, eps=self.eps)


# ---- conjugate gradients


class Conjugate(NamedTuple):
    """w⁰, r, p, rᵀr now and at first, whether there is a direction left, and the key of every forward pass:
    all of them see the same f."""

    start: Tensors
    r: Tensors
    p: Tensors
    rr: Tensor
    first: Tensor
    further: Tensor
    key: Tensor


@dataclass(frozen=True, repr=False)
class Cg(Solver):
    """Conjugate gradients on the quadratic model of the loss, always on the full batch.

    Use it where the loss is quadratic in the personal part, or nearly: it needs no step size.
    """

    steps: Annotated[int, Option("τ, how many iterations, each a Hessian-vector product", low=1, example=10)]

    def remember(self, task: Task, params: Tensors) -> Conjugate:
        """Nothing yet: r = p = 0, where nothing moves."""
        w = tree.pick(params, task.names)
        zero = w[task.names[0]].new_zeros(())
        nothing = tree.zeros_like(w)
        return Conjugate(w, nothing, nothing, zero, zero, zero.bool(), zero.long())

    def phases(self, task: Task) -> tuple[Phase, ...]:
        """The residual, the iterations."""

        def begin(params: Tensors, old: Conjugate, batch: Batch, lr: Any) -> tuple[Tensors, Conjugate]:  # noqa: ARG001
            g, statistics = task.gradient(params, batch)
            r = {k: -x for k, x in g.items()}
            rr = dot(r, r)
            return {**params, **statistics}, Conjugate(old.start, r, dict(r), rr, rr, rr != 0, batch.key)

        def iterate(params: Tensors, old: Conjugate, batch: Batch, lr: Any) -> tuple[Tensors, Conjugate]:  # noqa: ARG001
            point = {**params, **old.start}
            Hp = task.problem.hvp(point, batch._replace(key=old.key), old.p)
            alpha = over(old.rr, dot(old.p, Hp))
            w = tree.axpy(alpha, old.p, tree.pick(params, task.names))
            r = tree.axpy(-alpha, Hp, old.r)
            rr = dot(r, r)
            beta = over(rr, old.rr)
            further = (alpha > 0) & (rr > (ROUNDING * torch.finfo(rr.dtype).eps) ** 2 * old.first)
            p = tree.axpy(beta, old.p, r)
            return {**params, **w}, Conjugate(old.start, r, p, rr, old.first, further, old.key)

        def finished(memory: Conjugate) -> Tensor:
            return ~memory.further

        return _phase(begin, _full(1)), _phase(iterate, _full(self.steps), until=finished)


def dot(a: Tensors, b: Tensors) -> Tensor:
    """aᵀb over all entries."""
    return torch.stack([(a[k] * b[k]).sum() for k in a]).sum()


def over(a: Tensor, b: Tensor) -> Tensor:
    """a/b where b > 0, else zero."""
    positive = b > 0
    return torch.where(positive, a / torch.where(positive, b, 1.0), 0.0)


# ---- exactly


@dataclass(frozen=True, repr=False)
class Exact(Solver):
    """The minimizer itself where the loss is quadratic in the personal part; up to 2,000 parameters.

    Its Hessian is formed column by column, always on the full batch.

    Use it for least squares, and to see what a perfect solver would give.
    """

    def fits(self, parameters: int) -> None:
        """Its Hessian has as many rows and columns."""
        if parameters > LARGEST:
            few = f"a personal part of up to {LARGEST} parameters for exact(), or cg(steps)"
            raise check.fail("personal parameters", parameters, few)

    def remember(self, task: Task, params: Tensors) -> tuple[()]:
        """Nothing."""
        self.fits(sum(params[name].numel() for name in task.names))
        return ()

    def phases(self, task: Task) -> tuple[Phase, ...]:
        """One step."""

        def step(params: Tensors, memory: tuple[()], batch: Batch, lr: Any) -> tuple[Tensors, tuple[()]]:  # noqa: ARG001
            g, statistics = task.gradient(params, batch)
            like = tree.pick(params, task.names)

            def column(e: Tensor) -> Tensor:
                return joined(task.problem.hvp(params, batch, parted(e, like)), task.names)

            flat = joined(g, task.names)
            basis = torch.eye(len(flat), dtype=flat.dtype, device=flat.device)
            H = torch.func.vmap(column, chunk_size=TOGETHER, randomness="same")(basis)
            w = tree.sub(like, parted(newton(H, flat), like))
            return {**params, **w, **statistics}, memory

        return (_phase(step, _full(1)),)


def newton(H: Tensor, g: Tensor) -> Tensor:
    """H⁺g in the directions of positive eigenvalues; not a number where H or g is not."""
    usable = torch.isfinite(H).all() & torch.isfinite(g).all()
    value, vector = torch.linalg.eigh(torch.where(usable, (H + H.mT) / 2, 0.0))  # which would stop at NaN
    small = torch.finfo(H.dtype).eps * len(g) * value.abs().amax()
    kept = value > small
    step: Tensor = vector @ torch.where(kept, (vector.mT @ g) / torch.where(kept, value, 1.0), 0.0)
    return torch.where(usable, step, torch.nan)


def joined(x: Tensors, names: Sequence[str]) -> Tensor:
    """All entries as one vector."""
    return torch.cat([x[name].reshape(-1) for name in names])


def parted(vector: Tensor, like: Tensors) -> Tensors:
    """The vector as tensors of these names and shapes."""
    parts = torch.split(vector, [x.numel() for x in like.values()])
    return {k: part.reshape(x.shape).to(x.dtype) for part, (k, x) in zip(parts, like.items())}


# ---- what users write

gd, adam, cg, exact = checked()(Gd), checked()(Adam), checked()(Cg), checked()(Exact)
