"""What all methods have in common: options, the registry, and the pieces of a method by default."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple, ParamSpec, TypedDict, Unpack

from torch import Tensor, nn

from partita import optim
from partita.aggregate.batchnorm import with_statistics
from partita.aggregate.mean import mean
from partita.algorithms.partition import Personal, check_personal, split
from partita.core import check, tree
from partita.core.options import Option, Range, bind, readable, signature
from partita.core.parts import (
    Aggregation,
    Aggregator,
    Algorithm,
    LocalRule,
    Optimizer,
    Personalize,
    Problem,
    Rate,
    ServerRule,
)
from partita.core.types import ClientState, Download, Partition, ServerState, Tensors, Upload
from partita.optim.optimizers import clipped

P = ParamSpec("P")

WEIGHTINGS = ("samples", "uniform")
BY_SAMPLES = "clients count by samples, or equally"

RATE = "a rate such as partita.optim.linear(0.1)"
RATES = Range(1e-3, 1.0, log=True)
Lr = Annotated[float | Rate, Option("the client's step size", low=0, allowed=RATE, example=0.1, search=RATES)]
PersonalLr = Annotated[
    float | Rate | None,
    Option("the step size of the personal part (None: lr)", low=0, allowed=RATE, search=RATES, like="lr"),
]
PersonalL2 = Annotated[
    float,
    Option(
        "μ, the weight of the pull (μ/2)‖v_i − v⁰‖² of the personal part to where the stage began",
        low=0,
        search=Range(1e-3, 1.0, log=True, asked=True),
    ),
]


Part = Annotated[
    Personal,
    Option(
        "the part of the model that stays with the client",
        allowed="'input', 'output', 'adapter', 'norm', 'all', 'none', a name pattern such as 'head.*', "
        "a list or a callable",
        check=check_personal,
        example="output",
    ),
]


OPTIMIZER = "an optimizer without lr= such as partita.optim.adamw()"
SERVER = "a server optimizer such as partita.optim.adam(lr=0.01)"


def _for_clients(field: str, value: Any) -> Optimizer:
    """Refuse an optimizer with a step size of its own: that of clients is the method's."""
    if not isinstance(value, Optimizer):
        raise check.fail(field, value, OPTIMIZER)
    if value.options.get("lr") is not None:
        raise check.fail(field, value, f"{OPTIMIZER}: the step size of clients is the method's own lr=")
    return value


def _for_server(field: str, value: Any) -> Optimizer:
    """Refuse an optimizer without a step size; that of sgd is 1, the whole of the delta."""
    if not isinstance(value, Optimizer):
        raise check.fail(field, value, SERVER)
    if value.options.get("lr", 1.0) is None and value.name == "sgd":
        return value._replace(options={**value.options, "lr": 1.0})
    if value.options.get("lr", 1.0) is None:
        raise check.fail(field, value, f"{SERVER}: the server has a step size of its own")
    return value


class Common(TypedDict, total=False):
    """Options of every method, but for those that it is defined by: its optimizers, and how clients count."""

    optimizer: Annotated[
        Optimizer | None,
        Option("how clients take their steps of size lr (None: SGD)", allowed=OPTIMIZER, check=_for_clients),
    ]
    momentum: Annotated[
        float,
        Option("β of the clients' SGD", low=0, high=1, default=0.0, search=Range(0.0, 0.95, asked=True)),
    ]
    weight_decay: Annotated[
        float,
        Option(
            "ω of the clients' SGD: ω w joins the gradient",
            low=0,
            default=0.0,
            search=Range(1e-6, 1e-1, log=True, asked=True),
        ),
    ]
    max_grad_norm: Annotated[
        float | None,
        Option(
            "longer gradients are cut to this length (None: never)",
            low=0,
            open_low=True,
            search=Range(0.1, 10.0, log=True, asked=True),
        ),
    ]
    weighting: Annotated[str, Option(BY_SAMPLES, choices=WEIGHTINGS, default="samples")]
    aggregate: Annotated[
        Aggregator | None,
        Option(
            "how the deltas are combined (None: their mean, or the method's own way)",
            allowed="an aggregator such as partita.aggregate.mean()",
        ),
    ]
    server: Annotated[
        Optimizer | None,
        Option(
            "the step that the server takes along the result (None: all of it)",
            allowed=SERVER,
            check=_for_server,
        ),
    ]


ServerLr = Annotated[
    float,
    Option(
        "β, the step of the server along what it receives",
        low=0,
        open_low=True,
        search=Range(0.03, 1.0, log=True),
    ),
]


@dataclass(frozen=True)
class Choices:
    """The common options with nothing left open."""

    optimizer: Optimizer
    weighting: str
    aggregate: Aggregator
    server: Optimizer


def settings(options: Common, **fixed: Unpack[Common]) -> Choices:
    """Return the common options, as a method gets them, with nothing left open.

    `fixed` are those by which the method is defined.
    """
    options = having(options, **fixed)
    optimizer, limit = options.get("optimizer"), options.get("max_grad_norm")
    if optimizer is None:
        momentum, decay = options.get("momentum", 0.0), options.get("weight_decay", 0.0)
        optimizer = optim.sgd(momentum=momentum, weight_decay=decay)
    else:
        _refuse_both(optimizer, options)
    return Choices(
        optimizer if limit is None else clipped(optimizer, limit),
        options.get("weighting", "samples"),
        options.get("aggregate") or mean(),
        options.get("server") or optim.sgd(lr=1.0),
    )


def having(options: Common, **fixed: Unpack[Common]) -> Common:
    """Return the options with those by which a method is defined."""
    return {**options, **fixed}


