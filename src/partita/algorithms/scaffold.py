"""SCAFFOLD.

    client:  y ← y − η (∇f_i(y) − c_i + c), from y = x
             c_i⁺ = ∇f_i(x), over all of its data                       option I
             c_i⁺ = c_i − c + (x − y) / T,  T = K η after K steps       option II
             sends x − y and Δc_i = c_i⁺ − c_i
    server:  x ← x − η_s · mean of (x − y),   c ← c + |S|/N · mean of Δc_i

S is who was heard in this round, N counts all clients; the chosen aggregator combines the Δc_i, too, with
draws of their own. The client's optimizer acts on ∇f_i − c_i + c. With momentum β a gradient acts in several
steps: T = Σ_k η (1 + β + … + β^{k−1}), so that (x − y)/T is still a mean of gradients. The steps of Adam and
its like are no such sums, nor are those of Nesterov or of momentum that is kept between rounds: with them,
c_i⁺ of option II is the mean of ∇f_i(y) over the steps, which is what it comes down to for SGD. A client that
takes no step leaves its c_i. As long as c_i = c = 0, a round is one of fedavg.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple, Unpack

import torch
from torch import Tensor

from partita.algorithms.base import (
    Choices,
    Common,
    Lr,
    aggregate_with,
    compose,
    method,
    own_part,
    serve_with,
    settings,
)
from partita.algorithms.local import sgd
from partita.algorithms.local.pair import add
from partita.algorithms.local.sgd import Carry
from partita.core import draws, tree
from partita.core.options import Option
from partita.core.parts import Aggregation, Algorithm, LocalRule, Optimizer, Phase, Problem, ServerRule
from partita.core.types import Batch, ClientState, Download, Partition, ServerState, Tensors, Upload
from partita.optim import optimizers
from partita.optim.rates import as_rate


class Controlled(NamedTuple):
    """What passes from step to step.

    sgd       y, momenta, losses
    begin     x, with the client's own part
    shift     c − c_i
    unit      1 + β + … + β^{k−1} of step k, and `total` = T so far
    gradient  Σ n_b ∇f_b(x) so far, over `seen` samples; or Σ ∇f_b(y), over `seen` steps
    """

    sgd: Carry
    begin: Tensors
    shift: Tensors
    unit: Tensor
    total: Tensor
    gradient: Tensors
    seen: Tensor


@method(
    paper="SCAFFOLD: Karimireddy et al., Stochastic Controlled Averaging for Federated Learning "
    "(2020), Algorithm 1",
    use="Use it when clients differ and take many local steps, and each of them comes back often.",
    weighting="uniform",
    without=("server",),
)
def scaffold(
    lr: Lr,
    option: Annotated[
        int,
        Option("I: c_i is a full gradient; II: the mean of the steps taken", low=1, high=2, search=(1, 2)),
    ] = 2,
    server_lr: optimizers.ServerLr = 1.0,
    **options: Unpack[Common],
) -> Algorithm:
    """One global model; control variates take the drift out of the clients' steps."""
    common, eta = settings(options, server=optimizers.sgd(server_lr)), as_rate(lr)

    def local(problem: Problem) -> LocalRule:
        names = _controlled(problem)
        by_distance = option == 2 and _steps_are_gradients(common)
        step = _step(problem, names, common.optimizer, sums=option == 2 and not by_distance)
        at_x = (Phase(_full_gradient(problem, names), work=sgd.one_pass),) if option == 1 else ()
        begin, end = _start(problem, names, common.optimizer), _finish(problem, names, by_distance)
        return LocalRule(begin, (Phase(step, (eta,)), *at_x), end)

    return compose(local, common, init_client=_new, aggregate=_aggregate(common), server=_serve(common))


def _controlled(problem: Problem) -> tuple[str, ...]:
    """Parameters that are shared: what a client keeps to itself does not drift from anything."""
    shared = set(problem.partition.shared)
    return tuple(k for k in problem.trainable if k in shared)


def _steps_are_gradients(common: Choices) -> bool:
    """Return whether (x − y)/T is a mean of the gradients of this round."""
    options = common.optimizer.options
    plain = common.optimizer.name == "sgd" and not options.get("nesterov")
    return plain and not (common.keeps_optimizer and options.get("momentum"))


def _new(model: Tensors, partition: Partition) -> ClientState:
    """c_i = 0."""
    shared = {k: v for k, v in tree.pick(model, partition.shared).items() if v.is_floating_point()}
    return own_part(model, partition)._replace(memory=tree.zeros_like(shared))


