"""Rounds in step: the server draws a cohort, waits for it, and goes on."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from partita.core import check, draws
from partita.core.options import Option, checked
from partita.core.parts import Algorithm
from partita.core.types import Cohort, ServerState
from partita.schedule.base import ClockedSchedule, Discount, StageSpec, Until, Waits
from partita.schedule.clock import Clock, Flight
from partita.schedule.delay import Delays, as_delays
from partita.schedule.staleness import Staleness

ORDERS, LATE = ("random", "turns"), ("drop", "apply")
QUORUM = "a number of clients from 1, or a share from 0.0 up to 1.0"


@dataclass(frozen=True)
class Synchronous:
    """See `synchronous`."""

    order: str
    delays: Delays | None
    deadline: float | None
    quorum: int | float
    late: str
    staleness: Staleness | str | None
    until: float | None

    def check(self, clients: int, cohort: int) -> None:
        """A ValueError if it does not fit so many clients, or so many at a time."""
        if isinstance(self.quorum, int):
            check.integer("quorum", self.quorum, low=1, high=cohort)
        if self.delays is not None:
            self.delays.check(clients)

    def of(self, algorithm: Algorithm) -> Synchronous:
        """Every method can run in step, but not all of them with uploads of earlier rounds."""
        if self.late == "apply" and algorithm.synchronous_only:
            raise check.fail("late", self.late, f"'drop' for {algorithm.name}: {algorithm.synchronous_only}")
        return self

    def begin(self, spec: StageSpec) -> Rounds:
        """At work."""
        delays = as_delays("delays", self.delays)
        clock = Clock(spec.clients, spec.seed, delays, spec.steps, spec.time, received=spec.received)
        return Rounds(self, spec, clock)


class Rounds(ClockedSchedule[Synchronous]):
    """See `partita.schedule.base.Running`."""

    def next(self, server: ServerState) -> Cohort:
        """A new cohort leaves; who of it reports, and who of earlier ones does."""
        sent = self.clock.send(server, self._choose(server.version))
        quorum = self._quorum(server.version, len(sent))
        arrived = self.clock.land_until(self._end(sent, quorum))
        landed, lost = [f for f in arrived if not f.lost], [f for f in arrived if f.lost]
        late = self.clock.recall() if self.asked.late == "drop" else []
        self.clock.free([*late, *lost])
        cohort = self.clock.cohort(server.version, sorted(landed, key=lambda f: f.number), late, lost)
        return cohort._replace(quorum=quorum)

    def upcoming(self, server: ServerState) -> Sequence[int]:
        """The next cohort, unless some of it are late until then."""
        return self._choose(server.version + 1)

    def _choose(self, round: int) -> Sequence[int]:
        if self.asked.order == "random":
            return self.clock.idle(self.spec.cohort, round)
        # the next ones of a random order of all clients; a new order when everyone had a turn
        number, place = divmod(round, self._cohorts)
        order = _order(self.spec.seed, number, self.spec.clients)
        chosen = order[place * self.spec.cohort : (place + 1) * self.spec.cohort].tolist()
        busy = set(self.clock.busy)
        return [c for c in chosen if c not in busy]

    @property
    def _cohorts(self) -> int:
        """In which everyone has a turn."""
        return -(-self.spec.clients // self.spec.cohort)

    def _end(self, sent: list[Flight], quorum: int) -> float:
        """When all have answered, or at the deadline if the quorum has; else as soon as the quorum has."""
        if not sent and self.clock.flights and quorum == 1:  # all are at work on an earlier model
            return self.clock.next_end()
        awaited = sent if len(sent) >= quorum else self.clock.flights  # few are free: others count as well
        everyone = max((f.end for f in awaited), default=self.clock.now)
        if self.asked.deadline is None:
            return everyone
        arrivals = sorted(f.end for f in awaited if not f.lost)
        enough = arrivals[quorum - 1] if len(arrivals) >= quorum else everyone
        return min(everyone, max(enough, self.clock.now + self.asked.deadline))

    def _quorum(self, round: int, sent: int) -> int:
        """How many uploads a step needs: so many, or a share of those who were asked.

        In turns, the last cohort may be smaller than a quorum that fits the others: then all of it.
        """
        quorum = self.asked.quorum
        if not isinstance(quorum, int):
            return max(1, int(np.ceil(quorum * sent)))
        if self.asked.order == "random":
            return quorum
        before = round % self._cohorts * self.spec.cohort
        return min(quorum, self.spec.clients - before)


@functools.lru_cache(maxsize=2)
def _order(seed: int, number: int, clients: int) -> np.ndarray:
    return draws.generator(seed, "turns", number).permutation(clients)


def _quorum(field: str, value: Any) -> int | float:
    """A whole number counts clients; any other is a share of them."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not (value >= 1 if isinstance(value, int) else 0 <= value <= 1):
        raise check.fail(field, value, QUORUM)
    found: int | float = value
    return found


@checked()
def synchronous(
    order: Annotated[
        str,
        Option("cohorts by chance, or so that all had a turn before any has a second one", choices=ORDERS),
    ] = "random",
    *,
    delays: Waits = None,
    deadline: Annotated[
        float | None,
        Option(
            "how long the server waits for a round; longer only until a quorum has reported (None: for all; "
            "0: for the quorum alone)",
            low=0,
        ),
    ] = None,
    quorum: Annotated[
        int | float,
        Option(
            "how many usable uploads a server step needs, or which share of the cohort; a round that never "
            "has them is abandoned",
            allowed=QUORUM,
            check=_quorum,
        ),
    ] = 1,
    late: Annotated[
        str,
        Option(
            "what comes after that is dropped, and its client goes back to what it was; or it is applied in "
            "the round in which it arrives",
            choices=LATE,
        ),
    ] = "drop",
    staleness: Discount = None,
    until: Until = None,
) -> Synchronous:
    """Rounds: a new cohort each time; the server acts when all of it has reported, or at a deadline.

    Use it when clients are about equally fast, or with a deadline when few are slow.
    """
    if deadline is not None and delays is None:
        raise check.fail("deadline", deadline, "None without delays=, such as delays(upload=2.0)")
    for field, value, usual in (("quorum", quorum, 1), ("late", late, "drop")):
        if deadline is None and value != usual:
            raise check.fail(field, value, f"{usual!r} without deadline=: the server waits for everyone")
    if late == "drop" and staleness is not None:
        raise check.fail("staleness", staleness, "None with late='drop': nothing stale is applied")
    return Synchronous(order, delays, deadline, quorum, late, staleness, until)
