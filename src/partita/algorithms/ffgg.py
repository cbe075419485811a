"""FFGG.

    client:  w⁰ drawn anew;   w ≈ argmin_w f_m(θ, w)               by a solver, θ fixed
             ffgg             Δ_m = γ_θ ∇₁f_m(θ, w)                over all training data of the client, or
                                                                   an unbiased estimate, over one batch
             ffgg_local       K times   w ← w − γ_w ∇₂f_m(θ_m, w),   θ_m ← θ_m − γ_θ ∇₁f_m(θ_m, w)
                              Δ_m = θ − θ_m
    server:  θ ← θ − mean of Δ_m                                   ffgg_robust: a robust aggregate of Δ_m
                                                                   ffgg_async: on every arrival, θ ← θ − Δ_m

Clients keep nothing: w is forgotten with the round. The model of a client is (θ, w), solved for once more, by
a solver of its own if `evaluate` names one.

The paper's server multiplies with γ_θ what the clients of Algorithms 1, 3 and 5 send; here γ_θ is inside Δ_m,
as it is in Algorithm 4, so that it can be a rate over the rounds. A mean, a median, Krum and buckets of them
commute with γ_θ. Aggregators and transforms with a length of their own (centered_clipping, a smoothed median,
clipping of uploads) do not: their lengths are those of γ_θ ∇₁f_m. With lr=1 and server=optim.sgd(γ_θ) clients
send ∇₁f_m itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple, Unpack

from torch import Tensor, nn

from partita.aggregate.bucketing import bucketing
from partita.aggregate.coordinate_median import coordinate_median
from partita.algorithms.base import (
    Choices,
    Common,
    Lr,
    Part,
    PersonalLr,
    compose,
    having,
    method,
    settings,
)
from partita.algorithms.local import sgd
from partita.algorithms.local.fresh import fresh
from partita.algorithms.local.solvers import Fit, Gd, Solver, gd, solve
from partita.algorithms.partition import Personal, split
from partita.core import tree
from partita.core.options import Option
from partita.core.parts import Algorithm, LocalRule, Optimizer, Personalize, Phase, Problem
from partita.core.types import (
    Batch,
    ClientState,
    Download,
    Partition,
    RoundContext,
    Tensors,
    Upload,
    Work,
)
from partita.optim.rates import as_rate

PAPER = "FFGG: Mishchenko et al., Partially Personalized Federated Learning (2023), Algorithms 1 to 5"

NOTHING_KEPT = "its clients keep nothing between rounds"

SOLVER = "a solver such as partita.gd(steps=10, lr=0.1), partita.cg(steps=10) or partita.exact()"
Solves = Annotated[
    Solver,
    Option("how a client finds its personal part", allowed=SOLVER),
]
TEN_STEPS = Gd(steps=10, lr=0.1)
Start = Annotated[
    str,
    Option("where it begins: drawn anew each time, or the model's own part", choices=("random", "model")),
]
Evaluate = Annotated[
    Solver | None,
    Option(
        "how a client finds the personal part that it is evaluated with, or deploys (None: as in training)",
        allowed=SOLVER,
    ),
]
Gradient = Annotated[
    str,
    Option(
        "∇₁f over all data of the client, or over one random batch of the run's", choices=("full", "batch")
    ),
]


@method(
    paper=PAPER,
    use="Use it when clients cannot keep a state, or when the personal part is so large that it fits "
    "every client.",
    weighting="uniform",
    refuses={"optimizer_state": NOTHING_KEPT},
)
def ffgg(
    personal: Part,
    lr: Lr,
    solver: Solves = TEN_STEPS,
    start: Start = "random",
    evaluate: Evaluate = None,
    gradient: Gradient = "full",
    **options: Unpack[Common],
) -> Algorithm:
    """Fine-tuning followed by a global gradient: each client solves for its part, then sends one gradient."""
    common, gamma = settings(options), as_rate(lr)
    work = sgd.one_pass if gradient == "full" else _one_batch

    def local(problem: Problem) -> LocalRule:
        begin, phases = fitting(problem, solver, common.optimizer, start)
        step = Phase(_accumulate(problem), (gamma,), work)
        return LocalRule(_measuring(problem, begin), (*phases, step), _finish(problem, common.optimizer))

    algorithm = _stateless(local, common, personal, (solver, evaluate or solver), start)
    return replace(algorithm, sends_gradients=True)


@method(
    paper=PAPER,
    use="Use it instead of ffgg when rounds are expensive: many local steps, one upload.",
    weighting="uniform",
    refuses={"optimizer_state": NOTHING_KEPT},
)
def ffgg_local(
    personal: Part,
    lr: Lr,
    personal_lr: PersonalLr = None,
    solver: Annotated[
        Solver | None,
        Option(
            "how a client first finds its personal part (None: gd, as much as the run says)", allowed=SOLVER
        ),
    ] = None,
    start: Start = "random",
    evaluate: Evaluate = None,
    **options: Unpack[Common],
) -> Algorithm:
    """FFGG with local steps: each client solves for its part, then both parts take steps in turn."""
    common, gamma = settings(options), as_rate(lr)
    gamma_w = gamma if personal_lr is None else as_rate(personal_lr)
    first = solver or gd(None, gamma_w)

    def local(problem: Problem) -> LocalRule:
        begin, phases = fitting(problem, first, common.optimizer, start)
        step = Phase(_alternate(problem, common.optimizer), (gamma_w, gamma))
        return LocalRule(
            _alternating(problem, begin, common.optimizer), (*phases, step), _finish_local(problem)
        )

    return _stateless(local, common, personal, (first, evaluate or first), start)


@method(
    paper=PAPER,
    use="Use it when some clients may be faulty or hostile.",
    weighting="uniform",
    refuses={"optimizer_state": NOTHING_KEPT},
)
def ffgg_robust(
    personal: Part,
    lr: Lr,
    solver: Solves = TEN_STEPS,
    start: Start = "random",
    evaluate: Evaluate = None,
    gradient: Gradient = "full",
    **options: Unpack[Common],
) -> Algorithm:
    """FFGG with a robust aggregator, bucketing(2, coordinate_median()) by default.

    Where the personal part fits every client, Byzantine clients cannot hide.
    """
    aggregate = options["aggregate"] or bucketing(2, coordinate_median())
    return ffgg(personal, lr, solver, start, evaluate, gradient, **having(options, aggregate=aggregate))


@method(
    paper=PAPER,
    use="Use it instead of ffgg when clients differ much in speed.",
    weighting="uniform",
    refuses={"optimizer_state": NOTHING_KEPT},
)
def ffgg_async(
    personal: Part,
    lr: Lr,
    solver: Solves = TEN_STEPS,
    start: Start = "random",
    evaluate: Evaluate = None,
    gradient: Gradient = "full",
    **options: Unpack[Common],
) -> Algorithm:
    """Asynchronous FFGG: the server takes a step along each client's gradient as soon as it arrives.

    While one client computes, those of the M at work make M such steps: lr is about 1/M of what `ffgg` takes
    along the mean of M gradients. Theorem 7 has a smaller one, `partita.theory.ffgg_async_lr`.
    """
    method = ffgg(personal, lr, solver, start, evaluate, gradient, **options)
    return replace(method, asynchronous={"buffer": 1})


# ---- what they have in common


def fitting(
    problem: Problem, solver: Solver, optimizer: Optimizer, start: str
) -> tuple[Callable[[Download, ClientState], Fit], tuple[Phase, ...]]:
    """(θ, w⁰), and the phases that turn it into (θ, w)."""
    remember, phases = solve(problem, solver, optimizer)
    drawn = tuple(n for n in problem.trainable if n in set(problem.partition.personal))

    def begin(download: Download, state: ClientState) -> Fit:
        params = {**download.shared, **state.personal}
        if start == "random" and drawn:
            assert download.key is not None
            params |= fresh(state.personal, drawn, download.key)
        return Fit(params, remember(params))

    return begin, phases


def _stateless(
    local: Callable[[Problem], LocalRule],
    common: Choices,
    personal: Personal,
    solvers: tuple[Solver, Solver],
    start: str,
) -> Algorithm:
    """Nothing is kept; who wants the client's model solves for w again.

    The solvers are those of training and of evaluation.
    """

    def partition(model: nn.Module, names: Sequence[str]) -> Partition:
        parts = split(model, names, personal=personal)
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        for solver in solvers:
            solver.fits(sum(sizes.get(name, 0) for name in parts.personal))
        return parts

    def personalize(problem: Problem) -> Personalize:
        begin, phases = fitting(problem, solvers[1], common.optimizer, start)
        return Personalize(begin, phases, lambda fit, download, state: fit.params)  # noqa: ARG005

    return compose(local, common, partition=partition, personalize=personalize, stateful=False)


# ---- one gradient


def _one_batch(now: RoundContext) -> Work:
    """A random batch of the run's size; all samples if it has none."""
    return replace(now.work, steps=1, epochs=None)


