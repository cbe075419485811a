"""Fed+.

    client:  θ_k = prox_{Ψ/σ}(w_k − w̃)                     once a round
             w ← (1 − λ) w_k + λ w̃                         where its steps begin
             w ← κ [w − η ∇f_k(w)] + (1 − κ) [w̃ + θ_k]     E_k steps, κ = 1/(1 + ησ); w_k is the last w
    server:  w̃ = 𝒜(w_k), the aggregator of Ψ, over the cohort or over the last models of all clients

A step is one of gradient descent, of size ηκ, on f_k(w) + (σ/2)‖w − (w̃ + θ_k)‖² (Proposition 1). The
client's optimizer takes the gradient step inside the first brackets. With `solver=`, that problem is solved
in another way, such as exactly (Assumption 2). Statistics (BatchNorm) follow the forward pass and begin at
(1 − λ) the client's own + λ the server's; Ψ does not touch them.

λ = 0 and σ = 0 is local; λ = 1 and σ = 0 is fedavg with Ψ's aggregator, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple, Unpack, cast

import torch
from torch import Tensor, nn

from partita.aggregate.batchnorm import with_statistics
from partita.algorithms import psi as penalties
from partita.algorithms.base import Choices, Common, Lr, compose, counted, method, serve_with, settings
from partita.algorithms.local.sgd import Carry, finish, move, start
from partita.algorithms.local.solvers import Solver, solve
from partita.algorithms.psi import Penalty
from partita.core import check
from partita.core.device import put
from partita.core.options import Option, Range
from partita.core.parts import Algorithm, LocalRule, Phase, Problem, Rate, ServerRule
from partita.core.types import Batch, ClientState, Download, Partition, ServerState, Tensors, Upload
from partita.optim.rates import as_rate

PAPER = "Fed+: Kundu et al., Robustness and Personalization in Federated Learning (2022), Algorithm 1"

Psi = Annotated[
    Penalty,
    Option(
        "Ψ: what a client's difference from the others costs",
        allowed="a penalty such as partita.psi.avg(0.1)",
        example=penalties.avg(0.1),
    ),
]
Sigma = Annotated[
    float,
    Option(
        "σ, the weight of the pull; the paper's κ = 1/(1 + ησ) is from 0.9 to 0.999",
        low=0,
        search=Range(1e-3, 10.0, log=True),
    ),
]
Lam = Annotated[
    float,
    Option(
        "λ: steps begin at the client's own model (0), the server's (1) or between",
        low=0,
        high=1,
        search=Range(0.0, 1.0, asked=True),
    ),
]
Over = Annotated[
    str,
    Option("whose models the server aggregates: this round's, or the last of all", choices=("cohort", "all")),
]
Solve = Annotated[
    Solver | None,
    Option(
        "how a client solves its problem, such as exact() where the loss is quadratic; `lr` is not used then "
        "(None: by the gradient steps above)",
        allowed="a solver such as partita.exact()",
    ),
]
LEAST_KAPPA = 0.5  # below it, a step goes further to w̃ + θ than it keeps of w − η∇f
REMEMBERS = "with over='all' the server keeps every client's last model, which a stale delta does not tell"


@method(
    paper=PAPER,
    use="Use it to choose the penalty yourself, or one for each layer; its special cases have names of "
    "their own.",
    weighting="uniform",
)
def fedplus(
    psi: Psi,
    lr: Lr,
    sigma: Sigma = 0.1,
    lam: Lam = 0.0,
    over: Over = "cohort",
    solver: Solve = None,
    **options: Unpack[Common],
) -> Algorithm:
    """Every client keeps its own model, pulled towards the others as far as the penalty `psi` asks."""
    common = settings(options)
    common = replace(common, aggregate=options["aggregate"] or psi.aggregator)
    eta = as_rate(lr)
    if solver is None and isinstance(sigma, float):  # else it differs between clients
        warn_about_kappa(eta(0, 1), sigma)
    if solver is not None and common.keeps_optimizer:
        raise check.fail("optimizer_state", "keep", "'reset' with solver=, which solves anew in every round")

    def partition(model: nn.Module, names: Sequence[str]) -> Partition:  # noqa: ARG001
        penalties.covers(psi, names)
        return Partition(shared=tuple(names), personal=tuple(names))

    def local(problem: Problem) -> LocalRule:
        if solver is not None:
            return solved(problem, psi, solver, sigma, lam, common)
        return pulled(problem, psi, eta, sigma, lam, common)

    if over == "cohort":
        return compose(local, common, partition=partition)
    return compose(
        local,
        common,
        partition=partition,
        aggregate=_all_of(common.weighting),
        server=remember(common),
        synchronous_only=REMEMBERS,
        needs_full_model="with over='all' the server keeps every client's last whole model",
    )


@method(
    paper=PAPER,
    use="Use it when clients differ and none is an outlier.",
    weighting="uniform",
)
def fedavg_plus(
    lr: Lr,
    sigma: Sigma = 0.1,
    delta: penalties.Delta = 0.1,
    lam: Lam = 0.0,
    over: Over = "cohort",
    **options: Unpack[Common],
) -> Algorithm:
    """FedAvg+: every client keeps its own model, drawn to the mean of all."""
    return fedplus(penalties.avg(delta), lr, sigma, lam, over, **options)


@method(
    paper=PAPER,
    use="Use it when some clients are outliers: they neither move the others nor are moved far themselves.",
    weighting="uniform",
)
def fedgeomed_plus(
    lr: Lr,
    sigma: Sigma = 0.1,
    delta: penalties.Radius = 0.1,
    lam: Lam = 0.0,
    over: Over = "cohort",
    **options: Unpack[Common],
) -> Algorithm:
    """FedGeoMed+: every client keeps its own model, drawn to the smoothed geometric median of all."""
    return fedplus(penalties.geomed(delta), lr, sigma, lam, over, **options)


@method(
    paper=PAPER,
    use="Use it when clients are outliers in some coordinates only.",
    weighting="uniform",
)
def fedcomed_plus(
    lr: Lr,
    sigma: Sigma = 0.1,
    delta: penalties.Radius = 0.1,
    lam: Lam = 0.0,
    over: Over = "cohort",
    **options: Unpack[Common],
) -> Algorithm:
    """FedCoMed+: every client keeps its own model, drawn to the smoothed median of each coordinate."""
    return fedplus(penalties.comed(delta), lr, sigma, lam, over, **options)


def pulled(problem: Problem, psi: Penalty, eta: Rate, sigma: float, lam: float, common: Choices) -> LocalRule:
    """θ once, then gradient steps that are each drawn to z = w̃ + θ, which the carry holds as `received`."""
    begin = begun(problem, psi, lam, common)
    gradient = move(problem, problem.partition.personal, optimizer=common.optimizer)

    def step(carry: Carry, batch: Batch, lr: tuple[Tensor, ...]) -> Carry:
        carry = gradient(carry, batch, lr)
        kappa = 1 / (1 + lr[0] * sigma)
        # κ [w − η ∇f(w)] + (1 − κ) z
        new = {k: torch.lerp(z, carry.params[k], kappa.to(z.dtype)) for k, z in carry.received.items()}
        return carry._replace(params={**carry.params, **new})

    return LocalRule(begin, (Phase(step, (eta,)),), finish(problem))


def begun(
    problem: Problem, psi: Penalty, lam: float, common: Choices
) -> Callable[[Download, ClientState], Carry]:
    """Begin at (1 − λ) w_k + λ w̃, with z = w̃ + prox(w_k − w̃) as what was received."""
    shared = set(problem.partition.shared)
    names = tuple(k for k in problem.trainable if k in shared)
    own = start(problem, common.optimizer)

    def begin(download: Download, state: ClientState) -> Carry:
        carry, center = own(download, state), download.shared
        w = carry.params
        theta = psi.prox({k: w[k] - center[k] for k in names})
        first = {k: between(w[k], center[k], lam) for k in center}
        return carry._replace(params={**w, **first}, received={k: center[k] + theta[k] for k in names})

    return begin


def warn_about_kappa(lr: float, sigma: float) -> None:
    """Warn of a pull that leaves little of a client's steps."""
    kappa = 1 / (1 + lr * sigma)
    if kappa < LEAST_KAPPA:
        check.warn(
            f"κ = 1/(1 + lr · sigma) is {kappa:.2g}, where the paper recommends 0.9 to 0.999: each step goes "
            f"most of the way back to what the client began with; sigma={1 / (9 * lr):.2g} makes it 0.9"
        )


