"""Schedules on real time: the same ones as in a simulation, whose clock waits for clients.

A synchronous round ends when all of its cohort have answered, or at a deadline with those who have; below a
quorum it is abandoned. An asynchronous server takes what arrives. Who is asked, for which event, and which
model each client has received is worked out as on the virtual clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from partita.core.types import Cohort, ServerState
from partita.engine.pending import PendingUploads
from partita.schedule import Running, Schedule, StageSpec
from partita.schedule.asynchronous import Arrivals, Asynchronous
from partita.schedule.clock import Clock, Flight
from partita.schedule.synchronous import Rounds, Synchronous


class Asked(Protocol):
    """Whom a clock asks, and who has answered."""

    def ask(self, flight: Flight, server: ServerState) -> None:
        """Ask a client to train on this model."""
        ...

    def give_up(self, clients: Iterable[int]) -> None:
        """Wait no more for the answers of these clients."""
        ...

    @property
    def answers(self) -> PendingUploads:
        """What has been answered and not been used yet, in the order of arrival."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait for an answer, at most so long."""
        ...

    def hand_over(self, clients: Iterable[int]) -> None:
        """Give the loop what these clients have answered, as what waits to be used."""
        ...

    def gone(self, client: int) -> bool:
        """Return whether a client that was asked is not waited for: it is away for long, or for good."""
        ...

    def dismissed(self) -> frozenset[int]:
        """Return the clients that may not take part any more."""
        ...


@dataclass
class RealClock(Clock):
    """Real time in seconds since the stage began, and the clients that were asked."""

    asked_of: Asked | None = None
    begun: float = field(default_factory=time.monotonic)
    told: set[int] = field(default_factory=set)  # who was asked since this process began
    barred: frozenset[int] = frozenset()  # who counts as busy, since it may not take part

    @classmethod
    def real(cls, spec: StageSpec, asked_of: Asked) -> RealClock:
        """Return the clock of a stage."""
        plain = Clock.of(spec)
        clock = cls(plain.clients, plain.seed, plain.delays, plain.steps, plain.now, received=plain.received)
        clock.asked_of, clock.begun = asked_of, time.monotonic() - spec.time
        return clock

    @property
    def fleet(self) -> Asked:
        """Whom it asks."""
        assert self.asked_of is not None
        return self.asked_of

    @property
    def is_plain(self) -> bool:
        """False: nobody knows when clients come back."""
        return False

    # ---- who may take part

    def admit(self) -> None:
        """Let clients leave again that were barred, and may take part now; between two cohorts."""
        back = self.barred - self.fleet.dismissed() - {f.client for f in self.flights}
        self.busy = [c for c in self.busy if c not in back]
        self.bar()

    def bar(self) -> None:
        """Keep clients that may not take part from leaving: they are as busy ones."""
        self.barred = self.fleet.dismissed()
        if not self.barred.issubset(self.busy):
            self.busy = sorted(self.barred.union(self.busy))

    def idle(self, count: int, draw: int) -> list[int]:
        """Return idle clients of those that may take part."""
        self.bar()
        return super().idle(count, draw)

    def free(self, flights: Sequence[Flight]) -> None:
        """Let their clients leave again, if they may take part."""
        super().free(flights)
        self.bar()

    # ---- who is asked, and answers

    def tick(self) -> None:
        """Let time go on to now."""
        self.wait(max(self.now, time.monotonic() - self.begun))

    def send(
        self, server: ServerState, chosen: Iterable[int], informed: Collection[int] = ()
    ) -> list[Flight]:
        """Ask these clients to train on the server's model."""
        self.tick()
        flights = super().send(server, chosen, informed)
        self.ask(flights)
        return flights

    def ask(self, flights: Iterable[Flight]) -> None:
        """Send each of them the model that it is to train on."""
        for flight in flights:
            shared, extra = self.models[flight.version]
            self.told.add(flight.client)
            self.fleet.ask(flight, ServerState(shared, {}, extra, flight.version))

    def ask_again(self) -> None:
        """Ask those in flight whom a process before this one has asked, and who have not answered it."""
        here = {*self.told, *self.fleet.answers, *self.fleet.dismissed()}
        self.ask([f for f in sorted(self.flights, key=lambda f: f.number) if f.client not in here])

    def arrived(self) -> list[Flight]:
        """Return the flights whose clients have answered and may take part, in the order of their answers."""
        out = self.fleet.dismissed()
        flights = {f.client: f for f in self.flights if f.client not in out}
        return [flights[c] for c in self.fleet.answers if c in flights]

    def awaited(self) -> list[Flight]:
        """Return the flights whose clients have not answered, and may take part."""
        out, answers = self.fleet.dismissed(), self.fleet.answers
        return [f for f in self.flights if f.client not in out and f.client not in answers]

    def taken(self, flights: Collection[Flight]) -> list[Flight]:
        """Take these off: they end now. Their clients stay busy until the server has used what they sent."""
        self.tick()
        gone = {f.client for f in flights}
        self.flights = sorted(f for f in self.flights if f.client not in gone)
        self.told -= gone
        return [f._replace(end=self.now) for f in flights]

    def next_end(self) -> float:
        """Return now, if somebody has answered who was not taken yet."""
        return self.now if self.arrived() else math.inf

    def land(self) -> Flight:
        """Wait until somebody answers, or is given up; return that flight."""
        while True:
            if arrived := self.arrived()[:1]:
                return self.taken(arrived)[0]
            if lost := [f for f in self.flights if self.fleet.gone(f.client)][:1]:
                self.fleet.give_up([f.client for f in lost])
                return self.taken(lost)[0]._replace(lost=True)
            self.fleet.wait(1.0)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold, at this time."""
        self.tick()
        return {**super().state(), "answers": self.fleet.answers.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what a checkpoint holds; the time between was nobody's."""
        super().load_state(state)
        self.fleet.answers.load_state(state["answers"], "cpu")
        self.begun, self.told, self.barred = time.monotonic() - self.now, set(), frozenset()