def _start(
    problem: Problem, names: tuple[str, ...], optimizer: Optimizer
) -> Callable[[Download, ClientState], Controlled]:
    begin = sgd.start(problem, optimizer)

    def start(download: Download, state: ClientState) -> Controlled:
        carry = begin(download, state)
        shift = {k: download.extra[k] - state.memory[k] for k in names}
        zero = next(iter(carry.params.values())).new_zeros(())
        gradient = tree.zeros_like(tree.pick(carry.params, names))
        return Controlled(carry, carry.params, shift, zero, zero, gradient, zero)

    return start


def _step(
    problem: Problem, names: tuple[str, ...], optimizer: Optimizer, sums: bool
) -> Callable[[Controlled, Batch, tuple[Tensor, ...]], Controlled]:
    moving, beta = problem.trainable, optimizer.options.get("momentum", 0.0)

    def step(c: Controlled, batch: Batch, lr: tuple[Tensor, ...]) -> Controlled:
        y = c.sgd.params
        loss, g, buffers = problem.grad(y, batch, wrt=moving)
        controlled = {**g, **{k: g[k] + c.shift[k] for k in names}}
        new, opt = optimizer.update(y, controlled, c.sgd.opt, dict.fromkeys(moving, lr[0]))
        after = add(c.sgd, {**y, **new, **buffers}, loss, opt=opt)
        if sums:
            return c._replace(sgd=after, gradient=tree.axpy(1.0, g, c.gradient), seen=c.seen + 1)
        unit = beta * c.unit + 1.0
        total = c.total + lr[0].to(unit.dtype) * unit
        return c._replace(sgd=after, unit=unit, total=total)

    return step


def _full_gradient(
    problem: Problem, names: tuple[str, ...]
) -> Callable[[Controlled, Batch, tuple[Tensor, ...]], Controlled]:
    """∇f_i(x) = Σ_b n_b ∇f_b(x) / n, batch after batch."""

    def step(c: Controlled, batch: Batch, lr: tuple[Tensor, ...]) -> Controlled:  # noqa: ARG001
        _, g, _ = problem.grad(c.begin, batch, wrt=names)
        size = (
            torch.full_like(c.seen, len(batch.y)) if batch.mask is None else batch.mask.sum().to(c.seen.dtype)
        )
        return c._replace(gradient=tree.axpy(size, g, c.gradient), seen=c.seen + size)

    return step


def _finish(
    problem: Problem, names: tuple[str, ...], by_distance: bool
) -> Callable[[Controlled, Download, ClientState], tuple[Upload, ClientState]]:
    end = sgd.finish(problem)

    def finish(c: Controlled, download: Download, state: ClientState) -> tuple[Upload, ClientState]:
        upload, new = end(c.sgd, download, state)
        count = c.total if by_distance else c.seen
        divisor = torch.where(count > 0, count, torch.ones_like(count))
        if by_distance:
            mean = {k: (c.begin[k] - c.sgd.params[k]) / divisor - c.shift[k] for k in names}
        else:
            mean = {k: c.gradient[k] / divisor for k in names}
        own = {k: torch.where(count > 0, mean[k], state.memory[k]) for k in names}
        change = {k: own[k] - state.memory[k] for k in names}
        return upload._replace(sums=change), new._replace(memory={**new.memory, **own})

    return finish


def _aggregate(common: Choices) -> Aggregation:
    """Combine the deltas; of the Δc_i, take |S| times what the same aggregator makes of them."""

    def bind(problem: Problem) -> Callable[[Upload, Tensor], Upload]:
        combine = aggregate_with(common.aggregate, common.weighting)(problem)

        def aggregate(uploads: Upload, key: Tensor) -> Upload:
            assert uploads.weight is not None
            combined = combine(uploads, key)
            change = combine(uploads._replace(delta=uploads.sums), draws.branch(key, "controls")).delta
            heard = torch.count_nonzero(uploads.weight)
            return combined._replace(sums={k: heard * v for k, v in change.items()})

        return aggregate

    return Aggregation(bind, adds_up=common.aggregate.linear and common.weighting == "uniform")


def _serve(common: Choices) -> Callable[[Problem], ServerRule]:
    """The server's step on the model, and c ← c + |S|/N · mean of Δc_i."""

    def bind(problem: Problem) -> ServerRule:
        rule = serve_with(common.server)(problem)

        def init(shared: Tensors) -> ServerState:
            return rule.init(shared)._replace(extra=tree.zeros_like(tree.pick(shared, _controlled(problem))))

        def step(server: ServerState, upload: Upload) -> ServerState:
            return rule.step(server, upload)._replace(
                extra=tree.axpy(1 / problem.clients, upload.sums, server.extra)
            )

        return rule._replace(init=init, step=step)

    return bind