def between(own: Tensor, center: Tensor, lam: float) -> Tensor:
    """(1 − λ) own + λ center; counters stay whole."""
    if isinstance(lam, int | float) and lam in (0, 1):
        return center if lam else own
    mixed = (1 - lam) * own + lam * center
    return mixed if own.is_floating_point() else mixed.round().to(own.dtype)


# ---- solver=: argmin_w f_k(w) + (σ/2)‖w − z‖² in another way

ANCHOR = "z/"


class Anchored:
    """A problem f_k(w) + (σ/2)‖w − z‖²: z stands among the parameters, which no step changes, as 'z/NAME'."""

    def __init__(self, problem: Problem, sigma: float) -> None:
        self.problem, self.sigma = problem, sigma

    def __getattr__(self, name: str) -> Any:
        return getattr(self.problem, name)

    def grad(self, params: Tensors, batch: Batch, wrt: Sequence[str]) -> tuple[Tensor, Tensors, Tensors]:
        """Return the loss of the client, ∇f + σ (w − z), and buffers after the pass."""
        loss, g, buffers = self.problem.grad(_model(params), batch, wrt)
        pull = {k: self.sigma * (params[k] - params[ANCHOR + k]) for k in g if ANCHOR + k in params}
        return loss, {k: v + pull[k] if k in pull else v for k, v in g.items()}, buffers

    def hvp(self, params: Tensors, batch: Batch, direction: Tensors) -> Tensors:
        """Return (∇²f + σ) d, where there is a z."""
        product = self.problem.hvp(_model(params), batch, direction)
        return {k: v + self.sigma * direction[k] if ANCHOR + k in params else v for k, v in product.items()}


