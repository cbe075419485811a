"""What each method wants: in step, or on arrivals; under the same delays for all."""

from __future__ import annotations

from dataclasses import dataclass

from partita.core.options import checked
from partita.core.parts import Algorithm
from partita.schedule.asynchronous import Asynchronous, asynchronous
from partita.schedule.base import Running, StageSpec, Until, Waits
from partita.schedule.delay import Delays
from partita.schedule.synchronous import Synchronous, synchronous


@dataclass(frozen=True)
class Preferred:
    """See `preferred`."""

    delays: Delays | None
    until: float | None

    def check(self, clients: int, cohort: int) -> None:  # noqa: ARG002
        """A ValueError if it does not fit so many clients."""
        if self.delays is not None:
            self.delays.check(clients)

    def of(self, algorithm: Algorithm) -> Synchronous | Asynchronous:
        """The schedule that the method wants."""
        make = synchronous if algorithm.asynchronous is None else asynchronous
        return make(delays=self.delays, until=self.until).of(algorithm)

    def begin(self, spec: StageSpec) -> Running:
        """In step, for want of a method."""
        return synchronous(delays=self.delays, until=self.until).begin(spec)


@checked()
def preferred(delays: Waits = None, until: Until = None) -> Preferred:
    """Each method under the schedule that it wants: asynchronous() for fedbuff and its kin, or synchronous().

    Use it to compare them under the same delays.
    """
    return Preferred(delays, until)
