"""Which clients are there: those who are idle, and available where that is limited."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from partita.core import draws
from partita.schedule.available import Availability

TRIES = 8
"""Idle clients that are tried for each one that is wanted, before all are asked whether they are there."""


class Turn(Protocol):
    """A client at work until some time."""

    @property
    def client(self) -> int: ...

    @property
    def end(self) -> float: ...


T = TypeVar("T", bound=Turn)


def idle_clients(clients: int, busy: Sequence[int]) -> NDArray[np.int64]:
    """Return all clients that are not busy, in order."""
    return np.delete(np.arange(clients), busy)


@dataclass(frozen=True)
class Presence:
    """The clients of a run, of whom some are away now and then."""

    available: Availability
    seed: int
    clients: int

    def idle(
        self, count: int, draw: int, busy: Sequence[int], place: Callable[[int], int], now: float
    ) -> list[int]:
        """Return so many idle clients that are there, or all, each with the same probability.

        Some are tried first, by their places among those that are idle, and all if too few of them are there.
        """
        rng, tries, idle = draws.generator(self.seed, "cohort", draw), TRIES * count, self.clients - len(busy)
        if tries < idle:
            tried = [place(i) for i in rng.choice(idle, tries, replace=False).tolist()]
            first: list[int] = self.there(np.array(tried), now)[:count].tolist()
            if len(first) == count:
                return first
        everyone = self.there(idle_clients(self.clients, busy), now)
        drawn = rng.choice(everyone, count, replace=False) if len(everyone) > count else everyone
        chosen: list[int] = drawn.tolist()
        return chosen

    def there(self, clients: NDArray[np.int64], now: float) -> NDArray[np.int64]:
        """Return those of these clients that are available."""
        return clients[self._opens(clients, now) <= now]

    def opening(self, busy: Sequence[int], now: float) -> float:
        """Return when to look again for idle clients that are away now; infinity if none ever comes."""
        opens = self._opens(idle_clients(self.clients, busy), now)
        return float(opens[opens > now].min(initial=np.inf))

    def is_over(self, now: float) -> bool:
        """Return whether nobody will ever be available again; a few tell it, if somebody will."""
        few, everyone = min(TRIES, self.clients), self.clients
        return all(bool(np.isinf(self._opens(np.arange(n), now)).all()) for n in (few, everyone))

    def outlasted(self, turns: Sequence[T], now: float) -> list[bool]:
        """Return for each turn that begins now whether it outlasts the window of its client."""
        clients = np.array([turn.client for turn in turns], dtype=np.int64)
        closes = self.available.closes(self.seed, clients, now).tolist()
        return [turn.end > close for turn, close in zip(turns, closes)]

    def _opens(self, clients: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        return self.available.opens(self.seed, clients, now)
