"""What a schedule is: a user chooses one, and `begin` starts it for one stage of a run."""

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
from partita.schedule.delay import ALLOWED_DELAYS, Delays
from partita.schedule.staleness import Staleness, as_staleness

TurnDelays = Annotated[
    Delays | None, Option("what a client's turn takes (None: one unit of time)", allowed=ALLOWED_DELAYS)
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
    """The stage that a schedule runs: `rounds` server steps from version `first` and from `time` on.

    cohort    clients that the run wants at a time
    steps     how many local steps a client takes in a turn
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
        """The current virtual time."""
        ...

    @property
    def until(self) -> float | None:
        """The virtual time after which the server takes no step (None: there is none)."""
        ...

    def done(self, server: ServerState) -> bool:
        """Return whether the stage is over."""
        ...

    def next(self, server: ServerState) -> Cohort:
        """Return who reports now, and what each of them had downloaded."""
        ...

    def in_flight(self) -> Cohort:
        """Return the clients in flight, who will report later; they may train at any time from now on."""
        ...

    def upcoming(self, server: ServerState) -> Sequence[int]:
        """Return who is likely to train in the next round: a guess, which may be empty."""
        ...

    def discount(self, staleness: int) -> float:
        """Return how much a delta counts that is so many server steps old."""
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
        """Raise a ValueError if it does not fit so many clients, or so many at a time."""
        ...

    def of(self, algorithm: Algorithm) -> Schedule:
        """Return it with what the method wants where the user left it open, or raise a ValueError."""
        ...

    def begin(self, spec: StageSpec) -> Running:
        """Start the schedule for one stage."""
        ...


class Clocked(Protocol):
    """The options that all schedules with a clock have."""

    @property
    def staleness(self) -> Staleness | str | None: ...

    @property
    def until(self) -> float | None: ...


T = TypeVar("T", bound=Clocked)


@dataclass
class ClockedSchedule(Generic[T]):
    """A schedule that runs on the virtual clock; `next` is left to those who know whom the server awaits."""

    options: T
    spec: StageSpec
    clock: Clock
    peeked: tuple[int, float] = (-1, 0.0)  # a version, and when the cohort after it reports

    @property
    def time(self) -> float:
        return self.clock.now

    @property
    def until(self) -> float | None:
        return self.options.until

    def done(self, server: ServerState) -> bool:
        """Return whether all steps are taken, or the next one would come too late."""
        over = server.version >= self.spec.first + self.spec.rounds
        return over or (self.options.until is not None and self._peek(server) > self.options.until)

    def next(self, server: ServerState) -> Cohort:
        raise NotImplementedError

    def _peek(self, server: ServerState) -> float:
        """Return when the next cohort reports: worked out on a copy, once for each step."""
        if self.peeked[0] != server.version:
            ahead = copy.copy(self)
            ahead.clock = self.clock.copy()
            self.peeked = (server.version, ahead.next(server).time)
        return self.peeked[1]

    def in_flight(self) -> Cohort:
        return self.clock.in_flight()

    def upcoming(self, server: ServerState) -> Sequence[int]:  # noqa: ARG002
        return ()

    def discount(self, staleness: int) -> float:
        discount = as_staleness("staleness", self.options.staleness)(staleness)
        return check.number(f"staleness({staleness})", discount, low=0)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold."""
        return self.clock.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what a checkpoint holds."""
        self.clock.load_state(state)
