"""FedProto.

    client:  v_i ← v_i − η ∇ ( f_i(v_i) + λ · mean over samples of ‖h − C_y‖² / d )
             C_ik = mean of h over its samples of class k, n_ik of them        by the model it ends with
             sends C_i and n_i; the model stays
    server:  C_k ← Σ_i n_ik C_ik / Σ_i n_ik,   over the clients of the cohort that have class k
    client's model:  the class whose C_k is nearest to h; or its own last layer (predict="classifier")

h are the d features of a sample, what the last layer takes. A class has no prototype before some client that
has it was heard: its samples count by the loss alone, and nobody predicts it by its prototype. A class that
nobody in the cohort has keeps its prototype. The division by d is that of the authors' code, where λ = 1.

With `weighting="uniform"` the clients that have a class count equally. An aggregator other than the mean
combines the prototypes of each class. A client cannot claim more samples than the server knows it has. λ = 0
trains every client alone. The nearest C_k has the largest of the logits 2 C_k·h − ‖C_k‖²: so a client's model
is one whose last layer has the rows 2 C_k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partita.algorithms.base import Choices, Common, Lr, as_is, compose, method, settings
from partita.algorithms.local import sgd
from partita.algorithms.local.head import linear_head
from partita.algorithms.local.sgd import Carry
from partita.core import check, draws
from partita.core.options import Option, Range
from partita.core.parts import (
    Aggregation,
    Algorithm,
    LocalRule,
    Optimizer,
    Personalize,
    Phase,
    Problem,
    ServerRule,
)
from partita.core.terms import with_term
from partita.core.types import Batch, ClientState, Download, Partition, ServerState, Tensors, Upload
from partita.optim.rates import as_rate

PROTOTYPES, SAMPLES = "prototypes", "prototype_samples"
PREDICTIONS = ("prototypes", "classifier")
NEVER = -1e9  # the logit of a class without a prototype


class Collected(NamedTuple):
    """What passes from step to step: v_i, and for each class Σ h and n_ik so far."""

    sgd: Carry
    sums: Tensor
    samples: Tensor


@method(
    paper="FedProto: Tan et al., Federated Prototype Learning across Heterogeneous Clients (2022), "
    "Algorithm 1",
    use="Use it when clients have few classes each and may send little: a few numbers for each class, "
    "and no model.",
    without=("server",),
)
def fedproto(
    lr: Lr,
    lam: Annotated[
        float,
        Option("λ, the weight of the pull to the prototypes", low=0, search=Range(0.1, 10.0, log=True)),
    ] = 1.0,
    predict: Annotated[
        str, Option("a client predicts by the nearest prototype, or by its last layer", choices=PREDICTIONS)
    ] = "prototypes",
    **options: Unpack[Common],
) -> Algorithm:
    """Each client has its own model; features of a class are drawn to the mean of all clients' features."""
    common, eta = settings(options), as_rate(lr)

    def near(features: Tensor, target: Tensor, prototypes: Tensor, prototype_samples: Tensor) -> Tensor:
        label = target.clamp(0, len(prototypes) - 1)
        known = (prototype_samples[label] > 0) & (target == label)
        return lam * torch.where(known, (features - prototypes[label]).square().mean(-1), 0.0)

    def partition(model: nn.Module, names: Sequence[str]) -> Partition:
        if predict == "prototypes" and len(linear_head(model, names, "fedproto(predict='prototypes')")) < 2:
            allowed = "a last layer with biases, or fedproto(predict='classifier')"
            raise check.fail("model", type(model).__name__, allowed)
        return Partition(shared=(), personal=tuple(names))

    def local(problem: Problem) -> LocalRule:
        step = sgd.move(problem, problem.partition.personal, optimizer=common.optimizer)
        train = Phase(step, (eta,)).within("sgd")
        collect = Phase(_collect(problem), work=sgd.one_pass)
        return LocalRule(_start(problem, common.optimizer), (train, collect), _finish(problem))

    return compose(
        local,
        common,
        partition=partition,
        loss=partial(with_term, term=near),
        aggregate=_aggregate(common),
        server=_serve,
        personalize=_nearest if predict == "prototypes" else as_is,
        shares_extra=True,
        needs_full_model="the prototypes of all clients are of one size",
    )


def _sizes(problem: Problem) -> tuple[int, int]:
    """Return K and d; refuse what has no classes, or features that are no vectors."""
    layout = problem.layout
    assert layout is not None
    if not layout.classes:
        raise check.fail("method", "fedproto", "targets that are classes, with an output for each")
    if len(layout.shape) != 1:
        allowed = "a submodule that returns a vector for each sample"
        raise check.fail("features", layout.module, allowed, f"they are of shape {list(layout.shape)}")
    return layout.classes, layout.shape[0]


def _empty(problem: Problem) -> Tensors:
    """Return prototypes of no samples."""
    like = next(v for v in problem.initial.values() if v.is_floating_point())
    classes, size = _sizes(problem)
    return {PROTOTYPES: like.new_zeros(classes, size), SAMPLES: like.new_zeros(classes)}


