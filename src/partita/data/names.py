"""The names of clients; where they are only counted, none of them is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

from partita.core import check


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
        found = self._numbers[place]
        return str(found) if isinstance(found, int) else tuple(map(str, found))

    def __contains__(self, name: object) -> bool:
        try:
            return self.index(name) >= 0
        except ValueError:
            return False

    def index(self, name: object, start: int = 0, stop: int | None = None) -> int:
        """The place of a name; a ValueError if there is none."""
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


def checked(names: Any, clients: int) -> Sequence[str]:
    """One for each client, all different and of whole characters; None: their numbers."""
    if names is None:
        return Numbered(clients)
    allowed = f"{clients} different names, one for each client"
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise check.fail("names", names, allowed)
    found = tuple(map(str, names))
    if found == Numbered(clients):
        return Numbered(clients)
    if len(found) != clients or len(set(found)) != clients:
        raise check.fail("names", found, allowed)
    try:
        "".join(found).encode()
    except UnicodeEncodeError:  # half a character: it could not be written to clients.csv after the run
        broken = next(name for name in found if name != name.encode(errors="ignore").decode())
        raise check.fail("names", broken, "names of whole characters") from None
    return found
