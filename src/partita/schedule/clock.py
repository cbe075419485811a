"""Virtual time: who is in flight since when, with which model, and when each one reports.

A client reads the newest model when it asks; what arrives at the same time is taken in before anybody asks
again. Nothing here knows whether the server waits for all (`synchronous`) or for some (`asynchronous`).
"""

from __future__ import annotations

import bisect
import copy
import functools
import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from partita.core import check, draws, tree
from partita.core.types import Cohort, Download, Group, ServerState, Tensors
from partita.schedule.available import Availability
from partita.schedule.base import StageSpec
from partita.schedule.delay import ONE_UNIT, Delays
from partita.schedule.presence import Presence
from partita.schedule.staleness import Staleness, as_staleness

REPEATED = 40
"""Bits of an event's number that are its version; above them is how often it was received before."""


class Event(NamedTuple):
    """A client's receipt of a model: which version, and how often the client had received it before."""

    version: int
    repeat: int = 0

    @property
    def number(self) -> int:
        """The part of this event in the keys of draws: a first receipt is known by its version alone."""
        return self.version + (self.repeat << REPEATED)

    @classmethod
    def of(cls, number: int) -> Event:
        """Return the event of a number."""
        return cls(number & ((1 << REPEATED) - 1), number >> REPEATED)


class Flight(NamedTuple):
    """One turn of a client, from its request to the arrival of its upload."""

    end: float
    number: int  # of all turns so far: who left first is first among those that arrive at the same time
    client: int
    version: int  # of the model that it received
    repeat: int  # how often it had received that version before
    begin: float
    lost: bool

    @property
    def event(self) -> Event:
        """The receipt with which the turn began."""
        return Event(self.version, self.repeat)


@functools.lru_cache(maxsize=64)
def _sample(seed: int, draw: int, population: int, count: int) -> list[int]:
    """Draw places without replacement; remembered, since `upcoming` of one of several runs may have asked."""
    rng = draws.generator(seed, "cohort", draw)
    places: list[int] = rng.choice(population, count, replace=False, shuffle=False).tolist()
    return places