def _start(problem: Problem, optimizer: Optimizer) -> Callable[[Download, ClientState], Collected]:
    begin = sgd.start(problem, optimizer)
    return lambda download, state: Collected(begin(download, state), *_empty(problem).values())


def _collect(problem: Problem) -> Callable[[Collected, Batch, tuple[Tensor, ...]], Collected]:
    """Σ h and n of each class, batch after batch."""
    classes, _ = _sizes(problem)

    def step(c: Collected, batch: Batch, lr: tuple[Tensor, ...]) -> Collected:  # noqa: ARG001
        h = problem.features(c.sgd.params, batch).to(c.sums.dtype)
        label = batch.y.clamp(0, classes - 1)
        real = batch.y == label if batch.mask is None else (batch.y == label) & (batch.mask > 0)
        of_class = F.one_hot(label, classes).to(h.dtype) * real.to(h.dtype)[:, None]
        h = torch.where(real[:, None], h, 0.0)  # padding may hold anything
        return c._replace(sums=c.sums + of_class.T @ h, samples=c.samples + of_class.sum(0))

    return step


def _finish(problem: Problem) -> Callable[[Collected, Download, ClientState], tuple[Upload, ClientState]]:
    end = sgd.finish(problem)

    def finish(c: Collected, download: Download, state: ClientState) -> tuple[Upload, ClientState]:
        upload, new = end(c.sgd, download, state)
        prototypes = c.sums / c.samples.clamp(min=1)[:, None]
        return upload._replace(extra={PROTOTYPES: prototypes, SAMPLES: c.samples}), new

    return finish


def _aggregate(common: Choices) -> Aggregation:
    """Combine the prototypes of each class over the clients that have it; of the mean, sums go on."""

    def bind(problem: Problem) -> Callable[[Upload, Tensor], Upload]:  # noqa: ARG001
        def aggregate(uploads: Upload, key: Tensor) -> Upload:
            assert uploads.weight is not None
            each, weight = uploads.extra[PROTOTYPES], _counted(uploads, common.weighting)
            total = weight.sum(0)
            if common.aggregate.linear:
                sums = torch.einsum("ik,ikd->kd", weight, each)
            else:
                sums = torch.zeros_like(each[0])
                for k in range(len(total)):
                    having = weight[:, k].nonzero().flatten()
                    if len(having):
                        of_class, branch = {PROTOTYPES: each[having, k]}, draws.branch(key, "class", k)
                        combined = common.aggregate.combine(of_class, weight[having, k], branch)
                        sums[k] = total[k] * combined.delta[PROTOTYPES]
            return Upload({}, weight=uploads.weight.sum(), extra={PROTOTYPES: sums, SAMPLES: total})

        return aggregate

    return Aggregation(bind, adds_up=common.aggregate.linear)


def _counted(uploads: Upload, weighting: str) -> Tensor:
    """Return how much each client counts for each class: no more in all than it has samples."""
    assert uploads.weight is not None
    claimed = uploads.extra[SAMPLES].clamp(min=0)
    has = uploads.weight.to(claimed)
    if weighting == "uniform":
        return ((claimed > 0) & (has > 0)[:, None]).to(claimed.dtype)
    return claimed * (has / claimed.sum(1).clamp(min=1)).clamp(max=1)[:, None]


def _serve(problem: Problem) -> ServerRule:
    """Divide by what was counted; a class that nobody has keeps its prototype."""

    def init(shared: Tensors) -> ServerState:
        return ServerState(shared, {}, _empty(problem), 0)

    def step(server: ServerState, upload: Upload) -> ServerState:
        total, before = upload.extra[SAMPLES], server.extra
        mean = upload.extra[PROTOTYPES] / torch.where(total > 0, total, 1.0)[:, None]
        prototypes = torch.where((total > 0)[:, None], mean, before[PROTOTYPES])
        extra = {PROTOTYPES: prototypes, SAMPLES: torch.where(total > 0, total, before[SAMPLES])}
        return server._replace(extra=extra, version=server.version + 1)

    return ServerRule(init, step)


def _nearest(problem: Problem) -> Personalize:
    """−‖h − C_k‖² + ‖h‖² = 2 C_k·h − ‖C_k‖²; the client's own last layer as long as nothing is known."""
    head = problem.layout.head if problem.layout is not None else ()
    if not head:
        allowed = "the features that the last layer takes, or fedproto(predict='classifier')"
        raise check.fail("features", problem.layout and problem.layout.module, allowed)
    weight, bias = head

    def start(download: Download, state: ClientState) -> Tensors:
        c, known = download.extra[PROTOTYPES], download.extra[SAMPLES] > 0
        to_nearest = {weight: 2 * c, bias: torch.where(known, -c.square().sum(-1), NEVER)}
        layer = {k: torch.where(known.any(), v, state.personal[k]) for k, v in to_nearest.items()}
        return {**state.personal, **layer}

    return Personalize(start, (), lambda carry, download, state: carry)  # noqa: ARG005
