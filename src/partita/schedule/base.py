"""What a schedule is: a user chooses one, and `begin` starts it for one stage of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, Protocol

from partita.core import check
from partita.core.options import Option
from partita.core.parts import Algorithm
from partita.core.types import Cohort, ServerState
from partita.schedule.available import ALLOWED_AVAILABILITY, Availability, as_availability
from partita.schedule.choice import ALLOWED_CHOICE, Choice, checked_choice
from partita.schedule.delay import ALLOWED_DELAYS, Delays
from partita.schedule.known import Ask, Facts

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
Choose = Annotated[
    Choice | None,
    Option(
        "who is chosen, by what the server knows of clients (None: as `order` says)",
        allowed=ALLOWED_CHOICE,
        check=checked_choice,
    ),
]
Available = Annotated[
    Availability | None,
    Option(
        "when clients are available on the virtual clock: only then can they be chosen (None: always)",
        allowed=ALLOWED_AVAILABILITY,
        check=as_availability,
    ),
]


def refuse_order(order: str, choose: Choice | None, available: Availability | None) -> None:
    """Refuse an order of clients beside a choice of them, or where some of them may be away."""
    for name, value in (("choose", choose), ("available", available)):
        if order != "random" and value is not None:
            advice = "choose=least_chosen() lets all take part about equally often"
            raise check.fail("order", order, f"'random' with {name}=; {advice}")


def check_parts(
    clients: int,
    cohort: int,
    delays: Delays | None,
    choose: Choice | None,
    available: Availability | None,
) -> None:
    """Raise a ValueError if a part of a schedule does not fit so many clients, or so many at a time."""
    if delays is not None:
        delays.check(clients)
    if available is not None:
        available.check(clients, "available")
    if (fits := getattr(choose, "check", None)) is not None:
        fits(clients, cohort)


class StageSpec(NamedTuple):
    """The stage that a schedule runs: `rounds` server steps from version `first` and from `time` on.

    cohort    clients that the run wants at a time
    steps     how many local steps a client takes in a turn
    received  bytes that a client downloads (None: the server's whole model)
    facts     what is known of clients by now, and `ask` asks some for their loss: for choices
    """

    clients: int
    cohort: int
    first: int
    rounds: int
    seed: int
    time: float
    steps: Callable[[int], int]
    received: Callable[[int], int] | None = None
    facts: Callable[[], Facts] | None = None
    ask: Ask | None = None


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
