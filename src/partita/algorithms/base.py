"""What all methods have in common: the registry, and the pieces of a method by default."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple, ParamSpec

from torch import Tensor, nn

from partita.aggregate.batchnorm import with_statistics
from partita.algorithms.local import sgd
from partita.algorithms.options import (
    BY_SAMPLES,
    RATE,
    RATES,
    WEIGHTINGS,
    Choices,
    Common,
    Lr,
    Part,
    PersonalL2,
    PersonalLr,
    ServerLr,
    having,
    settings,
)
from partita.algorithms.partition import Personal, split
from partita.core import check, tree
from partita.core.options import Option, bind, readable, signature
from partita.core.parts import (
    Aggregation,
    Aggregator,
    Algorithm,
    LocalRule,
    Optimizer,
    Personalize,
    Problem,
    ServerRule,
)
from partita.core.types import ClientState, Download, Partition, ServerState, Tensors, Upload

__all__ = [  # a method takes its options from here, too
    "ABOUT",
    "METHODS",
    "RATE",
    "RATES",
    "WEIGHTINGS",
    "Choices",
    "Common",
    "Lr",
    "Part",
    "PersonalL2",
    "PersonalLr",
    "ServerLr",
    "aggregate_with",
    "as_is",
    "compose",
    "counted",
    "having",
    "method",
    "own_part",
    "serve_with",
    "settings",
]

P = ParamSpec("P")


class About(NamedTuple):
    """What is to be said of a method: where it comes from, and when to use it."""

    paper: str
    use: str


METHODS: dict[str, Callable[..., Algorithm]] = {}
ABOUT: dict[str, About] = {}


def method(
    *given: Any,
    paper: str = "",
    use: str = "",
    weighting: str | None = None,
    without: tuple[str, ...] = (),
    refuses: Mapping[str, str] | None = None,
) -> Callable[[Callable[P, Algorithm]], Callable[P, Algorithm]]:
    """Register a method under its function's name, check its options and record them: `@method(...)`.

    paper      where it comes from
    use        when to use it, in a sentence
    weighting  how clients count unless the user says otherwise, where that is not by 'samples'
    without    common options that it does not take, since they are what it is defined by
    refuses    common options that make no sense for it, and why
    """
    reasons = refuses or {}
    if given:
        raise check.fail("method", given[0], "brackets: @method() or @method(paper=..., use=...)")

    def register(build: Callable[P, Algorithm]) -> Callable[P, Algorithm]:
        name, known = build.__name__, _signature(build, weighting, (*without, *reasons))

        @functools.wraps(build)
        def make(*args: P.args, **kwargs: P.kwargs) -> Algorithm:
            for field in [k for k in kwargs if k in reasons]:
                raise check.fail(field, kwargs[field], f"{name} without it: {reasons[field]}")
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
    kept: Sequence[str] = (sgd.KEPT,),
    **parts: Any,
) -> Algorithm:
    """Return a method from its local rule; `parts` are fields of `Algorithm` other than the default.

    `kept` begins the names, in a client's memory, of the state of each of its optimizers.
    """
    default = {
        "partition": partition or functools.partial(split, personal=personal),
        "init_client": own_part,
        "aggregate": aggregate_with(common.aggregate, common.weighting),
        "server": serve_with(common.server),
        "personalize": as_is,
    }
    parts = {"local": local, **default, **parts}
    if common.keeps_optimizer:
        parts["init_client"] = _with_optimizer(parts["init_client"], common.optimizer, kept)
    if common.accumulate > 1:
        rules = [k for k in ("local", "newcomer", "personalize") if parts.get(k) not in (None, as_is)]
        parts |= {k: _accumulating(parts[k], common.accumulate) for k in rules}
    return Algorithm(name="", **parts)


def _with_optimizer(
    new_client: Callable[[Tensors, Partition], ClientState], optimizer: Optimizer, kept: Sequence[str]
) -> Callable[[Tensors, Partition], ClientState]:
    """A new client whose memory has a place for the state of its optimizers."""

    @functools.wraps(new_client)
    def new(model: Tensors, partition: Partition) -> ClientState:
        names = dict.fromkeys((*partition.shared, *partition.personal))
        opt = optimizer.init({k: model[k] for k in names if model[k].is_floating_point()})
        state = new_client(model, partition)
        return state._replace(memory={**state.memory, **{w + k: v for w in kept for k, v in opt.items()}})

    return new


def _accumulating(build: Callable[[Problem], Any], batches: int) -> Callable[[Problem], Any]:
    """The rule, each of whose steps takes so many batches of the run."""

    @functools.wraps(build)
    def bind(problem: Problem) -> Any:
        rule = build(problem)
        return rule._replace(phases=tuple(p._replace(accumulate=batches) for p in rule.phases))

    return bind


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