def _model(params: Tensors) -> Tensors:
    return {k: v for k, v in params.items() if not k.startswith(ANCHOR)}


class Solving(NamedTuple):
    """The model with z, what the solver remembers, and no losses: a solver looks at gradients alone."""

    params: Tensors
    memory: Any
    loss: Tensor
    steps: Tensor


def solved(
    problem: Problem, psi: Penalty, solver: Solver, sigma: float, lam: float, common: Choices
) -> LocalRule:
    """θ once, then what the solver does about f_k(w) + (σ/2)‖w − z‖²."""
    begin, end = begun(problem, psi, lam, common), finish(problem)
    remember, phases = solve(cast(Problem, Anchored(problem, sigma)), solver, common.optimizer)

    def anchored(download: Download, state: ClientState) -> Solving:
        carry = begin(download, state)
        params = {**carry.params, **{ANCHOR + k: z for k, z in carry.received.items()}}
        return Solving(params, remember(params), carry.loss, carry.steps)

    def ended(carry: Solving, download: Download, state: ClientState) -> tuple[Upload, ClientState]:
        kept = Carry(_model(carry.params), {}, {}, carry.loss, carry.steps)
        return end(kept, download, state)

    return LocalRule(anchored, phases, ended)


# ---- over="all": the server remembers every client's last model


def _all_of(weighting: str) -> Callable[[Problem], Callable[[Upload, Tensor], Upload]]:
    """All uploads as they are, and the key, for the server to combine with what it remembers."""

    def aggregate(uploads: Upload, key: Tensor) -> Upload:
        weight = counted(uploads, weighting)
        return Upload(uploads.delta, weight, extra={"key": key}, client=uploads.client)

    return lambda problem: aggregate  # noqa: ARG005


def remember(common: Choices) -> Callable[[Problem], ServerRule]:
    """W_k ← w_k for the clients of the cohort, then w̃ ← server optimizer(w̃, 𝒜(w̃ − W)) over all N rows.

    A client never seen has W_k = w̃⁰. It counts as one with uniform weights; by samples it counts from the
    first time it reports, since the server does not know before how many it has.
    """

    def bind(problem: Problem) -> ServerRule:
        rule, clients = serve_with(common.server)(problem), problem.clients
        aggregator = with_statistics(common.aggregate, problem.buffers)

        def init(shared: Tensors) -> ServerState:
            server = rule.init(shared)
            device = next(iter(shared.values())).device if shared else None
            first = 0.0 if common.weighting == "samples" else 1.0
            weight = torch.full((clients,), first, dtype=torch.float64, device=device)
            rows = {f"party.{k}": x.expand(clients, *x.shape).contiguous() for k, x in shared.items()}
            return server._replace(opt={**server.opt, **rows, "count": weight})

        def step(server: ServerState, upload: Upload) -> ServerState:
            center, opt = server.shared, server.opt
            assert upload.client is not None
            assert upload.weight is not None
            who = put(upload.client.numpy(), upload.weight.device)
            weight = opt["count"].index_copy(0, who, upload.weight)
            rows, deltas = {}, {}
            for k, d in upload.delta.items():
                kept = opt[f"party.{k}"]
                rows[f"party.{k}"] = kept.index_copy(0, who, center[k] - d)
                # w̃ − W; for this round's clients what they sent, without the rounding of two differences
                deltas[k] = (center[k] - kept).index_copy(0, who, d)
            delta, notes = aggregator.combine(deltas, weight, upload.extra["key"])
            after = rule.step(server, Upload(delta, weight.sum(), metrics=notes))
            return after._replace(opt={**after.opt, **rows, "count": weight})

        return rule._replace(init=init, step=step)

    return bind
