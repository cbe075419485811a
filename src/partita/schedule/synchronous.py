"""Synchronous runs: the server draws a cohort, waits for it, and goes on."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from partita.core import check, draws
from partita.core.options import Option, checked
from partita.core.parts import Algorithm
from partita.core.types import Cohort, Group, ServerState
from partita.schedule.base import (
    Available,
    Choose,
    StageSpec,
    TurnDelays,
    Until,
    check_parts,
    refuse_order,
)
from partita.schedule.choosing import MOST_QUESTIONS, chosen, wait_for_answers
from partita.schedule.clock import Clock, ClockedSchedule, Flight
from partita.schedule.staleness import OfSchedule

ORDERS, LATE = ("random", "turns", "cyclic", "poisson"), ("drop", "apply", "partial")
IN_TURNS = ("turns", "cyclic")
ROUNDING = 1e-9  # 0.3 of 10 clients are 3, though 0.3 * 10 may be a little less
ALLOWED_QUORUM = "a number of clients from 1, or a share from 0.0 up to 1.0"


def checked_quorum(field: str, value: Any) -> int | float:
    """Return a whole number, which counts clients, or any other, which is a share of them."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (value >= 1 if isinstance(value, int) else 0 <= value <= 1):
        raise check.fail(field, value, ALLOWED_QUORUM)
    quorum: int | float = value
    return quorum


