"""When clients are available on the virtual clock: only then can they be chosen.

day_night      available in [φ_i + k T, φ_i + (k + s) T) for k = 0, ±1, ...    T: period, s: share, φ_i: phase
intermittent   in each slot of time with probability s, independently
windows        in recorded windows, of each client or of the device that it is drawn to be
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from partita.core import check, draws
from partita.core.options import Option, checked
from partita.schedule import recorded
from partita.schedule.delay import LONGEST

ALLOWED_AVAILABILITY = "an availability such as partita.schedule.day_night(period=24.0, share=0.5)"
ALLOWED_SHARE = "a number from 0.001 up to 1, or one from 0 up to 1 for each client"
ALLOWED_PHASE = "a number, or one for each client"
ALLOWED_WINDOWS = (
    "a list of pairs (from, until) for each client, from before until, or a file with lines device,from,until"
)
UNFINISHED = ("finish", "lost")
LEAST_SHARE = 0.001
Clients = NDArray[np.int64]
Times = NDArray[np.float64]
Devices = tuple[tuple[tuple[float, float], ...], ...]


class Availability(Protocol):
    """When clients are available; every answer is a function of its arguments alone."""

    def opens(self, seed: int, clients: Clients, time: float) -> Times:
        """Return `time` for each of these clients that is available, else when to look at it again.

        Before then it is away for sure; infinity if it never comes again.
        """
        ...

    def closes(self, seed: int, clients: Clients, time: float) -> Times:
        """Return by when each of these available clients must have finished a turn that begins now."""
        ...

    def check(self, clients: int, field: str) -> None:
        """Raise a ValueError that names the field if it does not fit so many clients."""
        ...


def as_availability(field: str, value: Any) -> Availability:
    """Return an availability: an object with the three methods."""
    methods = ("opens", "closes", "check")
    if isinstance(value, type) or not all(callable(getattr(value, k, None)) for k in methods):
        raise check.fail(field, value, ALLOWED_AVAILABILITY)
    availability: Availability = value
    return availability


def _each(low: float, high: float, least: float, allowed: str) -> Any:
    """Return the check of a number from `least` on, or of numbers from `low` on, one for each client."""

    def checked_numbers(field: str, value: Any) -> float | tuple[float, ...]:
        value = value.tolist() if hasattr(value, "tolist") else value
        try:
            if isinstance(value, list | tuple):
                return tuple(check.number(field, x, low=low, high=high) for x in value)
            return check.number(field, value, low=least, high=high)
        except check.Refused:
            raise check.fail(field, value, allowed) from None

    return checked_numbers


def _given(field: str, value: Any) -> str | Devices:
    """Return the path of a file as a text, and pairs of numbers for each client as tuples."""
    if isinstance(value, str | Path):
        return str(value)
    try:
        number = functools.partial(check.number, field, low=0, high=LONGEST)
        return tuple(tuple((number(a), number(b)) for a, b in client) for client in value)
    except (TypeError, ValueError):
        raise check.fail(field, value, ALLOWED_WINDOWS) from None


Unfinished = Annotated[
    str,
    Option(
        "what becomes of a turn that outlasts the client's window: its upload arrives, or is lost",
        choices=UNFINISHED,
    ),
]
Share = Annotated[
    Any,
    Option(
        "the share of time that a client is available, or one for each client",
        allowed=ALLOWED_SHARE,
        check=_each(0.0, 1.0, LEAST_SHARE, ALLOWED_SHARE),
    ),
]


def _of(value: float | tuple[float, ...], clients: Clients) -> Times:
    """Return the number of each of these clients."""
    return np.full(len(clients), value) if isinstance(value, float) else np.asarray(value)[clients]


def _fits(field: str, value: Any, clients: int) -> None:
    if isinstance(value, tuple) and len(value) != clients:
        raise check.fail(field, value, f"one for each of the {clients} clients")


def _cycle(time: float, phase: Times | float, period: float) -> Times:
    """Return the last k with phase + k period <= time, as these sums are rounded."""
    k = np.floor((time - phase) / period)
    k = k + (phase + (k + 1) * period <= time)
    cycle: Times = k - (phase + k * period > time)
    return cycle


@checked("day_night ")
@dataclass(frozen=True)
class DayNight:
    """Each client is available for a share of every period, at its own time of the day.

    Use it for devices that take part when they are charged and idle, such as phones at night.
    """

    period: Annotated[float, Option("the length of a day", low=0, high=LONGEST, open_low=True)] = 24.0
    share: Share = 0.5
    phase: Annotated[
        Any | None,
        Option(
            "when a client's day begins, or one for each client (None: drawn for each client, uniformly)",
            allowed=ALLOWED_PHASE,
            check=_each(-LONGEST, LONGEST, -LONGEST, ALLOWED_PHASE),
        ),
    ] = None
    unfinished: Unfinished = "finish"

    def opens(self, seed: int, clients: Clients, time: float) -> Times:
        phase, share = self._phase(seed, clients), _of(self.share, clients)
        k = _cycle(time, phase, self.period)
        now = (time < phase + k * self.period + share * self.period) | (share == 1.0)
        later = np.where(share > 0, phase + (k + 1) * self.period, np.inf)
        return np.where(now, time, later)

    def closes(self, seed: int, clients: Clients, time: float) -> Times:
        phase, share = self._phase(seed, clients), _of(self.share, clients)
        end = phase + _cycle(time, phase, self.period) * self.period + share * self.period
        return np.where((share == 1.0) | (self.unfinished == "finish"), np.inf, end)

    def check(self, clients: int, field: str) -> None:
        _fits(f"{field} share", self.share, clients)
        _fits(f"{field} phase", self.phase, clients)

    def _phase(self, seed: int, clients: Clients) -> Times:
        if self.phase is None:
            return draws.numbers(seed, "phase", clients) * self.period
        return _of(self.phase, clients)


@checked("intermittent ")
@dataclass(frozen=True)
class Intermittent:
    """In each slot of time, each client is available with this probability, whatever was before.

    Use it for clients that come and go by chance.
    """

    share: Share = 0.5
    slot: Annotated[float, Option("how long a slot is", low=0, high=LONGEST, open_low=True)] = 1.0
    unfinished: Unfinished = "finish"

    def opens(self, seed: int, clients: Clients, time: float) -> Times:
        slot, share = int(_cycle(time, 0.0, self.slot)), _of(self.share, clients)
        later = np.where(share > 0, (slot + 1) * self.slot, np.inf)
        return np.where(self._there(seed, clients, slot), time, later)

    def closes(self, seed: int, clients: Clients, time: float) -> Times:
        end = np.full(len(clients), np.inf)
        if self.unfinished == "finish":
            return end
        left, slot = np.flatnonzero(_of(self.share, clients) < 1), int(_cycle(time, 0.0, self.slot))
        while len(left):  # until the first slot in which each is away
            there = self._there(seed, clients[left], slot)
            end[left[~there]] = slot * self.slot
            left, slot = left[there], slot + 1
        return end

    def check(self, clients: int, field: str) -> None:
        _fits(f"{field} share", self.share, clients)

    def _there(self, seed: int, clients: Clients, slot: int) -> NDArray[np.bool_]:
        there: NDArray[np.bool_] = draws.numbers(seed, "slot", slot, clients) < _of(self.share, clients)
        return there


@checked("windows ")
@dataclass(frozen=True)
class Windows:
    """Recorded windows: given for each client, or read from a file with lines `device,from,until`.

    With a file, each client is one of its devices, drawn once. The first line may be a heading. A run notes
    the digest of the file, and refuses to go on with another one.

    Use it for traces of real devices.
    """

    given: Annotated[
        Any,
        Option(
            "pairs (from, until) for each client, or the path of a file",
            allowed=ALLOWED_WINDOWS,
            check=_given,
            example="windows.csv",
        ),
    ]
    period: Annotated[
        float | None,
        Option("all windows come again after this time (None: never)", low=0, high=LONGEST, open_low=True),
    ] = None
    unfinished: Unfinished = "finish"
    digest: str = field(init=False, default="")

    def __post_init__(self) -> None:
        if isinstance(self.given, str):
            object.__setattr__(self, "digest", recorded.digest("windows given", self.given))
        most = math.inf if self.period is None else self.period
        for begin, end in itertools.chain.from_iterable(self._devices):
            if not (0 <= begin < min(end, most) and end - begin <= most):
                inside = "" if self.period is None else f", beginning and lasting less than {self.period:g}"
                raise check.fail("windows given", (begin, end), f"windows (from, until){inside}")

    @functools.cached_property
    def _devices(self) -> Devices:
        """The windows of each client, or of each device of the file."""
        return _read(self.given) if self.digest else self.given

    @functools.cached_property
    def _table(self) -> tuple[Times, Times]:
        """When the windows of each device begin and end, in order and merged where they touch.

        With a period, those of the cycle before and of the next one are beside those of a cycle; all rows end
        with a window that never comes.
        """
        rows = [_merged(device, self.period) for device in self._devices]
        table = np.full((len(rows), max(map(len, rows), default=0) + 1, 2), np.inf)
        for row, device in zip(table, rows):
            row[: len(device)] = np.reshape(device, (-1, 2))
        return table[..., 0], table[..., 1]

    def opens(self, seed: int, clients: Clients, time: float) -> Times:
        begin, _ = self._window(seed, clients, time)
        return np.maximum(begin, time)

    def closes(self, seed: int, clients: Clients, time: float) -> Times:
        if self.unfinished == "finish":
            return np.full(len(clients), np.inf)
        return self._window(seed, clients, time)[1]

    def check(self, clients: int, field: str) -> None:
        if not self.digest and len(self.given) != clients:
            raise check.fail(f"{field} given", self.given, f"windows for each of the {clients} clients")

    def _window(self, seed: int, clients: Clients, time: float) -> tuple[Times, Times]:
        """Return the window that each client is in, or its next one: infinite where there is none."""
        begins, ends = self._table
        device = clients
        if self.digest:
            device = (draws.numbers(seed, "device", clients) * len(begins)).astype(np.int64)
        wanted, place = np.unique(device, return_inverse=True)
        start = 0.0 if self.period is None else float(_cycle(time, 0.0, self.period)) * self.period
        first = (start + ends[wanted] <= time).sum(axis=1)[:, None]  # windows that are over
        begin, end = (np.take_along_axis(x[wanted], first, axis=1)[:, 0] for x in (begins, ends))
        return start + begin[place], start + end[place]


day_night, intermittent, windows = DayNight, Intermittent, Windows


# ---- recorded windows


def _read(path: str) -> Devices:
    """Return the windows of each device of a file."""
    devices: dict[str, list[tuple[float, float]]] = {}
    for number, row in recorded.rows("windows given", path):
        try:
            device, begin, end = (cell.strip() for cell in row)
            devices.setdefault(device, []).append((float(begin), float(end)))
        except ValueError:
            wrong = f"lines device,from,until (line {number}: {','.join(row)!r})"
            raise check.fail("windows given", path, wrong) from None
    if not devices:
        raise check.fail("windows given", path, "a file with at least one window")
    return tuple(map(tuple, devices.values()))


def _merged(device: Sequence[tuple[float, float]], period: float | None) -> list[tuple[float, float]]:
    shifts = (0.0,) if period is None else (-period, 0.0, period)
    merged: list[tuple[float, float]] = []
    for begin, end in sorted((a + by, b + by) for a, b in device for by in shifts):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    if period is not None and any(end - begin >= period for begin, end in merged):
        return [(-math.inf, math.inf)]  # all the time
    return merged
