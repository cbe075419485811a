"""Rounds in step: the server draws a cohort, waits for all of it, and goes on."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from partita import check, draws
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

    order: str

    def begin(self, *, clients: int, cohort: int, first: int, rounds: int, seed: int) -> Turns:
        """For `rounds` server steps from version `first` on."""
        kind = _Rounds if self.order == "random" else _InTurn
        return kind(clients, cohort, first + rounds, seed)


@dataclass(frozen=True)
class _Rounds:
    clients: int
    cohort: int
    end: int
    seed: int

    def done(self, server: ServerState) -> bool:
        return server.version >= self.end

    def choose(self, round: int) -> tuple[int, ...]:
        """Any clients, each at most once."""
        if self.cohort == self.clients:
            return tuple(range(self.clients))
        rng = draws.generator(self.seed, "cohort", round)
        return tuple(rng.choice(self.clients, self.cohort, replace=False, shuffle=False).tolist())

    def next(self, server: ServerState) -> Cohort:
        chosen = self.choose(server.version)
        download = Download(server.shared, server.extra, server.version)
        group = Group(tuple(range(len(chosen))), download)
        return Cohort(chosen, (group,), staleness=(0,) * len(chosen), time=float(server.version + 1))


class _InTurn(_Rounds):
    def choose(self, round: int) -> tuple[int, ...]:
        """The next ones of a random order of all clients; a new order when everyone had a turn."""
        number, place = divmod(round, -(-self.clients // self.cohort))
        order = _order(self.seed, number, self.clients)
        return tuple(order[place * self.cohort : (place + 1) * self.cohort].tolist())


@functools.lru_cache(maxsize=2)
def _order(seed: int, number: int, clients: int) -> np.ndarray:
    return draws.generator(seed, "turns", number).permutation(clients)


def synchronous(order: str = "random") -> Synchronous:
    """Every round a new cohort; the server acts when all of it has reported.

    order="random" draws it without replacement, "turns" lets every client have its turn before any has a
    second one.
    """
    return Synchronous(check.choice("order", order, ("random", "turns")))
