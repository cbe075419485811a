"""What a schedule is: a user chooses one, `begin` puts it to work for one stage of a run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, NamedTuple, Protocol, TypeVar

from partita.core import check
from partita.core.options import Option
from partita.core.parts import Algorithm
from partita.core.types import Cohort, ServerState
from partita.schedule.clock import Clock
from partita.schedule.delay import DELAYS, Delays
from partita.schedule.staleness import ALLOWED, NAMED, Staleness, as_given, as_staleness

Discount = Annotated[
    str | Staleness | None,
    Option(
        "s(τ): how much a delta counts that is τ server steps old (None: as the method wants, or 'constant')",
        choices=tuple(NAMED),
        allowed=ALLOWED,
        check=as_given,
    ),
]
Waits = Annotated[
    Delays | None, Option("what a client's turn takes (None: one unit of time)", allowed=DELAYS)
]
Until = Annotated[
    float | None,
    Option(
        "no server step after this virtual time, even if there are rounds left (None: all rounds)",
        low=0,
        open_low=True,
    ),
]


class StageSpec(NamedTuple):
    """What a schedule is put to work for: `rounds` server steps from version `first` and from `time` on.

    cohort  clients that the run wants at a time
    steps   how many local steps a client takes in a turn
    received  bytes that a client downloads (None: the server's whole model)
    """

    clients: int
    cohort: int
    first: int
    rounds: int
    seed: int
    time: float
    steps: Callable[[int], int]
    received: Callable[[int], int] | None = None


class Running(Protocol):
    """A schedule at work. All that it knows is in its `state`: a checkpoint has it."""

    @property
    def time(self) -> float:
        """Of the virtual clock, now."""
        ...

    @property
    def until(self) -> float | None:
        """The end of time, if there is one."""
        ...

    def done(self, server: ServerState) -> bool:
        """Whether the stage is over."""
        ...

    def next(self, server: ServerState) -> Cohort:
        """Who reports now, and what each of them had downloaded."""
        ...

    def in_flight(self) -> Cohort:
        """Who is at work and will report later; they may train at any time from now on."""
        ...

    def upcoming(self, server: ServerState) -> Sequence[int]:
        """Who is likely to train in the next round: a guess, which may be empty."""
        ...

    def discount(self, staleness: int) -> float:
        """How much a delta counts that is so many server steps old."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold: a tree of numbers, texts and tensors."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what a checkpoint holds."""
        ...


class Schedule(Protocol):
    """What a user chooses."""

    def check(self, clients: int, cohort: int) -> None:
        """A ValueError if it does not fit so many clients, or so many at a time."""
        ...

    def of(self, algorithm: Algorithm) -> Schedule:
        """With what the method wants where the user has left it open; a ValueError if it cannot run so."""
        ...

    def begin(self, spec: StageSpec) -> Running:
        """At work."""
        ...


class Timed(Protocol):
    """What schedules with a clock have in common."""

    @property
    def staleness(self) -> Staleness | str | None: ...

    @property
    def until(self) -> float | None: ...


T = TypeVar("T", bound=Timed)


@dataclass
class ClockedSchedule(Generic[T]):
    """Running on the virtual clock; `next` is left to those who know whom the server waits for."""

    asked: T
    spec: StageSpec
    clock: Clock
    peeked: tuple[int, float] = (-1, 0.0)  # a version, and when the cohort after it reports

    @property
    def time(self) -> float:
        """Of the virtual clock, now."""
        return self.clock.now

    @property
    def until(self) -> float | None:
        """The end of time, if there is one."""
        return self.asked.until

    def done(self, server: ServerState) -> bool:
        """After so many server steps, or when the next one would come too late."""
        over = server.version >= self.spec.first + self.spec.rounds
        return over or (self.asked.until is not None and self._peek(server) > self.asked.until)

    def next(self, server: ServerState) -> Cohort:
        """Who reports now, and what each of them had downloaded."""
        raise NotImplementedError

    def _peek(self, server: ServerState) -> float:
        """When the next cohort reports: found out on a copy, once for each step."""
        if self.peeked[0] != server.version:
            ahead = copy.copy(self)
            ahead.clock = self.clock.copy()
            self.peeked = (server.version, ahead.next(server).time)
        return self.peeked[1]

    def in_flight(self) -> Cohort:
        """Who is at work and will report later."""
        return self.clock.in_flight()

    def upcoming(self, server: ServerState) -> Sequence[int]:  # noqa: ARG002
        """Nobody knows, unless a schedule says more."""
        return ()

    def discount(self, staleness: int) -> float:
        """How much a delta counts that is so many server steps old."""
        found = as_staleness("staleness", self.asked.staleness)(staleness)
        return check.number(f"staleness({staleness})", found, low=0)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold."""
        return self.clock.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what a checkpoint holds."""
        self.clock.load_state(state)
