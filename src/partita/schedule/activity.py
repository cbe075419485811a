"""How many clients are active over virtual time: a schedule and its delays played through without training.

Delays decide when clients ask, work and report, and training does not change them. So a run of the same seed
has the same times, and `active` in its rows of metrics is the sum of the three shares below.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from partita.core import check
from partita.core.types import ServerState
from partita.schedule.asynchronous import MOST_FRUITLESS, Asynchronous
from partita.schedule.base import StageSpec
from partita.schedule.clock import Clock, ClockedSchedule, Flight
from partita.schedule.delay import ONE_UNIT
from partita.schedule.synchronous import Synchronous

PHASES = 3  # download, local steps, upload


class Activity(NamedTuple):
    """Mean shares of all clients in an interval that ends at `time`; who does none of the three is idle."""

    time: float
    downloading: float
    computing: float
    uploading: float

    @property
    def active(self) -> float:
        """The share of clients in flight: whatever they do, they are not idle."""
        return self.downloading + self.computing + self.uploading


def activity(
    schedule: Asynchronous | Synchronous,
    clients: int,
    until: float,
    *,
    cohort: int | None = None,
    steps: int = 1,
    seed: int = 0,
    points: int = 20,
) -> list[Activity]:
    """Return which share of the clients is active until a virtual time, in `points` equal intervals.

    cohort  clients of a round, or in flight (None: everyone); the schedule's own `concurrency` comes first
    steps   local steps of a turn, for delays that compute
    """
    if not isinstance(schedule, Asynchronous | Synchronous):
        allowed = "partita.schedule.asynchronous(...) or partita.schedule.synchronous(...)"
        raise check.fail("schedule", schedule, allowed)
    if schedule.choose is not None:
        raise check.fail(
            "schedule choose", schedule.choose, "None: nobody trains here, and so reports a loss"
        )
    check.number("until", until, low=0, open_low=True)
    check.integer("points", points, low=1)
    cohort = clients if cohort is None else check.integer("cohort", cohort, low=1, high=clients)
    schedule.check(clients, cohort)
    edges = np.linspace(0.0, until, points + 1)
    times = np.zeros((PHASES, points))
    for begin, end, parts in _turns(schedule, clients, cohort, until, steps, seed):
        inner = np.minimum(begin + np.cumsum((0.0, *parts)), end)  # a recalled client stops at once
        for phase, (low, high) in enumerate(itertools.pairwise(inner)):
            overlap = np.minimum(high, edges[1:]) - np.maximum(low, edges[:-1])
            times[phase] += np.maximum(overlap, 0.0)
    shares = times / (clients * until / points)
    return [Activity(float(t), *map(float, column)) for t, column in zip(edges[1:], shares.T)]


@dataclass
class _Recording(Clock):
    """A clock that remembers all turns, and when those ended that were recalled."""

    turns: list[Flight] = field(default_factory=list)
    recalled: dict[int, float] = field(default_factory=dict)

    def send(
        self, server: ServerState, chosen: Iterable[int], informed: Collection[int] = ()
    ) -> list[Flight]:
        flights = super().send(server, chosen, informed)
        self.turns += flights
        return flights

    def recall(self) -> list[Flight]:
        flights = super().recall()
        self.recalled |= {f.number: self.now for f in flights}
        return flights


def _turns(
    schedule: Asynchronous | Synchronous, clients: int, cohort: int, until: float, steps: int, seed: int
) -> list[tuple[float, float, tuple[float, float, float]]]:
    """Return when each turn begins and ends, and how long it downloads, computes and uploads."""
    rounds = np.iinfo(np.int64).max  # time ends first
    spec = StageSpec(clients, cohort, 0, int(rounds), seed, 0.0, lambda client: steps, lambda client: 0)  # noqa: ARG005
    running, version = schedule.begin(spec), 0
    assert isinstance(running, ClockedSchedule)
    clock = running.clock = _Recording.of(spec, schedule.delays, schedule.available)
    assert isinstance(clock, _Recording)
    time, since = 0.0, 0
    while clock.now < until and not clock.deserted:
        running.next(ServerState({}, {}, {}, version))
        version += 1
        time, since = (clock.now, version) if clock.now > time else (time, since)
        if version - since > MOST_FRUITLESS:
            raise check.fail("schedule", schedule, "delays with which time passes")
    delays = schedule.delays or ONE_UNIT
    lengths = [delays.parts(seed, f.event.number, f.client, steps) for f in clock.turns]
    ends = [clock.recalled.get(f.number, f.end) for f in clock.turns]
    return [(f.begin, end, parts) for f, end, parts in zip(clock.turns, ends, lengths)]
