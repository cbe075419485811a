"""Virtual time: who is at work since when, with which model, and when each one reports.

A client reads the newest model when it asks; what arrives at the same time is taken in before anybody asks
again. Nothing here knows whether the server waits for all (`synchronous`) or for some (`asynchronous`).
"""

from __future__ import annotations

import bisect
import functools
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from partita.core import check, draws, tree
from partita.core.types import Cohort, Download, Group, ServerState, Tensors
from partita.schedule.delay import Delays

AGAIN = 1 << 40
"""The events of a client: the version of the model that it received, or that plus so much for each further
time that it received the same one."""


class Flight(NamedTuple):
    """One turn of a client, from its request to the arrival of its upload."""

    end: float
    number: int  # of all turns so far: who left first is first among those that arrive at the same time
    client: int
    event: int
    begin: float
    lost: bool

    @property
    def version(self) -> int:
        """Of the model that it received."""
        return self.event % AGAIN


@functools.lru_cache(maxsize=2)
def _chosen(seed: int, draw: int, there: int, count: int) -> list[int]:
    """Places of so many among those who are there; known already if somebody asked who comes next."""
    rng = draws.generator(seed, "cohort", draw)
    found: list[int] = rng.choice(there, count, replace=False, shuffle=False).tolist()
    return found


@dataclass
class Clock:
    """See the module."""

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

    # ---- who leaves

    def idle(self, count: int, draw: int) -> list[int]:
        """So many clients that are free, or all, each with the same probability: the draw of this number."""
        there = self.clients - len(self.busy)
        if count >= there:
            return [self._idle(i) for i in range(there)]
        if count == 1:
            return [self._idle(int(draws.number(self.seed, "cohort", draw) * there))]
        return [self._idle(i) for i in _chosen(self.seed, draw, there, count)]

    def draw(self, version: int) -> int:
        """The number of the next draw: the version, or that plus so much for each further one with it."""
        return version + (AGAIN * self.fills if version == self.newest else 0)

    def _idle(self, place: int) -> int:
        """The client at this place among those that are free."""
        if not self.busy:
            return place
        # busy[i] − i idle clients come before busy[i]: count the busy ones that come before the place
        return place + bisect.bisect_right(range(len(self.busy)), place, key=lambda i: self.busy[i] - i)

    def send(self, server: ServerState, chosen: Iterable[int]) -> list[Flight]:
        """These clients ask now, and receive the server's model."""
        if server.version != self.newest:
            self.newest, self.fills = server.version, 0
            self.again.clear()
        flights = self._leaving(list(chosen), server.version)
        self.fills += 1
        self.back.clear()
        if flights:
            self.models[server.version] = (server.shared, server.extra)
            self.traffic += self._bytes(server.version, flights)
            self.users[server.version] = self.users.get(server.version, 0) + len(flights)
        if len(flights) > len(self.flights):  # sorted, it is a heap
            self.flights = sorted([*self.flights, *flights])
            self.busy = sorted([*self.busy, *[f.client for f in flights]])
            return flights
        for flight in flights:
            heapq.heappush(self.flights, flight)
            bisect.insort(self.busy, flight.client)
        return flights

    def _bytes(self, version: int, flights: Sequence[Flight]) -> int:
        if self.received is None:
            return tree.nbytes(self.models[version]) * len(flights)
        return sum([self.received(f.client) for f in flights])

    def _leaving(self, clients: list[int], version: int) -> list[Flight]:
        if self.delays.fixed is None or self.again:
            return [self._flight(client, version) for client in clients]
        self.again = dict.fromkeys(clients, 1)
        first, end = self.sent + 1, self.now + self.delays.fixed
        self.sent += len(clients)
        return [Flight(end, first + i, c, version, self.now, False) for i, c in enumerate(clients)]

    def _flight(self, client: int, version: int) -> Flight:
        before = self.again.get(client, 0)
        self.again[client] = before + 1
        event = version + AGAIN * before
        steps = self.steps(client) if self.delays.computes else 0
        length = check.number("delays", self.delays.length(self.seed, event, client, steps), low=0)
        lost = self.delays.lost(self.seed, event, client)
        self.sent += 1
        return Flight(self.now + length, self.sent, client, event, self.now, lost)

    # ---- who arrives

    def next_end(self) -> float:
        """When the next one arrives."""
        return self.flights[0].end

    def land(self) -> Flight:
        """The next arrival; time goes on to it. Its client is not free before the server has used it."""
        self.wait(self.next_end())
        return heapq.heappop(self.flights)

    def land_until(self, end: float) -> list[Flight]:
        """All who arrive until then, in the order of their arrival; time goes on to the end."""
        landed: list[Flight] = []
        if self.flights and self.next_end() == max([f.end for f in self.flights]) <= end:  # all at once
            self.wait(self.next_end())
            landed, self.flights = sorted(self.flights), []
        while self.flights and self.next_end() <= end:
            landed.append(self.land())
        self.wait(end)
        return landed

    def free(self, flights: Sequence[Flight]) -> None:
        """Their clients may leave again."""
        gone = [f.client for f in flights]
        if len(gone) == 1:
            del self.busy[bisect.bisect_left(self.busy, gone[0])]
        elif gone:
            some = set(gone)
            self.busy = [c for c in self.busy if c not in some]
        self.back += gone

    def wait(self, until: float) -> None:
        """Time goes on, while those at work go on working."""
        self.activity += (until - self.now) * len(self.flights)
        self.now = until

    def recall(self) -> list[Flight]:
        """All that are at work stop: what they would have sent is lost."""
        flights = sorted(self.flights, key=lambda f: f.number)
        self.flights.clear()
        return flights

    # ---- what the loop is told

    def cohort(
        self, version: int, landed: Sequence[Flight], late: Sequence[Flight], lost: Sequence[Flight]
    ) -> Cohort:
        """Those who have landed report to a server that is at this version, and are free again."""
        self.free(landed)
        found = Cohort(
            clients=tuple([f.client for f in landed]),
            groups=self._groups(landed),
            staleness=tuple([version - f.version for f in landed]),
            time=self.now,
            delays=tuple([f.end - f.begin for f in landed]),
            late=tuple([f.client for f in late]),
            lost=tuple([f.client for f in lost]),
            activity=self.activity,
            bytes_down=self.traffic,
        )
        self.activity, self.traffic = 0.0, 0
        for gone, turns in Counter([f.version for f in (*landed, *late, *lost)]).items():
            self._forget(gone, turns)
        return found

    def _forget(self, version: int, turns: int) -> None:
        """So many less are at work on this version; nobody needs a model that nobody works on."""
        self.users[version] -= turns
        if not self.users[version]:
            del self.users[version], self.models[version]

    def in_flight(self) -> Cohort:
        """Those at work whose upload will arrive."""
        there = sorted((f for f in self.flights if not f.lost), key=lambda f: f.number)
        clients = tuple(f.client for f in there)
        return Cohort(clients, self._groups(there), staleness=(0,) * len(clients), time=self.now)

    def _groups(self, flights: Sequence[Flight]) -> tuple[Group, ...]:
        """Who received the same model for the same time: a group each."""
        places: dict[int, list[int]] = {}
        if len({f.event for f in flights}) == 1:
            places = {flights[0].event: list(range(len(flights)))}
        else:
            for i, flight in enumerate(flights):
                places.setdefault(flight.event, []).append(i)
        return tuple(
            [
                Group(tuple(some), Download(*self.models[event % AGAIN], event % AGAIN), event=event)
                for event, some in places.items()
            ]
        )

    # ---- checkpoints

    def copy(self) -> Clock:
        """Another clock at the same time, to look ahead with."""
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
