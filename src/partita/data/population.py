"""Who takes part: names and counts of samples, without the samples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from partita.core import check
from partita.data.arrays import IntArray

SPLITS = ("train", "validation", "test")


class Numbered(Sequence[str]):
    """'0', '1', '2', ...: like a tuple of them, but each is made when it is asked for."""

    def __init__(self, count: int) -> None:
        self._numbers = range(count)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[str, ...]: ...
    def __getitem__(self, place: int | slice) -> str | tuple[str, ...]:
        numbers = self._numbers[place]
        return str(numbers) if isinstance(numbers, int) else tuple(map(str, numbers))

    def __contains__(self, name: object) -> bool:
        try:
            return self.index(name) >= 0
        except ValueError:
            return False

    def index(self, name: object, start: int = 0, stop: int | None = None) -> int:
        """Return the place of a name, or raise a ValueError."""
        place = int(name) if isinstance(name, str) and name.isdecimal() and len(name) < 20 else -1
        if place not in self._numbers[start:stop] or str(place) != name:
            raise ValueError(f"{name!r} is not among the names")
        return place

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Numbered):
            return len(self) == len(other)
        if not isinstance(other, tuple):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def client_names(names: Any, clients: int) -> Sequence[str]:
    """Return one name for each client, all different and of whole characters; None: their numbers."""
    if names is None:
        return Numbered(clients)
    allowed = f"{clients} different names, one for each client"
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise check.fail("names", names, allowed)
    texts = tuple(map(str, names))
    if texts == Numbered(clients):
        return Numbered(clients)
    if len(texts) != clients or len(set(texts)) != clients:
        raise check.fail("names", texts, allowed)
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:  # half a character: it could not be written to clients.csv after the run
        broken = next(name for name in texts if name != name.encode(errors="ignore").decode())
        raise check.fail("names", broken, "names of whole characters") from None
    return texts


@dataclass(frozen=True, eq=False)
class Population:
    """Who takes part: the names of all clients, and how many samples each of them has.

    It is all that a server knows of clients whose samples it does not hold.
    """

    names: Sequence[str]
    n_train: IntArray
    n_validation: IntArray
    n_test: IntArray

    @classmethod
    def make(
        cls,
        n_train: Any,
        n_test: Any = None,
        names: Sequence[str] | None = None,
        *,
        n_validation: Any = None,
    ) -> Population:
        """Return a checked population; without counts no client has such samples, `names=None`: numbers."""
        train = _counts("n_train", n_train)
        if len(train) == 0:
            raise check.fail("n_train", n_train, "at least one client")
        others = {"n_validation": n_validation, "n_test": n_test}
        for field, values in others.items():
            others[field] = np.zeros_like(train) if values is None else _counts(field, values)
            if len(others[field]) != len(train):
                raise check.fail(field, values, f"{len(train)} counts, as many as in n_train")
        return cls(client_names(names, len(train)), train, **others)

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.names)

    @property
    def largest(self) -> int:
        """The client with most training samples, the first of several."""
        return int(np.argmax(self.n_train))

    def sizes(self, split: str = "train") -> IntArray:
        """Return how many samples each client has."""
        counts: IntArray = getattr(self, f"n_{check.choice('split', split, SPLITS)}")
        return counts.copy()

    @property
    def digest(self) -> str:
        """16 hexadecimal digits, the same for the same names and counts."""
        counts = [self.sizes(split).tolist() for split in SPLITS]
        return hashlib.sha256(json.dumps([list(self.names), *counts]).encode()).hexdigest()[:16]

    def subset(self, clients: Iterable[int]) -> Population:
        """Return some of the clients, in the order given."""
        chosen = chosen_clients(clients, self.clients)
        names = client_names([self.names[i] for i in chosen], len(chosen))
        return Population(names, self.n_train[chosen], self.n_validation[chosen], self.n_test[chosen])


def chosen_clients(clients: Any, count: int) -> list[int]:
    """Return the numbers of some of `count` clients: at least one, and each once."""
    if not isinstance(clients, Iterable):
        raise check.fail("clients", clients, "a list of clients")
    chosen = [check.integer("clients", i, low=0, high=count - 1) for i in clients]
    if not chosen or len(set(chosen)) != len(chosen):
        raise check.fail("clients", chosen, "at least one client, each once")
    return chosen


def _counts(field: str, values: Any) -> IntArray:
    counts = np.asarray(values)
    if counts.ndim != 1 or (counts.size and (counts.dtype.kind not in "iu" or counts.min() < 0)):
        raise check.fail(field, values, "whole numbers from 0, one for each client")
    return counts.astype(np.int64)
