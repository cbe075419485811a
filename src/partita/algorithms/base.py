"""What all methods have in common: their common options, their registry, and the usual pieces."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypedDict, get_type_hints

from torch import nn

from partita import check, tree
from partita.aggregate import mean
from partita.local.sgd import Sgd
from partita.partition import Personal, check_personal, split
from partita.server import sgd
from partita.server.rates import as_rate
from partita.types import (
    Aggregator,
    Algorithm,
    ClientState,
    Download,
    LocalRule,
    Partition,
    Personalize,
    Problem,
    Rate,
    ServerOptimizer,
    ServerRule,
    ServerState,
    Tensors,
    Upload,
)

P = ParamSpec("P")


class Common(TypedDict, total=False):
    """Options of every method.

    momentum, weight_decay, max_grad_norm belong to the client's SGD; `weighting` is "samples" (n_i) or
    "uniform"; `aggregate` is an aggregator of `partita.aggregate`, `server` an optimizer of `partita.server`.
    """

    momentum: float
    weight_decay: float
    max_grad_norm: float | None
    weighting: str
    aggregate: Aggregator
    server: ServerOptimizer


@dataclass(frozen=True)
class Choices:
    """The common options, checked."""

    optimizer: Sgd
    weighting: str
    aggregate: Aggregator
    server: ServerOptimizer


def settings(options: Common) -> Choices:
    """The common options with their defaults."""
    client = {k: v for k, v in options.items() if k in ("momentum", "weight_decay", "max_grad_norm")}
    aggregate = options.get("aggregate") or mean()
    if not isinstance(aggregate, Aggregator):
        raise check.fail("aggregate", aggregate, "an aggregator such as partita.aggregate.mean()")
    server = options.get("server") or sgd()
    if not isinstance(server, ServerOptimizer):
        raise check.fail("server", server, "a server optimizer such as partita.server.adam(lr=0.01)")
    weighting = check.choice("weighting", options.get("weighting", "samples"), ("samples", "uniform"))
    return Choices(Sgd(**client), weighting, aggregate, server)  # type: ignore[arg-type]


METHODS: dict[str, Callable[..., Algorithm]] = {}


def method(build: Callable[P, Algorithm]) -> Callable[P, Algorithm]:
    """Registers a method under its function's name and records the options it was called with."""
    name = build.__name__
    signature = _signature(build)

    @functools.wraps(build)
    def make(*args: P.args, **kwargs: P.kwargs) -> Algorithm:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ValueError(f"{name}: {error}{_suggest(kwargs, signature)}") from None
        bound.apply_defaults()
        return replace(build(*args, **kwargs), name=name, options=dict(bound.arguments))

    make.__signature__ = signature  # type: ignore[attr-defined]
    METHODS[name] = make
    return make


def _signature(build: Callable[..., Any]) -> inspect.Signature:
    """The function's own arguments, with the common options spelled out where it takes them."""
    signature = inspect.signature(build)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    if len(own) == len(signature.parameters):
        return signature
    defaults = {"momentum": 0.0, "weight_decay": 0.0, "weighting": "samples"}
    common = [
        inspect.Parameter(k, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(k), annotation=hint)
        for k, hint in get_type_hints(Common).items()
    ]
    return signature.replace(parameters=[*own, *common])


def _suggest(kwargs: Mapping[str, Any], signature: inspect.Signature) -> str:
    unknown = [k for k in kwargs if k not in signature.parameters]
    known = ", ".join(signature.parameters)
    hint = check.meant(unknown[0], signature.parameters) if unknown else ""
    return f"{hint}; its arguments are {known}"


def compose(
    local: Callable[[Problem], LocalRule],
    common: Choices,
    *,
    personal: Personal = "none",
    partition: Callable[[nn.Module, Sequence[str]], Partition] | None = None,
    personalize: Callable[[Problem], Personalize] | None = None,
) -> Algorithm:
    """A method from its local rule: the rest is the usual unless given."""
    check_personal(personal)
    return Algorithm(
        name="",
        partition=partition or functools.partial(split, personal=personal),
        init_client=own_part,
        local=local,
        aggregate=aggregate_with(common.aggregate, common.weighting),
        server=serve_with(common.server),
        personalize=personalize or as_is,
    )


def rate(field: str, value: Any) -> Rate:
    """A learning rate: a number from 0, or a rate of `partita.server`."""
    return as_rate(field, value)


def own_part(model: Tensors, partition: Partition) -> ClientState:
    """A new client starts from the part of the model that its own part replaces."""
    return ClientState(tree.pick(model, partition.personal), {})


def aggregate_with(aggregator: Aggregator, weighting: str) -> Callable[[Upload], Upload]:
    """The aggregator on the deltas, weighted by samples or uniformly."""

    def aggregate(uploads: Upload) -> Upload:
        assert uploads.weight is not None
        samples = uploads.weight  # a client without data has nothing to say, whatever the weighting
        weight = samples if weighting == "samples" else (samples > 0).to(samples.dtype)
        return Upload(aggregator.combine(uploads.delta, weight), weight=weight.sum())

    return aggregate


def serve_with(optimizer: ServerOptimizer) -> Callable[[Problem], ServerRule]:
    """x ← server optimizer(x, Δ). Statistics are no parameters: they are averaged, whatever the optimizer."""

    def bind(problem: Problem) -> ServerRule:
        statistics = set(problem.buffers)

        def init(shared: Tensors) -> ServerState:
            moved = {k: v for k, v in shared.items() if k not in statistics}
            return ServerState(shared, optimizer.init(moved), {}, 0)

        def step(server: ServerState, upload: Upload) -> ServerState:
            delta = upload.delta
            moved = {k: v for k, v in server.shared.items() if k in delta and k not in statistics}
            new, opt = optimizer.step(moved, delta, server.opt)
            averaged = {k: server.shared[k] - delta[k] for k in delta if k in statistics}
            return ServerState({**server.shared, **new, **averaged}, opt, server.extra, server.version + 1)

        return ServerRule(init, step)

    return bind


def as_is(problem: Problem) -> Personalize:
    """The client's model: what it received with its own part in place."""

    def start(download: Download, state: ClientState) -> Tensors:
        return {**download.shared, **tree.pick(state.personal, problem.partition.personal)}

    return Personalize(start, (), lambda carry, download, state: carry)  # noqa: ARG005