class Measured(NamedTuple):
    """(θ, w), what the solver remembers, ∇₁f and f so far: means over the samples, in so many steps; γ_θ."""

    params: Tensors
    memory: Any
    gradient: Tensors
    loss: Tensor
    samples: Tensor
    steps: Tensor
    lr: Tensor


def _measuring(
    problem: Problem, begin: Callable[[Download, ClientState], Fit]
) -> Callable[[Download, ClientState], Measured]:
    def start(download: Download, state: ClientState) -> Measured:
        params, memory = begin(download, state)
        zero = params[problem.trainable[0]].new_zeros(())
        exact = zero.double()
        gradient = tree.zeros_like(tree.pick(params, _moving(problem)))
        return Measured(params, memory, gradient, zero, exact, zero, exact)

    return start


def _accumulate(problem: Problem) -> Callable[[Measured, Batch, tuple[Tensor]], Measured]:
    """ḡ ← ḡ + (n_b / n) (g_b − ḡ), where n counts all samples so far: at the end Σ n_b g_b / n."""
    moving = _moving(problem)

    def step(carry: Measured, batch: Batch, lr: tuple[Tensor]) -> Measured:
        loss, g, buffers = problem.grad(carry.params, batch, wrt=moving)
        seen = len(batch.y) if batch.mask is None else batch.mask.sum()
        samples = carry.samples + seen
        share = seen / samples.clamp(min=1)
        mean = {k: x + share.to(x.dtype) * (g[k] - x) for k, x in carry.gradient.items()}
        return carry._replace(
            params={**carry.params, **buffers},
            gradient=mean,
            loss=carry.loss + share.to(loss.dtype) * (loss - carry.loss),
            samples=samples,
            steps=carry.steps + 1,
            lr=lr[0],
        )

    return step


