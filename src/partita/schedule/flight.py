"""One turn of a client: which model it received, when it left and when its upload arrives."""

from __future__ import annotations

from typing import NamedTuple


class Event(NamedTuple):
    """A client's receipt of a model: which version, and how often the client had received it before."""

    version: int
    repeat: int = 0

    @property
    def number(self) -> int:
        """The part of this event in the keys of draws: a first receipt is known by its version alone."""
        return self.version + (self.repeat << 40)


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
