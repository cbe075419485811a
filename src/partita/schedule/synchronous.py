"""Rounds in step: the server draws a cohort, waits for all of it, and goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from partita import draws
from partita.types import Cohort, Download, Group, ServerState


class Turns(Protocol):
    """A schedule at work in one stage of a run."""

    def done(self, server: ServerState) -> bool:
        """Whether the stage is over."""
        ...

    def next(self, server: ServerState) -> Cohort:
        """Who reports now, and what each of them had downloaded."""
        ...


class Schedule(Protocol):
    """What a user chooses; `begin` puts it to work."""

    def begin(self, *, clients: int, cohort: int, first: int, rounds: int, seed: int) -> Turns:
        """For `rounds` server steps from version `first` on."""
        ...


@dataclass(frozen=True)
class Synchronous:
    """See `synchronous`."""

    def begin(self, *, clients: int, cohort: int, first: int, rounds: int, seed: int) -> Turns:
        """For `rounds` server steps from version `first` on."""
        return _Rounds(clients, cohort, first + rounds, seed)


@dataclass(frozen=True)
class _Rounds:
    clients: int
    cohort: int
    end: int
    seed: int

    def done(self, server: ServerState) -> bool:
        return server.version >= self.end

    def next(self, server: ServerState) -> Cohort:
        if self.cohort == self.clients:
            chosen = tuple(range(self.clients))
        else:
            rng = draws.generator(self.seed, "cohort", server.version)
            chosen = tuple(rng.choice(self.clients, self.cohort, replace=False, shuffle=False).tolist())
        download = Download(server.shared, server.extra, server.version)
        group = Group(tuple(range(len(chosen))), download)
        return Cohort(chosen, (group,), staleness=(0,) * len(chosen), time=float(server.version + 1))


def synchronous() -> Synchronous:
    """Every round a new cohort, drawn without replacement; the server acts when all of it has reported."""
    return Synchronous()
