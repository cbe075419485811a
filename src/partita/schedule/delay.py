"""How long things take on the virtual clock: downloads, local steps, uploads.

A delay is a quantile function Q of a uniform number u, which is drawn by (seed, purpose, event, client); so a
client's delays depend on nobody else, and come back when a run is resumed.

    constant      Q(u) = value
    uniform       Q(u) = low + u (high − low)
    exponential   Q(u) = −mean ln(1 − u)
    lognormal     Q(u) = median exp(σ Φ⁻¹(u))
    gamma         Q(u) = (mean / shape) P⁻¹(shape, u)       P: the regularized incomplete gamma function
    trace         the value at place ⌊u n⌋ of n recorded ones
    scaled        c_i Q(u), with a factor c_i of each client: drawn once, given, or that of its class
"""

from __future__ import annotations

import csv
import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, Protocol

from partita.core import check, draws
from partita.core.options import Option, checked

LONGEST = 1e12
"""Longer delays would not add up."""


class Delay(Protocol):
    """A random length of time, or a factor of one."""

    def at(self, seed: int, purpose: str, event: int, client: int) -> float:
        """What this client has to wait for this purpose in this event."""
        ...

    def check(self, clients: int, field: str) -> None:
        """A ValueError that names the field if it does not fit so many clients."""
        ...


class _Quantiles:
    """A delay with the same distribution for all clients."""

    def quantile(self, u: float) -> float:
        raise NotImplementedError

    def at(self, seed: int, purpose: str, event: int, client: int) -> float:
        return self.quantile(draws.number(seed, purpose, event, client))

    def check(self, clients: int, field: str) -> None:
        """Fits any number."""


@dataclass(frozen=True)
class Constant(_Quantiles):
    """See `constant`."""

    value: float

    def at(self, seed: int, purpose: str, event: int, client: int) -> float:  # noqa: ARG002
        """Always the same."""
        return self.value


@dataclass(frozen=True)
class Uniform(_Quantiles):
    """See `uniform`."""

    low: float
    high: float

    def quantile(self, u: float) -> float:
        """low + u (high − low)."""
        return self.low + u * (self.high - self.low)


@dataclass(frozen=True)
class Exponential(_Quantiles):
    """See `exponential`."""

    mean: float

    def quantile(self, u: float) -> float:
        """−mean ln(1 − u)."""
        return -self.mean * math.log1p(-u)


@dataclass(frozen=True)
class Lognormal(_Quantiles):
    """See `lognormal`."""

    median: float
    sigma: float

    def quantile(self, u: float) -> float:
        """median exp(σ Φ⁻¹(u))."""
        return self.median * math.exp(self.sigma * NormalDist().inv_cdf(u))


@dataclass(frozen=True)
class Gamma(_Quantiles):
    """See `gamma`."""

    mean: float
    shape: float

    def quantile(self, u: float) -> float:
        """(mean / shape) P⁻¹(shape, u)."""
        from scipy.special import gammaincinv

        return self.mean / self.shape * float(gammaincinv(self.shape, u))


@dataclass(frozen=True)
class Trace:
    """See `trace`. What was recorded is known by its digest; it is not written down again."""

    path: str
    digest: str

    def at(self, seed: int, purpose: str, event: int, client: int) -> float:
        """Any of the values recorded for the device that this client has."""
        devices = _recorded(self.path, self.digest)
        mine = devices[int(draws.number(seed, "device", client) * len(devices))]
        return mine[int(draws.number(seed, purpose, event, client) * len(mine))]

    def check(self, clients: int, field: str) -> None:
        """Fits any number."""


@dataclass(frozen=True)
class Classes:
    """See `classes`."""

    shares: tuple[tuple[float, float], ...]

    def at(self, seed: int, purpose: str, event: int, client: int) -> float:  # noqa: ARG002
        """The factor of the class that the client's number falls into, the same in every event."""
        u = draws.number(seed, purpose, 0, client)
        for share, factor in self.shares:
            if u < share:
                return factor
            u -= share
        return self.shares[-1][1]

    def check(self, clients: int, field: str) -> None:
        """Fits any number."""


@dataclass(frozen=True)
class Listed:
    """One number for each client."""

    values: tuple[float, ...]

    def at(self, seed: int, purpose: str, event: int, client: int) -> float:  # noqa: ARG002
        """The client's own."""
        return self.values[client]

    def check(self, clients: int, field: str) -> None:
        """One for each."""
        if len(self.values) != clients:
            raise check.fail(field, self.values, f"one number for each of the {clients} clients")


@dataclass(frozen=True)
class Scaled:
    """See `scaled`."""

    of: Delay
    factor: Delay

    def at(self, seed: int, purpose: str, event: int, client: int) -> float:
        """The client's factor, the same in every event, times a new draw."""
        mine = self.factor.at(seed, f"{purpose} factor", 0, client)
        return mine * self.of.at(seed, purpose, event, client)

    def check(self, clients: int, field: str) -> None:
        """Both must fit."""
        self.of.check(clients, field)
        self.factor.check(clients, f"{field} factor")