@checked()
@dataclass(frozen=True)
class Synchronous:
    """Rounds: a new cohort each time; the server acts when all of it has reported, or at a deadline.

    Use it when clients are about equally fast, or with a deadline when few are slow. `stragglers=0.9` is the
    protocol of FedProx's paper: FedAvg drops them, other methods use their partial work (`late="partial"`).
    """

    order: Annotated[
        str,
        Option(
            "cohorts by chance; or so that all had a turn before any has a second one, in a new order each "
            "time ('turns') or always in the same one ('cyclic'); or each client by a chance of its own, so "
            "that cohorts differ in size ('poisson': what accounts of privacy count with)",
            choices=ORDERS,
        ),
    ] = "random"
    _: KW_ONLY
    delays: TurnDelays = None
    deadline: Annotated[
        float | None,
        Option(
            "how long the server waits for a round; longer only until a quorum has reported, and no longer "
            "with order='poisson' and quorum=1 (None: for all; 0: for the quorum alone)",
            low=0,
        ),
    ] = None
    quorum: Annotated[
        int | float,
        Option(
            "how many usable uploads a server step needs, or which share of the cohort; a round that never "
            "has them is abandoned",
            allowed=ALLOWED_QUORUM,
            check=checked_quorum,
        ),
    ] = 1
    late: Annotated[
        str,
        Option(
            "what is not there by then is dropped, and its client goes back to what it was; or it is applied "
            "in the round in which it arrives; or stragglers send what they have: partial work",
            choices=LATE,
        ),
    ] = "drop"
    stragglers: Annotated[
        float,
        Option(
            "the share of a cohort that is not done in time, drawn anew in each round: of E passes, or "
            "steps (also those of a single pass), a straggler has done 1 to E − 1, each equally likely",
            low=0,
            high=1,
        ),
    ] = 0.0
    staleness: OfSchedule = None
    until: Until = None
    choose: Choose = None
    available: Available = None

    def __post_init__(self) -> None:
        refuse_order(self.order, self.choose, self.available)
        if self.deadline is not None and self.delays is None:
            raise check.fail("deadline", self.deadline, "None without delays=, such as delays(upload=2.0)")
        if self.deadline is None:
            waits = "without deadline=: the server waits for everyone"
            if self.quorum != 1:
                raise check.fail("quorum", self.quorum, f"1 {waits}")
            if self.late == "apply":
                raise check.fail("late", self.late, f"'drop' {waits}")
        if self.deadline == 0 and self.holds_deadline:
            reason = "the server waits for nobody beyond it, whoever else comes"
            raise check.fail("deadline", self.deadline, f"above 0 with order={self.order!r}", reason)
        if self.deadline is not None and self.stragglers:
            reason = "None with stragglers=: they are those who are not done in time"
            raise check.fail("deadline", self.deadline, reason)
        if self.late == "partial" and not self.stragglers:
            raise check.fail("late", self.late, "'drop' or 'apply' without stragglers=")
        if self.late != "apply" and self.staleness is not None:
            allowed = f"None with late={self.late!r}: nothing stale is applied"
            raise check.fail("staleness", self.staleness, allowed)

    def check(self, clients: int, cohort: int) -> None:
        if isinstance(self.quorum, int):
            check.integer("quorum", self.quorum, low=1, high=cohort)
        check_parts(clients, cohort, self.delays, self.choose, self.available)

    def of(self, algorithm: Algorithm) -> Synchronous:
        """Return it, unless it would apply uploads of earlier rounds and the method cannot use them."""
        if self.late == "apply" and algorithm.synchronous_only:
            raise check.fail("late", self.late, f"'drop' for {algorithm.name}: {algorithm.synchronous_only}")
        return self

    @property
    def holds_deadline(self) -> bool:
        """Whether a round ends at its deadline though nobody has reported.

        Where clients come by a chance of their own, whether an upload counts must not depend on whether
        another one was there in time: accounts of privacy count with that.
        """
        alone = isinstance(self.quorum, int) and self.quorum == 1
        return self.order == "poisson" and self.late == "drop" and alone

    def participation(
        self, clients: int, cohort: int, rounds: int, *, first: bool = True
    ) -> tuple[float | None, int | None, int | None]:
        """Return what is promised of so many rounds: chance, most turns of a client, rounds between two.

        The chance is of each client by itself (None: there is no such chance). Uploads that are applied late
        are of other rounds than those in which they were asked for: then nothing is promised of either.
        Unless they are the `first` rounds of a run, they may begin in the middle of an order.
        """
        if self.late == "apply":
            return None, rounds, None
        if self.order == "poisson":
            return cohort / clients, rounds, 1
        cohorts = -(-clients // cohort)
        if self.order == "cyclic":
            return None, -(-rounds // cohorts), cohorts
        if self.order == "turns":
            before = 0 if first or not rounds else cohorts - 1
            return None, -(-(before + rounds) // cohorts), 1
        return None, rounds, 1

    def reporting(self, clients: int, cohort: int, *, simulated: bool = True) -> NDArray[np.float64]:
        """Return each client's chance to report in a round, as far as it is declared (`tells_who_reports`).

        Uploads that are applied late count once, in the round in which they arrive. Real clients drop out
        when they do, whatever is declared of `simulated` ones.
        """
        sizes = np.full(1, cohort)
        if self.order in IN_TURNS:  # of which the last cohort may be smaller
            starts = np.arange(0, clients, cohort)
            sizes = np.minimum(cohort, clients - starts)
        in_time = sizes.astype(np.float64)
        if self.late == "drop" and self.order == "poisson":
            in_time *= 1 - self.stragglers
        elif self.late == "drop":
            in_time -= np.floor(self.stragglers * sizes + ROUNDING)
        lost = 0.0 if self.delays is None or not simulated else self.delays.dropout
        chances: NDArray[np.float64] = in_time.mean() / clients * (1 - np.broadcast_to(lost, clients))
        return chances

    @property
    def tells_who_reports(self) -> bool:
        """Whether `reporting` is all that is to be known: nobody is away, or late by chances of the clock.

        Who is late is still at work when others are drawn; only cohorts drawn at random take others then.
        """
        in_time = self.order == "random" if self.late == "apply" else self.deadline is None
        return in_time and self.available is None

    def begin(self, spec: StageSpec) -> Rounds:
        return Rounds(self, spec, Clock.of(spec, self.delays, self.available))


@dataclass
class Rounds(ClockedSchedule[Synchronous]):
    """A synchronous schedule that runs."""

    informed: frozenset[int] = frozenset()  # who was asked for its loss of the present model, and so has it

    def next(self, server: ServerState) -> Cohort:
        """Send a new cohort; return who of it reports, and who of earlier ones does."""
        self.informed = frozenset()
        clients, questions = self._cohort(server, server.version), 0
        while not clients and questions < MOST_QUESTIONS and self.clock.waits():
            asked = self.clock.asked
            clients = self._cohort(server, server.version)
            questions += self.clock.asked > asked  # in vain, if all have left before they could be sent
        if clients and self._is_plain and self.clock.is_plain and server.version != self.clock.newest:
            return self.clock.there_and_back(server, clients)
        sent = self.clock.send(server, clients, self.informed)
        quorum = self._quorum(server.version, len(sent))
        arrived = self.clock.land_until(self._end(sent, quorum))
        landed, lost = [f for f in arrived if not f.lost], [f for f in arrived if f.lost]
        late = self.clock.recall() if self.options.late == "drop" else []
        progress = self._progress(server.version, sent)
        if self.options.late == "drop":
            late += [f for f in landed if f.client in progress]
            landed = [f for f in landed if f.client not in progress]
        self.clock.free([*late, *lost])
        cohort = self.clock.cohort(server.version, sorted(landed, key=lambda f: f.number), late, lost)
        if progress and self.options.late == "partial":
            cohort = cohort._replace(groups=_with_progress(cohort, progress))
        return cohort._replace(quorum=quorum)

    @functools.cached_property
    def _is_plain(self) -> bool:
        """Whether the server waits for all of a cohort, whoever they are."""
        options = self.options
        return options.deadline is None and options.choose is None and not options.stragglers

    def upcoming(self, server: ServerState) -> Sequence[int]:
        """Return the next cohort, unless some of it are late until then."""
        if self.options.choose is not None or self.options.available is not None:
            return ()  # nobody knows yet what will be known then
        return self._cohort(server, server.version + 1)

    def _cohort(self, server: ServerState, round: int) -> Sequence[int]:
        if self.options.choose is not None:
            ask = functools.partial(self._ask, server)
            return chosen(self.options.choose, self.spec, self.clock, round, self.spec.cohort, round, ask)
        if self.options.order == "random":
            return self.clock.idle(self.spec.cohort, round)
        if self.options.order == "poisson":
            return self._by_chance(round)
        # the next ones of a random order of all clients; in turns, a new order when everyone had one
        number, place = divmod(round, self._cohorts)
        order = _order(self.spec.seed, number if self.options.order == "turns" else 0, self.spec.clients)
        next_ones = order[place * self.spec.cohort : (place + 1) * self.spec.cohort].tolist()
        busy = set(self.clock.busy)
        return [c for c in next_ones if c not in busy]

    def _by_chance(self, round: int) -> list[int]:
        """Return each client with the probability cohort / clients, whoever else comes.

        How many come is binomial, and who they are a sample of that size: what a coin for each of them gives,
        without as many coins as there are clients. Whoever is still at work is not asked.
        """
        rng = draws.generator(self.spec.seed, "poisson", round)
        count = int(rng.binomial(self.spec.clients, self.spec.cohort / self.spec.clients))
        busy = set(self.clock.busy)
        sample = rng.choice(self.spec.clients, count, replace=False, shuffle=False).tolist()
        return [c for c in sample if c not in busy]

    def _ask(
        self, server: ServerState, clients: NDArray[np.int64], samples: int | None
    ) -> NDArray[np.float64]:
        assert self.spec.ask is not None
        loss, steps = self.spec.ask(clients, samples)
        numbers: list[int] = clients.tolist()
        wait_for_answers(self.clock, server, numbers, steps.tolist(), self.informed)
        self.informed |= frozenset(numbers)
        return np.where(np.isin(clients, self.clock.there(clients)), loss, np.nan)

    def _progress(self, round: int, sent: list[Flight]) -> dict[int, float]:
        """Return the stragglers among those who were sent, and how far each of them gets: u from 0 to 1."""
        share = self.options.stragglers
        if not share or not sent:
            return {}
        rng = draws.generator(self.spec.seed, "stragglers", round)
        if self.options.order == "poisson":  # by a chance of its own, as it came
            chosen = np.flatnonzero(rng.random(len(sent)) < share)
        else:
            chosen = rng.choice(len(sent), int(share * len(sent) + ROUNDING), replace=False)
        return {sent[i].client: float(u) for i, u in zip(chosen.tolist(), rng.random(len(chosen)))}

    @property
    def _cohorts(self) -> int:
        """How many cohorts it takes for everyone to have a turn."""
        return -(-self.spec.clients // self.spec.cohort)

    def _end(self, sent: list[Flight], quorum: int) -> float:
        """Return when all have answered, or the deadline if the quorum has; else when the quorum has."""
        if not sent and self.clock.flights and quorum == 1:  # all are at work on an earlier model
            return self.clock.next_end()
        awaited = sent if len(sent) >= quorum else self.clock.flights  # few are free: others count as well
        everyone = max((f.end for f in awaited), default=self.clock.now)
        if self.options.deadline is None:
            return everyone
        if self.options.holds_deadline:
            return min(everyone, self.clock.now + self.options.deadline)
        arrivals = sorted(f.end for f in awaited if not f.lost)
        enough = arrivals[quorum - 1] if len(arrivals) >= quorum else everyone
        return min(everyone, max(enough, self.clock.now + self.options.deadline))

    def _quorum(self, round: int, sent: int) -> int:
        """Return how many uploads a step needs: a number, or a share of those who were asked.

        In turns, the last cohort may be smaller than a quorum that fits the others: then all of it.
        """
        quorum = self.options.quorum
        if not isinstance(quorum, int):
            return max(1, int(np.ceil(quorum * sent)))
        if self.options.order not in IN_TURNS:
            return quorum
        before = round % self._cohorts * self.spec.cohort
        return min(quorum, self.spec.clients - before)


def _with_progress(cohort: Cohort, progress: Mapping[int, float]) -> tuple[Group, ...]:
    """Return the groups of a cohort, each with the progress of its clients."""
    return tuple(
        group._replace(progress=tuple([progress.get(cohort.clients[i], 1.0) for i in group.positions]))
        for group in cohort.groups
    )


@functools.lru_cache(maxsize=2)
def _order(seed: int, number: int, clients: int) -> np.ndarray:
    return draws.generator(seed, "turns", number).permutation(clients)


synchronous = Synchronous