@dataclass
class Clock:
    """Virtual time, the clients in flight, and the models that they have received."""

    clients: int
    seed: int
    delays: Delays
    steps: Callable[[int], int]
    now: float = 0.0
    sent: int = 0  # turns so far
    fills: int = 0  # times that some left together with the newest version
    flights: list[Flight] = field(default_factory=list)  # a heap
    busy: list[int] = field(default_factory=list)  # clients at work, or whose upload was not used yet; sorted
    back: list[int] = field(default_factory=list)  # who may leave again, since some left
    models: dict[int, tuple[Tensors, Tensors]] = field(default_factory=dict)  # by version, while in use
    users: dict[int, int] = field(default_factory=dict)  # how many turns need each of them
    again: dict[int, int] = field(default_factory=dict)  # how often each client received the newest version
    newest: int = -1
    activity: float = 0.0  # time that clients were at work since it was last asked for
    traffic: int = 0  # bytes that were sent to clients since then
    received: Callable[[int], int] | None = None  # bytes that a client downloads (None: the whole model)
    presence: Presence | None = None  # who is available (None: everyone, always)
    asked: int = 0  # clients that were asked for their loss since the last cohort

    @classmethod
    def of(
        cls, spec: StageSpec, delays: Delays | None = None, available: Availability | None = None
    ) -> Clock:
        """Return the clock of a stage (delays=None: each turn takes one unit of time)."""
        delays = ONE_UNIT if delays is None else delays
        clock = cls(spec.clients, spec.seed, delays, spec.steps, spec.time, received=spec.received)
        clock.presence = None if available is None else Presence(available, spec.seed, spec.clients)
        return clock

    # ---- who leaves

    def idle(self, count: int, draw: int) -> list[int]:
        """Return so many idle and available clients, or all, each with the same probability.

        `draw` is the number of the draw.
        """
        idle = self.clients - len(self.busy)
        if self.presence is not None:
            return self.presence.idle(count, draw, self.busy, self._idle, self.now)
        if count >= idle:
            return [self._idle(i) for i in range(idle)]
        if count == 1:
            return [self._idle(int(draws.number(self.seed, "cohort", draw) * idle))]
        places = _sample(self.seed, draw, idle, count)
        return [self._idle(i) for i in places] if self.busy else list(places)

    def there(self, clients: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those of these clients that are available now."""
        return clients if self.presence is None else self.presence.there(clients, self.now)

    def waits(self) -> bool:
        """Advance to when a client may become available, unless an upload arrives before: then False."""
        opening = math.inf if self.presence is None else self.presence.opening(self.busy, self.now)
        if opening == math.inf or (self.flights and self.next_end() <= opening):
            return False
        self.wait(opening)
        return True

    @property
    def deserted(self) -> bool:
        """Whether nobody is in flight, and nobody will ever be available again."""
        return self.presence is not None and not self.flights and self.presence.is_over(self.now)

    def draw(self, version: int) -> int:
        """Return the number of the next draw among idle clients: another for each that left so far."""
        return Event(version, self.fills if version == self.newest else 0).number

    def _idle(self, place: int) -> int:
        """Return the client at this place among those that are idle."""
        if not self.busy:
            return place
        # busy[i] − i idle clients come before busy[i]: count the busy ones that come before the place
        return place + bisect.bisect_right(range(len(self.busy)), place, key=lambda i: self.busy[i] - i)

    def send(
        self, server: ServerState, chosen: Iterable[int], informed: Collection[int] = ()
    ) -> list[Flight]:
        """Send the server's model to these clients, who ask for it now; who is `informed` has it already."""
        if server.version != self.newest:
            self.newest, self.fills = server.version, 0
            self.again.clear()
        flights = self._leaving(list(chosen), server.version, informed)
        self.fills += 1
        self.back.clear()
        if flights:
            self.models[server.version] = (server.shared, server.extra)
            downloads = [f.client for f in flights if f.client not in informed]
            self.traffic += self.download_bytes(self.models[server.version], downloads)
            self.users[server.version] = self.users.get(server.version, 0) + len(flights)
        if len(flights) > len(self.flights):  # sorted, it is a heap
            self.flights = sorted([*self.flights, *flights])
            self.busy = sorted([*self.busy, *[f.client for f in flights]])
            return flights
        for flight in flights:
            heapq.heappush(self.flights, flight)
            bisect.insort(self.busy, flight.client)
        return flights

    def download_bytes(self, model: tuple[Tensors, Tensors], clients: Sequence[int]) -> int:
        """Return the bytes of a server's model, and of what comes with it, that these clients receive."""
        if self.received is None:
            return tree.nbytes(model) * len(clients)
        return sum([self.received(client) for client in clients])

    def _leaving(self, clients: list[int], version: int, informed: Collection[int]) -> list[Flight]:
        if self.delays.fixed is None or self.again or informed or self.presence is not None:
            flights = [self._flight(client, version, client in informed) for client in clients]
            if self.presence is None:
                return flights
            outlasted = self.presence.outlasted(flights, self.now)
            return [f._replace(lost=f.lost or over) for f, over in zip(flights, outlasted)]
        self.again = dict.fromkeys(clients, 1)
        first, end = self.sent + 1, self.now + self.delays.fixed
        self.sent += len(clients)
        return [Flight(end, first + i, c, version, 0, self.now, False) for i, c in enumerate(clients)]

    def _flight(self, client: int, version: int, informed: bool) -> Flight:
        repeat = self.again.get(client, 0)
        self.again[client] = repeat + 1
        event = Event(version, repeat).number
        steps = self.steps(client) if self.delays.computes else 0
        length = self.delays.length(self.seed, event, client, steps, informed)
        length = check.number("delays", length, low=0)
        lost = self.delays.lost(self.seed, event, client)
        self.sent += 1
        return Flight(self.now + length, self.sent, client, version, repeat, self.now, lost)

    def there_and_back(self, server: ServerState, clients: Sequence[int]) -> Cohort:
        """Send the server's model to these clients while nobody else is at work, and return them all.

        It is what `send`, `land_until`, `free` and `cohort` come to where every turn takes the same time.
        """
        assert self.delays.fixed is not None
        n, begin, model = len(clients), self.now, (server.shared, server.extra)
        self.newest, self.fills, self.again = server.version, 1, dict.fromkeys(clients, 1)
        self.sent, self.back = self.sent + n, list(clients)
        self.now = begin + self.delays.fixed
        took = self.now - begin
        cohort = Cohort(
            clients=tuple(clients),
            groups=(
                Group(
                    tuple(range(n)),
                    Download(*model, server.version),
                    event=Event(server.version).number,
                ),
            ),
            staleness=(0,) * n,
            time=self.now,
            delays=(took,) * n,
            activity=self.activity + took * n,
            bytes_down=self.traffic + self.download_bytes(model, clients),
        )
        self.activity, self.traffic = 0.0, 0
        return cohort

    @property
    def is_plain(self) -> bool:
        """Whether nobody is at work, and all who leave now come back together."""
        return self.delays.fixed is not None and self.presence is None and not (self.busy or self.asked)

    # ---- who arrives

    def next_end(self) -> float:
        """Return when the next upload arrives."""
        return self.flights[0].end

    def land(self) -> Flight:
        """Advance to the next arrival and return it; its client is busy until the server has used it."""
        self.wait(self.next_end())
        return heapq.heappop(self.flights)

    def land_until(self, end: float) -> list[Flight]:
        """Advance to `end` and return all who arrive until then, in the order of their arrival."""
        landed: list[Flight] = []
        if self.flights and self.next_end() == max([f.end for f in self.flights]) <= end:  # all at once
            self.wait(self.next_end())
            landed, self.flights = sorted(self.flights), []
        while self.flights and self.next_end() <= end:
            landed.append(self.land())
        self.wait(end)
        return landed

    def free(self, flights: Sequence[Flight]) -> None:
        """Let their clients leave again."""
        clients = [f.client for f in flights]
        if len(clients) == 1:
            del self.busy[bisect.bisect_left(self.busy, clients[0])]
        elif clients:
            freed = set(clients)
            self.busy = [c for c in self.busy if c not in freed]
        self.back += clients

    def wait(self, until: float) -> None:
        """Advance virtual time, while the clients in flight go on working."""
        self.activity += (until - self.now) * len(self.flights)
        self.now = until

    def recall(self) -> list[Flight]:
        """Stop all clients in flight: what they would have sent is lost."""
        flights = sorted(self.flights, key=lambda f: f.number)
        self.flights.clear()
        return flights

    # ---- what the loop is told

    def cohort(
        self, version: int, landed: Sequence[Flight], late: Sequence[Flight], lost: Sequence[Flight]
    ) -> Cohort:
        """Return those who have landed as a cohort of a server at this version, and free them."""
        self.free(landed)
        cohort = Cohort(
            clients=tuple([f.client for f in landed]),
            groups=self._groups(landed),
            staleness=tuple([version - f.version for f in landed]),
            time=self.now,
            delays=tuple([f.end - f.begin for f in landed]),
            late=tuple([f.client for f in late]),
            lost=tuple([f.client for f in lost]),
            activity=self.activity,
            bytes_down=self.traffic,
            asked=self.asked,
        )
        self.activity, self.traffic, self.asked = 0.0, 0, 0
        for received, turns in Counter([f.version for f in (*landed, *late, *lost)]).items():
            self.users[received] -= turns
            if not self.users[received]:  # nobody needs a model that nobody works on
                del self.users[received], self.models[received]
        return cohort

    def in_flight(self) -> Cohort:
        """Return the clients in flight whose upload will arrive."""
        flights = sorted((f for f in self.flights if not f.lost), key=lambda f: f.number)
        clients = tuple(f.client for f in flights)
        return Cohort(clients, self._groups(flights), staleness=(0,) * len(clients), time=self.now)

    def _groups(self, flights: Sequence[Flight]) -> tuple[Group, ...]:
        """Return a group for each event: the clients who received the same model for the same time."""
        places: dict[Event, list[int]] = {}
        if len({(f.version, f.repeat) for f in flights}) == 1:
            places = {flights[0].event: list(range(len(flights)))}
        else:
            for i, flight in enumerate(flights):
                places.setdefault(flight.event, []).append(i)
        return tuple(
            [
                Group(tuple(rows), Download(*self.models[e.version], e.version), event=e.number)
                for e, rows in places.items()
            ]
        )

    # ---- checkpoints

    def copy(self) -> Clock:
        """Return another clock at the same time, to look ahead with."""
        return replace(
            self,
            flights=[*self.flights],
            busy=[*self.busy],
            back=[*self.back],
            models={**self.models},
            users={**self.users},
            again={**self.again},
        )

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold; floats come back from JSON as they were."""
        return {
            "now": self.now,
            "sent": self.sent,
            "fills": self.fills,
            "back": self.back,
            "newest": self.newest,
            "activity": self.activity,
            "traffic": self.traffic,
            "again": sorted(self.again.items()),
            "flights": [list(f) for f in self.flights],
            "models": [[version, *model] for version, model in self.models.items()],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what a checkpoint holds."""
        self.now, self.sent, self.newest = state["now"], state["sent"], state["newest"]
        self.fills, self.back = state["fills"], state["back"]
        self.activity, self.traffic = state["activity"], state["traffic"]
        self.again = dict(state["again"])
        self.flights = [Flight(*f) for f in state["flights"]]
        self.busy = sorted(f.client for f in self.flights)  # between two cohorts
        self.users = dict(Counter(f.version for f in self.flights))
        models = {version: (shared, extra) for version, shared, extra in state["models"]}
        self.models = {version: models[version] for version in self.users}


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
    discounts: dict[int, float] = field(default_factory=dict)  # by staleness, as far as they were asked for

    @property
    def time(self) -> float:
        return self.clock.now

    @property
    def until(self) -> float | None:
        return self.options.until

    def done(self, server: ServerState) -> bool:
        """Return whether all steps are taken, nobody will come, or the next step would come too late."""
        over = server.version >= self.spec.first + self.spec.rounds or self.clock.deserted
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
        if staleness not in self.discounts:
            discount = as_staleness("staleness", self.options.staleness)(staleness)
            self.discounts[staleness] = check.number(f"staleness({staleness})", discount, low=0)
        return self.discounts[staleness]

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold."""
        return self.clock.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what a checkpoint holds."""
        self.clock.load_state(state)