# ---- what options take

DELAY = "a number from 0, one for each client, or a delay such as partita.schedule.exponential(2.0)"
DELAYS = "partita.schedule.delays(download=..., upload=...)"
DROPOUT = "a number from 0 and below 1, or one for each client"
PAIRS = "pairs (share, factor) such as [(0.9, 1), (0.1, 10)] whose shares sum to 1"


def as_delay(field: str, value: Any) -> Delay:
    """A number is a constant, numbers are the clients' own."""
    value = _plain(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Constant(_length(field, value))
    if isinstance(value, list | tuple):
        return Listed(tuple(_length(field, x) for x in value))
    if isinstance(value, type) or not all(callable(getattr(value, k, None)) for k in ("at", "check")):
        raise check.fail(field, value, DELAY)
    found: Delay = value
    return found


def as_delays(field: str, value: Any) -> Delays:
    """The delays of a schedule; None: each turn takes one unit of time."""
    if value is None:
        return NoDelays()
    if not isinstance(value, Delays):
        raise check.fail(field, value, DELAYS)
    return value


def _plain(value: Any) -> Any:
    """Arrays and tensors as lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _length(field: str, value: Any) -> float:
    return check.number(field, value, low=0, high=LONGEST)


def _pairs(field: str, value: Any) -> tuple[tuple[float, float], ...]:
    try:
        found = tuple((_length(field, share), _length(field, factor)) for share, factor in _plain(value))
    except (TypeError, ValueError):
        raise check.fail(field, value, PAIRS) from None
    if not math.isclose(sum(share for share, _ in found), 1.0):
        raise check.fail(field, value, PAIRS)
    return found


def _dropout(field: str, value: Any) -> float | tuple[float, ...]:
    """Below 1: a client that never reports would be waited for without end."""
    several = isinstance(_plain(value), list | tuple)
    try:
        found = tuple(check.number(field, x, low=0, high=1) for x in (_plain(value) if several else [value]))
    except ValueError:
        raise check.fail(field, value, DROPOUT) from None
    if 1.0 in found:
        raise check.fail(field, value, DROPOUT)
    return found if several else found[0]


def _takes(text: str, example: Any = None) -> Option:
    return Option(text, allowed=DELAY, check=as_delay, example=example)


# ---- delays

delay = checked("delay ")
Mean = Annotated[float, Option("the mean", low=0, high=LONGEST, example=1.0)]


@delay
def constant(value: Annotated[float, Option("the delay", low=0, high=LONGEST, example=1.0)]) -> Constant:
    """Always the same."""
    return Constant(value)


@delay
def uniform(
    low: Annotated[float, Option("the shortest", low=0, high=LONGEST, example=0.5)],
    high: Annotated[float, Option("the longest", low=0, high=LONGEST, example=1.5)],
) -> Uniform:
    """Anything between two lengths, equally likely."""
    if high < low:
        raise check.fail("delay high", high, f"a number from low={low:g}")
    return Uniform(low, high)


@delay
def exponential(mean: Mean) -> Exponential:
    """Memoryless: however long one has waited, as much again is to be expected."""
    return Exponential(mean)


@delay
def lognormal(
    median: Annotated[float, Option("half of the delays are shorter", low=0, high=LONGEST, example=1.0)],
    sigma: Annotated[float, Option("σ, the spread of the logarithm", low=0, high=10)] = 0.5,
) -> Lognormal:
    """A heavy tail, as measured on real networks and phones."""
    return Lognormal(median, sigma)


@delay
def gamma(
    mean: Mean,
    shape: Annotated[float, Option("1 is exponential, larger is more regular", low=0.01, high=1e6)] = 2.0,
) -> Gamma:
    """The sum of `shape` exponential delays."""
    return Gamma(mean, shape)


@delay
def trace(path: Annotated[str | Path, Option("the file", example="delays.csv")]) -> Trace:
    """Recorded delays, drawn again: a file with one number in each line, or `device,delay`.

    With devices, each client is one of them, drawn once, and waits as long as that one did. The first line
    may be a heading.
    """
    digest = _digest(str(path))
    _recorded(str(path), digest)
    return Trace(str(path), digest)


@delay
def classes(
    shares: Annotated[
        Sequence[tuple[float, float]],
        Option(
            "which share of the clients has which factor",
            allowed=PAIRS,
            check=_pairs,
            example=[(0.9, 1.0), (0.1, 10.0)],
        ),
    ],
) -> Classes:
    """Speed classes: each client belongs to one, drawn once; 10 is ten times slower than 1."""
    return Classes(tuple(shares))


@delay
def scaled(
    of: Annotated[object, _takes("the delay", example=1.0)],
    factor: Annotated[
        object,
        _takes("of each client: one for each, classes(...), or a delay that it is drawn from once", 2.0),
    ],
) -> Scaled:
    """A delay whose length is each client's own: its factor, the same in every event, times a new draw."""
    return Scaled(as_delay("delay of", of), as_delay("delay factor", factor))


# ---- all delays of a turn


@dataclass(frozen=True)
class Delays:
    """See `delays`."""

    download: Delay
    compute: Delay
    upload: Delay
    speed: Delay
    dropout: float | tuple[float, ...]

    def length(self, seed: int, event: int, client: int, steps: int) -> float:
        """From a client's request to the arrival of its upload."""
        down = self.download.at(seed, "download", event, client)
        up = self.upload.at(seed, "upload", event, client)
        return down + up + (self._compute(seed, event, client) * steps if self.computes else 0.0)

    def _compute(self, seed: int, event: int, client: int) -> float:
        speed = self.speed.at(seed, "speed", 0, client)
        return speed * self.compute.at(seed, "compute", event, client)

    def lost(self, seed: int, event: int, client: int) -> bool:
        """Whether this upload never arrives."""
        chance = self.dropout if isinstance(self.dropout, float) else self.dropout[client]
        return chance > 0 and draws.number(seed, "dropout", event, client) < chance

    @functools.cached_property
    def fixed(self) -> float | None:
        """How long every turn takes, if all take the same time and all uploads arrive."""
        down, up = self.download, self.upload
        if (
            self.computes
            or self.dropout != 0.0
            or not (isinstance(down, Constant) and isinstance(up, Constant))
        ):
            return None
        return down.value + up.value

    @functools.cached_property
    def computes(self) -> bool:
        """Whether local steps take time."""
        return self.compute != Constant(0.0)

    def check(self, clients: int) -> None:
        """A ValueError if something was given for another number of clients."""
        for name in ("download", "compute", "upload", "speed"):
            part: Delay = getattr(self, name)
            part.check(clients, f"delays {name}")
        if isinstance(self.dropout, tuple) and len(self.dropout) != clients:
            raise check.fail("delays dropout", self.dropout, f"one for each of the {clients} clients")


@dataclass(frozen=True)
class NoDelays(Delays):
    """Every round takes one unit of time."""

    download: Delay = Constant(0.0)
    compute: Delay = Constant(0.0)
    upload: Delay = Constant(1.0)
    speed: Delay = Constant(1.0)
    dropout: float | tuple[float, ...] = 0.0


@checked("delays ")
def delays(
    download: Annotated[object, _takes("from a client's request to the beginning of its work")] = 0.0,
    upload: Annotated[object, _takes("from the end of its work to the arrival of what it sends")] = 0.0,
    compute: Annotated[object, _takes("for one local step")] = 0.0,
    speed: Annotated[
        object, _takes("a factor of compute that each client keeps, such as classes([(0.9, 1), (0.1, 10)])")
    ] = 1.0,
    dropout: Annotated[
        object, Option("the probability that an upload never arrives", allowed=DROPOUT, check=_dropout)
    ] = 0.0,
) -> Delays:
    """What a client's turn takes on the virtual clock: download + compute · speed · steps + upload.

    A number is the same for everyone; `exponential(2.0)` and its kin are drawn anew for each turn;
    `scaled(...)` differs between clients.
    """
    down, step, up, factor = (as_delay("delays", x) for x in (download, compute, upload, speed))
    if step == Constant(0.0) and factor != Constant(1.0):
        shown = factor.value if isinstance(factor, Constant) else factor
        raise check.fail("delays speed", shown, "1 without compute=: it is a factor of what a step takes")
    return Delays(down, step, up, factor, _dropout("delays dropout", dropout))


# ---- recorded delays


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # spreadsheets may begin a file with a mark
    except (OSError, ValueError) as error:
        raise check.fail("delay path", path, f"a readable file ({error})") from None


def _digest(path: str) -> str:
    return hashlib.sha256(_text(path).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=16)
def _recorded(path: str, digest: str) -> tuple[tuple[float, ...], ...]:
    """The values of a file by device; one device if it names none."""
    if _digest(path) != digest:
        raise check.fail("delay path", path, "the file as it was when the run began")
    devices: dict[str, list[float]] = {}
    columns = 0
    for number, row in _rows(path):
        columns = columns or len(row)
        if len(row) > 2 or len(row) != columns:
            raise check.fail("delay path", path, f"one delay, or device,delay, in every line (line {number})")
        device = row[0].strip() if columns == 2 else ""
        devices.setdefault(device, []).append(_value(path, number, row[-1]))
    if not devices:
        raise check.fail("delay path", path, "a file with at least one number")
    return tuple(tuple(values) for values in devices.values())


def _rows(path: str) -> Iterator[tuple[int, list[str]]]:
    """The lines that say something, with their numbers, but for a heading."""
    lines = enumerate(csv.reader(_text(path).splitlines()), start=1)
    said = [(number, row) for number, row in lines if any(cell.strip() for cell in row)]
    yield from said[1:] if said and not _is_number(said[0][1][-1]) else said


def _value(path: str, number: int, text: str) -> float:
    value = float(text) if _is_number(text) else math.nan
    if not 0 <= value <= LONGEST:
        raise check.fail("delay path", path, f"delays that are numbers from 0 (line {number}: {text!r})")
    return value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
