"""Asynchronous runs: the server acts on arrivals, and whoever has reported is replaced at once.

A client downloads the newest model when it asks, works, and uploads; meanwhile the server goes on. When an
upload arrives, the server has taken τ steps since that client's download: its staleness.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated

from partita.core import check
from partita.core.options import Option, checked
from partita.core.parts import Algorithm
from partita.core.types import Cohort, ServerState
from partita.schedule.base import (
    Available,
    Choose,
    StageSpec,
    TurnDelays,
    Until,
    check_parts,
    refuse_order,
)
from partita.schedule.choosing import chosen, nobody_waits
from partita.schedule.clock import Clock, ClockedSchedule, Flight
from partita.schedule.staleness import OfSchedule

ORDERS = ("random", "same")
MOST_FRUITLESS = 10_000
"""Uploads in a row that were lost or too old, after which the server acts on what it has."""


@checked()
@dataclass(frozen=True)
class Asynchronous:
    """No rounds: the server acts on every `buffer`-th arrival, and who has reported is replaced at once.

    A run's `rounds` are then steps of the server.

    Use it when clients differ much in speed, so that a round would wait for the slowest.
    """

    concurrency: Annotated[
        int | None, Option("clients at work at any time (None: the run's cohort, or everyone)", low=1)
    ] = None
    buffer: Annotated[
        int | None, Option("uploads that make a server step (None: what the method wants, or 1)", low=1)
    ] = None
    staleness: OfSchedule = None
    delays: TurnDelays = None
    _: KW_ONLY
    order: Annotated[
        str,
        Option("who follows a client that has reported: one of those not at work, or itself", choices=ORDERS),
    ] = "random"
    max_staleness: Annotated[
        int | None, Option("older deltas, in server steps, are dropped (None: none is)", low=0)
    ] = None
    until: Until = None
    choose: Choose = None
    available: Available = None

    def __post_init__(self) -> None:
        refuse_order(self.order, self.choose, self.available)
        if getattr(self.choose, "asks", False):
            reason = "an asynchronous server waits for nobody's answer"
            raise check.fail("choose", self.choose, "power_of_choice(d=..., losses='last')", reason)

    def check(self, clients: int, cohort: int) -> None:
        check_parts(clients, 1, self.delays, self.choose, self.available)
        if self.concurrency is not None:
            check.integer("concurrency", self.concurrency, low=1, high=clients)
        most = clients if self.order == "random" else self.concurrency or cohort
        if self.buffer is not None:
            check.integer("buffer", self.buffer, low=1, high=most)

    def of(self, algorithm: Algorithm) -> Asynchronous:
        """Return it with the method's own buffer and staleness where the user has left them open."""
        if algorithm.synchronous_only:
            raise check.fail(
                "schedule",
                "asynchronous",
                f"synchronous() for {algorithm.name}: {algorithm.synchronous_only}",
            )
        wanted = algorithm.asynchronous or {}
        buffer = self.buffer if self.buffer is not None else wanted.get("buffer", 1)
        staleness = self.staleness if self.staleness is not None else wanted.get("staleness")
        return replace(self, buffer=buffer, staleness=staleness)

    def begin(self, spec: StageSpec) -> Arrivals:
        return Arrivals(self, spec, Clock.of(spec, self.delays, self.available))


class Arrivals(ClockedSchedule[Asynchronous]):
    """An asynchronous schedule that runs."""

    @property
    def steps_in_flight(self) -> float:
        """Return how many server steps the uploads of those in flight make: the mean staleness, and one."""
        return (self.options.concurrency or self.spec.cohort) / (self.options.buffer or 1)

    def next(self, server: ServerState) -> Cohort:
        """Advance virtual time until the buffer is full; who has reported is replaced when time goes on.

        A client whose upload lies in the buffer waits for the server's step: it would receive the model that
        it had. Where nobody seems to report any more, the server acts on what it has, or goes on without any:
        so that `until`, the number of rounds or Ctrl-C can end the run.
        """
        buffer = self.options.buffer or 1
        landed: list[Flight] = []
        late: list[Flight] = []
        lost: list[Flight] = []
        fruitless = 0
        while len(landed) < buffer and fruitless < MOST_FRUITLESS:
            if not self.clock.flights or self.clock.next_end() > self.clock.now:
                self._fill(server)
            if not self.clock.flights:  # nobody will ever be available again
                break
            flight = self.clock.land()
            if not flight.lost and not self._too_stale(server.version - flight.version):
                landed.append(flight)
                fruitless = 0
                continue
            fruitless += 1
            (lost if flight.lost else late).append(flight)
            self.clock.free([flight])
        return self.clock.cohort(server.version, landed, late, lost)

    def _fill(self, server: ServerState) -> None:
        """Send clients until as many as wanted are in flight: idle ones, or those who have just reported.

        Where too few are available, others follow when they become so, until an upload arrives.
        """
        while (free := (self.options.concurrency or self.spec.cohort) - len(self.clock.flights)) > 0:
            clients = self._next(server.version, free)
            if clients:
                self.clock.send(server, clients)
            if len(clients) >= free or not self.clock.waits():
                return

    def _next(self, version: int, count: int) -> list[int]:
        draw, choice = self.clock.draw(version), self.options.choose
        if choice is not None:
            return chosen(choice, self.spec, self.clock, version, count, draw, nobody_waits)
        if self.options.order == "same" and self.clock.sent:
            return [*self.clock.back]
        return self.clock.idle(count, draw)

    def _too_stale(self, staleness: int) -> bool:
        most = self.options.max_staleness
        return most is not None and staleness > most


asynchronous = Asynchronous
