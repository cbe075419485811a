"""Virtual time: who is in flight since when, with which model, and when each one reports.

A client reads the newest model when it asks; what arrives at the same time is taken in before anybody asks
again. Nothing here knows whether the server waits for all (`synchronous`) or for some (`asynchronous`).
"""

from __future__ import annotations

import bisect
import functools
import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.core import check, draws, tree
from partita.core.types import Cohort, Download, Group, ServerState, Tensors
from partita.schedule.available import Availability
from partita.schedule.base import StageSpec
from partita.schedule.delay import ONE_UNIT, Delays
from partita.schedule.flight import Event, Flight

TRIES = 8
"""Idle clients that are tried for each one that is wanted, before all are asked whether they are there."""


@functools.lru_cache(maxsize=2)
def _sample(seed: int, draw: int, population: int, count: int) -> list[int]:
    """Draw places without replacement; remembered, since `upcoming` may have asked for them before."""
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
    available: Availability | None = None  # when clients can be chosen (None: always)
    asked: int = 0  # clients that were asked for their loss since the last cohort

    @classmethod
    def of(
        cls, spec: StageSpec, delays: Delays | None = None, available: Availability | None = None
    ) -> Clock:
        """Return the clock of a stage (delays=None: each turn takes one unit of time)."""
        delays = ONE_UNIT if delays is None else delays
        clients, seed, received = spec.clients, spec.seed, spec.received
        return cls(clients, seed, delays, spec.steps, spec.time, received=received, available=available)

    # ---- who leaves

    def idle(self, count: int, draw: int) -> list[int]:
        """Return so many idle and available clients, or all, each with the same probability.

        `draw` is the number of the draw.
        """
        idle = self.clients - len(self.busy)
        if self.available is not None:
            return self._available(count, draw, idle)
        if count >= idle:
            return [self._idle(i) for i in range(idle)]
        if count == 1:
            return [self._idle(int(draws.number(self.seed, "cohort", draw) * idle))]
        return [self._idle(i) for i in _sample(self.seed, draw, idle, count)]

    def _available(self, count: int, draw: int, idle: int) -> list[int]:
        """Return so many of the idle clients that are available: some are tried, all if too few are there."""
        rng, tries = draws.generator(self.seed, "cohort", draw), TRIES * count
        if tries < idle:
            places = rng.choice(idle, tries, replace=False).tolist()
            clients = np.array([self._idle(place) for place in places])
            there = clients[self._opens(clients) <= self.now]
            if len(there) >= count:
                first: list[int] = there[:count].tolist()
                return first
        clients = self.candidates()
        if len(clients) > count:
            clients = rng.choice(clients, count, replace=False)
        chosen: list[int] = clients.tolist()
        return chosen

    def candidates(self) -> NDArray[np.int64]:
        """Return all clients that are idle and available, in order."""
        idle = np.delete(np.arange(self.clients), self.busy)
        return idle if self.available is None else idle[self._opens(idle) <= self.now]

    def opening(self) -> float:
        """Return when to look again for idle clients that are away now; infinity if none ever comes."""
        if self.available is None:
            return math.inf
        opens = self._opens(np.delete(np.arange(self.clients), self.busy))
        return float(opens[opens > self.now].min(initial=math.inf))

    @property
    def deserted(self) -> bool:
        """Whether nobody is in flight, and nobody will ever be available again."""
        if self.available is None or self.flights:
            return False
        some = np.isinf(self._opens(np.arange(min(TRIES, self.clients))))
        return bool(some.all() and np.isinf(self._opens(np.arange(self.clients))).all())

    def _opens(self, clients: NDArray[np.int64]) -> NDArray[np.float64]:
        assert self.available is not None
        return self.available.opens(self.seed, clients, self.now)

    def ask(
        self, server: ServerState, clients: Sequence[int], steps: Sequence[int], informed: Collection[int]
    ) -> None:
        """Let clients download the server's model and evaluate it, for so many steps; wait for all answers.

        An answer is a number, which takes no time to send. Who is `informed` has the model already.
        """
        event, longest = Event(server.version).number, 0.0
        for client, n in zip(clients, steps):
            download, compute, _ = self.delays.parts(self.seed, event, client, n)
            longest = max(longest, (0.0 if client in informed else download) + compute)
        self.asked += len(clients)
        downloads = [client for client in clients if client not in informed]
        self.traffic += self._bytes((server.shared, server.extra), downloads)
        self.wait(self.now + longest)

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
            self.traffic += self._bytes(self.models[server.version], downloads)
            self.users[server.version] = self.users.get(server.version, 0) + len(flights)
        if len(flights) > len(self.flights):  # sorted, it is a heap
            self.flights = sorted([*self.flights, *flights])
            self.busy = sorted([*self.busy, *[f.client for f in flights]])
            return flights
        for flight in flights:
            heapq.heappush(self.flights, flight)
            bisect.insort(self.busy, flight.client)
        return flights

    def _bytes(self, model: tuple[Tensors, Tensors], clients: Sequence[int]) -> int:
        if self.received is None:
            return tree.nbytes(model) * len(clients)
        return sum([self.received(client) for client in clients])

    def _leaving(self, clients: list[int], version: int, informed: Collection[int]) -> list[Flight]:
        if self.delays.fixed is None or self.again or informed or self.available is not None:
            flights = [self._flight(client, version, client in informed) for client in clients]
            return flights if self.available is None else self._within_windows(flights)
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

    def _within_windows(self, flights: list[Flight]) -> list[Flight]:
        """Return turns as lost where they outlast the window of their client."""
        assert self.available is not None
        clients = np.array([f.client for f in flights], dtype=np.int64)
        closes = self.available.closes(self.seed, clients, self.now).tolist()
        return [f._replace(lost=f.lost or f.end > close) for f, close in zip(flights, closes)]

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