def _refuse_both(optimizer: Optimizer, options: Mapping[str, Any]) -> None:
    for short in ("momentum", "weight_decay"):
        if options.get(short):
            name = optimizer.name if short in optimizer.options else "sgd"
            example = f"optimizer=partita.optim.{name}({short}={options[short]:g})"
            raise check.fail(
                short, options[short], f"nothing beside optimizer=, which has its own: {example}"
            )


class About(NamedTuple):
    """What is to be said of a method: where it comes from, and when to use it."""

    paper: str
    use: str


METHODS: dict[str, Callable[..., Algorithm]] = {}
ABOUT: dict[str, About] = {}


def method(
    *given: Any, paper: str = "", use: str = "", weighting: str | None = None, without: tuple[str, ...] = ()
) -> Callable[[Callable[P, Algorithm]], Callable[P, Algorithm]]:
    """Register a method under its function's name, check its options and record them: `@method(...)`.

    paper      where it comes from
    use        when to use it, in a sentence
    weighting  how clients count unless the user says otherwise, where that is not by 'samples'
    without    common options that it does not take, since they are what it is defined by
    """
    if given:
        raise check.fail("method", given[0], "brackets: @method() or @method(paper=..., use=...)")

    def register(build: Callable[P, Algorithm]) -> Callable[P, Algorithm]:
        name, known = build.__name__, _signature(build, weighting, without)

        @functools.wraps(build)
        def make(*args: P.args, **kwargs: P.kwargs) -> Algorithm:
            bound = bind(name, known, args, kwargs)
            return replace(build(*bound.args, **bound.kwargs), name=name, options=dict(bound.arguments))

        build.__signature__ = known  # type: ignore[attr-defined]
        make.__signature__ = readable(known)  # type: ignore[attr-defined]
        before = METHODS.get(name)
        if before is not None and before.__module__ != build.__module__:  # a cell of a notebook may run again
            raise check.fail("method", name, f"a new name: {before.__module__} has a method of this one")
        METHODS[name], ABOUT[name] = make, About(paper, use)
        return make

    return register


def _signature(
    build: Callable[..., Algorithm], weighting: str | None, without: tuple[str, ...]
) -> inspect.Signature:
    """Return the arguments of a method, some common options left out, clients weighted as in its paper."""
    known = signature(build)
    parameters = [p for p in known.parameters.values() if p.name not in without]
    if weighting is not None:
        text = "clients count equally, or by samples" if weighting == "uniform" else BY_SAMPLES
        kind = Annotated[str, Option(text, choices=WEIGHTINGS, default=weighting)]
        parameters = [
            p.replace(default=weighting, annotation=kind) if p.name == "weighting" else p for p in parameters
        ]
    return known.replace(parameters=parameters)


def compose(
    local: Callable[[Problem], LocalRule],
    common: Choices,
    *,
    personal: Personal = "none",
    partition: Callable[[nn.Module, Sequence[str]], Partition] | None = None,
    **parts: Any,
) -> Algorithm:
    """Return a method from its local rule; `parts` are fields of `Algorithm` other than the default."""
    default = {
        "partition": partition or functools.partial(split, personal=personal),
        "init_client": own_part,
        "aggregate": aggregate_with(common.aggregate, common.weighting),
        "server": serve_with(common.server),
        "personalize": as_is,
    }
    return Algorithm(name="", local=local, **{**default, **parts})


def own_part(model: Tensors, partition: Partition) -> ClientState:
    """A new client starts from the part of the model that its own part replaces."""
    return ClientState(tree.pick(model, partition.personal), {})


def aggregate_with(aggregator: Aggregator, weighting: str) -> Aggregation:
    """The aggregator on the deltas, weighted by samples or uniformly."""

    def bind(problem: Problem) -> Callable[[Upload, Tensor], Upload]:
        rule = with_statistics(aggregator, problem.buffers)

        def aggregate(uploads: Upload, key: Tensor) -> Upload:
            weight = counted(uploads, weighting)
            delta, notes = rule.combine(uploads.delta, weight, key)
            return Upload(delta, weight=weight.sum(), metrics=notes)

        return aggregate

    return Aggregation(bind, adds_up=aggregator.linear)


def counted(uploads: Upload, weighting: str) -> Tensor:
    """How much each client counts; one without data has nothing to say, whatever the weighting."""
    samples = uploads.weight
    assert samples is not None
    return samples if weighting == "samples" else (samples > 0).to(samples.dtype)


def serve_with(optimizer: Optimizer) -> Callable[[Problem], ServerRule]:
    """x ← server optimizer(x, Δ). Statistics are no parameters: they become what was aggregated."""

    def bind(problem: Problem) -> ServerRule:
        statistics, lr = set(problem.buffers), optimizer.options.get("lr")
        lr = 1.0 if lr is None else lr

        def init(shared: Tensors) -> ServerState:
            moved = {k: v for k, v in shared.items() if k not in statistics}
            return ServerState(shared, optimizer.init(moved), {}, 0)

        def step(server: ServerState, upload: Upload) -> ServerState:
            delta = upload.delta
            moved = {k: v for k, v in server.shared.items() if k in delta and k not in statistics}
            gradient = tree.pick(delta, moved)
            new, opt = optimizer.update(moved, gradient, server.opt, dict.fromkeys(moved, lr))
            averaged = {k: server.shared[k] - delta[k] for k in delta if k in statistics}
            return ServerState({**server.shared, **new, **averaged}, opt, server.extra, server.version + 1)

        return ServerRule(init, step, optimizer)

    return bind


def as_is(problem: Problem) -> Personalize:
    """The client's model: what it received with its own part in place."""

    def start(download: Download, state: ClientState) -> Tensors:
        return {**download.shared, **tree.pick(state.personal, problem.partition.personal)}

    return Personalize(start, (), lambda carry, download, state: carry)  # noqa: ARG005