def _finish(
    problem: Problem, optimizer: Optimizer
) -> Callable[[Measured, Download, ClientState], tuple[Upload, ClientState]]:
    """Δ = θ − (θ − γ_θ ∇₁f): the first step of the client's optimizer, which has no past."""

    def end(carry: Measured, download: Download, state: ClientState) -> tuple[Upload, ClientState]:
        rates = dict.fromkeys(carry.gradient, carry.lr)
        opt = optimizer.init(tree.pick(carry.params, carry.gradient))
        theta, _ = optimizer.update(carry.params, carry.gradient, opt, rates)
        after = {**carry.params, **theta}
        delta = {k: download.shared[k] - after[k] for k in problem.partition.shared}
        return Upload(delta, metrics={"loss": carry.loss, "steps": carry.steps}), state

    return end


def _moving(problem: Problem) -> tuple[str, ...]:
    shared = set(problem.partition.shared)
    return tuple(n for n in problem.trainable if n in shared)


# ---- local steps


class Alternating(NamedTuple):
    """(θ_m, w), what the solver remembers, and the rest of `sgd.Carry`."""

    params: Tensors
    memory: Any
    rest: tuple[Tensors, Tensors, Tensor, Tensor]


def _alternating(
    problem: Problem, begin: Callable[[Download, ClientState], Fit], optimizer: Optimizer
) -> Callable[[Download, ClientState], Alternating]:
    def start(download: Download, state: ClientState) -> Alternating:
        params, memory = begin(download, state)
        zero = params[problem.trainable[0]].new_zeros(())
        opt = optimizer.init(tree.pick(params, problem.trainable))
        return Alternating(params, memory, (download.shared, opt, zero, zero))

    return start


def _alternate(
    problem: Problem, optimizer: Optimizer
) -> Callable[[Alternating, Batch, tuple[Tensor, Tensor]], Alternating]:
    """w ← w − γ_w ∇₂f(θ_m, w), then θ_m ← θ_m − γ_θ ∇₁f(θ_m, w), on the same batch."""
    theta, w = problem.partition
    moves = [(sgd.move(problem, part, optimizer=optimizer), i) for i, part in enumerate((w, theta)) if part]

    def step(carry: Alternating, batch: Batch, lr: tuple[Tensor, Tensor]) -> Alternating:
        inner = sgd.Carry(carry.params, *carry.rest)
        for move, i in moves:
            inner = move(inner, batch, (lr[i],))
        return carry._replace(params=inner.params, rest=inner[1:])

    return step


def _finish_local(
    problem: Problem,
) -> Callable[[Alternating, Download, ClientState], tuple[Upload, ClientState]]:
    end = sgd.finish(problem)

    def finish(carry: Alternating, download: Download, state: ClientState) -> tuple[Upload, ClientState]:
        upload, _ = end(sgd.Carry(carry.params, *carry.rest), download, state)
        return upload, state

    return finish
