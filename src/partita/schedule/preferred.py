"""What each method wants: synchronous, or asynchronous; under the same delays for all."""

from __future__ import annotations

from dataclasses import dataclass

from partita.core.options import checked
from partita.core.parts import Algorithm
from partita.schedule.asynchronous import Asynchronous
from partita.schedule.base import Available, Choose, Running, StageSpec, TurnDelays, Until
from partita.schedule.synchronous import Synchronous


@checked()
@dataclass(frozen=True)
class Preferred:
    """Each method under the schedule that it wants: asynchronous() for fedbuff and its kin, or synchronous().

    Use it to compare them under the same delays.
    """

    delays: TurnDelays = None
    until: Until = None
    choose: Choose = None
    available: Available = None

    def check(self, clients: int, cohort: int) -> None:
        self._as(Synchronous).check(clients, cohort)

    def of(self, algorithm: Algorithm) -> Synchronous | Asynchronous:
        """Return the schedule that the method wants."""
        return self._as(Synchronous if algorithm.asynchronous is None else Asynchronous).of(algorithm)

    def begin(self, spec: StageSpec) -> Running:
        """Start a synchronous schedule: there is no method that could want another."""
        return self._as(Synchronous).begin(spec)

    def _as(self, kind: type[Synchronous | Asynchronous]) -> Synchronous | Asynchronous:
        return kind(delays=self.delays, until=self.until, choose=self.choose, available=self.available)


preferred = Preferred
