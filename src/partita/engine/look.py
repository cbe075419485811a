"""A first look at what clients have computed: their metrics, and whether all of it is usable."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from partita.core import tree
from partita.core.device import HostCopy
from partita.core.types import ClientState, Tensors, Upload


class Seen(NamedTuple):
    """What the host knows of some results: `metrics`, and whether nobody's are at fault."""

    metrics: Tensors
    sound: bool


class Look:
    """A look that is on its way: what a device is given later does not hold it up."""

    def __init__(self, uploads: Upload, states: ClientState) -> None:
        self._names = list(uploads.metrics)
        numbers = tree.lengths(uploads, kept(uploads, states))
        self._copy = HostCopy([*uploads.metrics.values(), *numbers])
        self._seen: Seen | None = None

    def read(self) -> Seen:
        """Return what was seen, once it has arrived."""
        if self._seen is None:
            here, n = self._copy.read(), len(self._names)
            self._seen = Seen(dict(zip(self._names, here)), tree.sound(here[n:]))
        return self._seen


class LookAtSome:
    """A look at some of the clients of a look at all."""

    def __init__(self, whole: Look, clients: slice) -> None:
        self._whole, self._clients = whole, clients

    def read(self) -> Seen:
        """Return what was seen of them; whether nobody's results are at fault is of all."""
        seen = self._whole.read()
        return seen._replace(metrics={k: v[self._clients] for k, v in seen.metrics.items()})


def looks_at(uploads: Upload, states: ClientState, sizes: Sequence[int]) -> list[LookAtSome]:
    """Look at the results of many clients at once, for several who each want to know of some of them."""
    ends = list(itertools.accumulate(sizes))
    whole = Look(uploads, states)
    return [LookAtSome(whole, slice(end - size, end)) for size, end in zip(sizes, ends)]


def kept(uploads: Upload, states: ClientState) -> tuple[Tensors, ClientState]:
    """Return what is looked at beside what is sent."""
    return uploads.metrics, states
