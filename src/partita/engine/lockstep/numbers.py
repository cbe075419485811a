"""Numbers that a method is defined by, such as λ, and that differ between runs: each client has its run's.

A method is a function of its options, and its rules are made from them. Here they are made within a step,
from numbers that travel with the client, so that a stack of clients has a row of each number. A rule that
needs to know a number to be made (`if mu > 1`) cannot be made so, and its runs stay apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from partita.algorithms import METHODS
from partita.algorithms.options import RATE
from partita.core import check
from partita.core.options import declared, members, signature
from partita.core.parts import Algorithm, LocalRule, Phase
from partita.core.types import ClientState, Download, Upload

PREFIX = "number of the run: "
"""What `Download.extra` calls a number: this and its name."""


class Numbered(NamedTuple):
    """What passes from step to step: the rule's own, and the numbers of the client's run."""

    inner: Any
    numbers: Mapping[str, Tensor]


def numbers(algorithm: Algorithm) -> dict[str, float]:
    """Return the options of a method that are numbers, but for its rates and those that are zero.

    A method with a loss of its own has none: the loss belongs to the problem, which all runs share.
    """
    make = METHODS.get(algorithm.name) if algorithm.loss is None else None
    found = {}
    for name, p in ({} if make is None else signature(make).parameters).items():
        kind, option = declared(p.annotation)
        value = algorithm.options.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and float in members(kind)
        if is_number and option.allowed != RATE and value:  # without a term its rule is another one
            found[name] = float(value)
    return found


def remade(algorithm: Algorithm, given: Mapping[str, Any]) -> Algorithm:
    """Return the method with other numbers, which may be tensors; refuse one that is not as it was made."""
    build = getattr(METHODS[algorithm.name], "__wrapped__", None)
    known = {} if build is None else signature(build).parameters
    options = {k: v for k, v in algorithm.options.items() if k in known}
    if build is None:
        raise LookupError(f"{algorithm.name} cannot be made again")
    with check.numbers_checked_before():
        made: Algorithm = build(**{**options, **given})
    if _code(made.local) is not _code(algorithm.local):
        raise LookupError(f"{algorithm.name} has another local rule than its name says")
    return made


def _code(function: Any) -> Any:
    return getattr(function, "__code__", type(function))


def with_numbers(plain: LocalRule, make: Callable[[Mapping[str, Tensor]], LocalRule]) -> LocalRule:
    """Return the rule that is made for the numbers that a client has received."""

    def start(download: Download, state: ClientState) -> Numbered:
        given = {k.removeprefix(PREFIX): v for k, v in download.extra.items() if k.startswith(PREFIX)}
        return Numbered(make(given).start(_own(download), state), given)

    def phase(number: int) -> Phase:
        def step(carry: Numbered, batch: Any, lr: Any) -> Numbered:
            own = make(carry.numbers).phases[number]
            return carry._replace(inner=own.step(carry.inner, batch, lr))

        def until(carry: Numbered) -> Tensor:
            own = make(carry.numbers).phases[number]
            assert own.until is not None
            return own.until(carry.inner)

        before = plain.phases[number]
        return before._replace(step=step, until=None if before.until is None else until)

    def finish(carry: Numbered, download: Download, state: ClientState) -> tuple[Upload, ClientState]:
        return make(carry.numbers).finish(carry.inner, _own(download), state)

    return LocalRule(start, tuple(map(phase, range(len(plain.phases)))), finish)


def _own(download: Download) -> Download:
    """Return what the rule itself knows."""
    return download._replace(extra={k: v for k, v in download.extra.items() if not k.startswith(PREFIX)})
