"""Schedules that run on the virtual clock, and those of them that choose by what the server knows."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from partita.core import check, draws
from partita.core.types import Cohort, ServerState
from partita.schedule.base import StageSpec
from partita.schedule.choice import Choice, chosen_by
from partita.schedule.clock import Clock
from partita.schedule.known import Known
from partita.schedule.staleness import Staleness, as_staleness


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


# ---- choices


class Choosing(Clocked, Protocol):
    """The options of schedules that choose."""

    @property
    def choose(self) -> Choice | None: ...


C = TypeVar("C", bound=Choosing)


@dataclass
class ChoosingSchedule(ClockedSchedule[C]):
    """A schedule on the virtual clock that sends clients who are available, by chance or by a choice."""

    informed: frozenset[int] = frozenset()  # who was asked for its loss of the present model, and so has it

    def done(self, server: ServerState) -> bool:
        """Return whether all steps are taken, the next one would come too late, or nobody will come."""
        return super().done(server) or self.clock.deserted

    def chosen(self, server: ServerState, count: int, draw: int) -> list[int]:
        """Return so many idle and available clients, or fewer: the draw of this number."""
        choice = self.options.choose
        if choice is None:
            return self.clock.idle(count, draw)
        candidates = self.clock.candidates()
        if not len(candidates):
            return []
        rng = draws.generator(self.spec.seed, "choice", draw)
        return chosen_by(choice, self._known(server, candidates), count, rng)

    def waits(self) -> bool:
        """Advance to when a client may become available, unless an upload arrives before: then False."""
        opening = self.clock.opening()
        if opening == np.inf or (self.clock.flights and self.clock.next_end() <= opening):
            return False
        self.clock.wait(opening)
        return True

    def _known(self, server: ServerState, candidates: NDArray[np.int64]) -> Known:
        if self.spec.facts is None:
            allowed = "a schedule without choose= where nobody trains"
            raise check.fail("choose", self.options.choose, allowed)

        def ask(clients: NDArray[np.int64], samples: int | None) -> NDArray[np.float64]:
            return self._ask(server, clients, samples)

        return Known(server.version, self.clock.now, candidates, *self.spec.facts(), ask)

    def _ask(
        self,
        server: ServerState,  # noqa: ARG002 (a synchronous one asks)
        clients: NDArray[np.int64],  # noqa: ARG002
        samples: int | None,  # noqa: ARG002
    ) -> NDArray[np.float64]:
        raise check.fail("choose", self.options.choose, "synchronous(), whose server can wait for answers")