@dataclass
class LiveRounds(Rounds):
    """Synchronous rounds on real time."""

    deadline: float | None = None  # in seconds
    needed: int | float = 1

    def next(self, server: ServerState) -> Cohort:
        """Ask a cohort, and return who of it has answered by the deadline."""
        clock = self.real
        clock.admit()
        clients = self._cohort(server, server.version)
        sent, begin = clock.send(server, clients), time.monotonic()
        end = math.inf if self.deadline is None else begin + self.deadline
        while clock.awaited() and time.monotonic() < end:
            clock.fleet.wait(min(1.0, end - time.monotonic()))
        landed, out = clock.taken(clock.arrived()), clock.fleet.dismissed()
        left = clock.recall()
        clock.fleet.give_up([f.client for f in left])
        clock.free(left)
        late, lost = ([f for f in left if (f.client in out) == gone] for gone in (False, True))
        cohort = clock.cohort(server.version, sorted(landed, key=lambda f: f.number), late, lost)
        clock.fleet.hand_over(cohort.clients)
        return cohort._replace(quorum=self._needed(len(sent)))

    @property
    def real(self) -> RealClock:
        """Its clock."""
        assert isinstance(self.clock, RealClock)
        return self.clock

    def _needed(self, sent: int) -> int:
        """Return how many uploads a step needs: a number, or a share of those who were asked."""
        if isinstance(self.needed, int):
            return min(self.needed, max(1, sent))
        return max(1, math.ceil(self.needed * sent))


class LiveArrivals(Arrivals):
    """An asynchronous schedule on real time."""

    def next(self, server: ServerState) -> Cohort:
        """Wait until the buffer is full; who has reported is replaced when the server has acted."""
        assert isinstance(self.clock, RealClock)
        self.clock.admit()
        self.clock.ask_again()
        cohort = super().next(server)
        self.clock.fleet.hand_over(cohort.clients)
        here = set(cohort.clients)  # who was too late, and has answered again since, has sent what is used
        return cohort._replace(late=tuple([c for c in cohort.late if c not in here]))


def live(
    schedule: Schedule, spec: StageSpec, asked: Asked, deadline: float | None, quorum: int | float | None
) -> Running:
    """Start a schedule on real time.

    deadline  seconds after which a synchronous round ends with those who have answered (None: all do)
    quorum    uploads without which it is abandoned, or which share of the cohort (None: as the schedule says)
    """
    clock = RealClock.real(spec, asked)
    if isinstance(schedule, Synchronous):
        needed = schedule.quorum if quorum is None else quorum
        return LiveRounds(schedule, spec, clock, deadline=deadline, needed=needed)
    assert isinstance(schedule, Asynchronous)
    return LiveArrivals(schedule, spec, clock)
