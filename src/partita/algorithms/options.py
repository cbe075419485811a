"""The options that all methods have in common, declared once, and what a method gets of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict, Unpack

from partita import optim
from partita.aggregate.mean import mean
from partita.algorithms.partition import Personal, check_personal
from partita.core import check
from partita.core.options import Option, Range
from partita.core.parts import Aggregator, Optimizer, Rate
from partita.optim.optimizers import clipped

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
    accumulate: Annotated[
        int,
        Option(
            "batches that make a step, which takes the mean of their gradients: as one batch so many times "
            "as large, in the memory of one",
            low=1,
            default=1,
            search=(1, 2, 4, 8),
        ),
    ]
    optimizer_state: Annotated[
        str,
        Option(
            "whether the state of a client's optimizer (momentum, Adam's means) begins anew in every round, "
            "or the client keeps it",
            choices=("reset", "keep"),
            default="reset",
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
    accumulate: int = 1
    keeps_optimizer: bool = False


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
        options.get("accumulate", 1),
        options.get("optimizer_state") == "keep",
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
