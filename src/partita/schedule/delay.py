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

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, Protocol

from partita.core import check, draws
from partita.core.options import Option, checked
from partita.schedule import recorded

LONGEST = 1e12
"""The longest delay: sums of longer ones would lose their fractions."""

ALLOWED_DELAY = "a number from 0, one for each client, or a delay such as partita.schedule.exponential(2.0)"
ALLOWED_DELAYS = "partita.schedule.delays(download=..., upload=...)"
ALLOWED_DROPOUT = "a number from 0 and below 1, or one for each client"
ALLOWED_SHARES = "pairs (share, factor) such as [(0.9, 1), (0.1, 10)] whose shares sum to 1"


class Delay(Protocol):
    """A random length of time, or a factor of one."""

    def at(self, seed: int, purpose: str, event: int, client: int) -> float:
        """Return what this client has to wait for this purpose in this event."""
        ...

    def check(self, clients: int, field: str) -> None:
        """Raise a ValueError that names the field if the delay does not fit so many clients."""
        ...


# ---- what options take


def as_delay(field: str, value: Any) -> Delay:
    """Return a number as a constant, numbers as one for each client, and a delay as it is."""
    value = _plain(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Constant(_length(field, value))
    if isinstance(value, list | tuple):
        return Listed(tuple(_length(field, x) for x in value))
    if isinstance(value, type) or not all(callable(getattr(value, k, None)) for k in ("at", "check")):
        raise check.fail(field, value, ALLOWED_DELAY)
    delay: Delay = value
    return delay


def _plain(value: Any) -> Any:
    """Return arrays and tensors as lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _length(field: str, value: Any) -> float:
    return check.number(field, value, low=0, high=LONGEST)


def _shares(field: str, value: Any) -> tuple[tuple[float, float], ...]:
    try:
        pairs = tuple((_length(field, share), _length(field, factor)) for share, factor in _plain(value))
    except (TypeError, ValueError):
        raise check.fail(field, value, ALLOWED_SHARES) from None
    if not math.isclose(sum(share for share, _ in pairs), 1.0):
        raise check.fail(field, value, ALLOWED_SHARES)
    return pairs


def _dropout(field: str, value: Any) -> float | tuple[float, ...]:
    """Return probabilities below 1: a client that never reports would be waited for without end."""
    value = _plain(value)
    each = value if isinstance(value, list | tuple) else [value]
    try:
        chances = tuple(check.number(field, x, low=0, high=1) for x in each)
    except ValueError:
        raise check.fail(field, value, ALLOWED_DROPOUT) from None
    if 1.0 in chances:
        raise check.fail(field, value, ALLOWED_DROPOUT)
    return chances if each is value else chances[0]


def _delay(text: str, example: Any = None) -> Option:
    return Option(text, allowed=ALLOWED_DELAY, check=as_delay, example=example)


# ---- delays

Mean = Annotated[float, Option("the mean", low=0, high=LONGEST, example=1.0)]


class _Drawn:
    """A delay that is drawn anew in each event, and fits any number of clients."""

    def quantile(self, u: float) -> float:
        raise NotImplementedError

    def at(self, seed: int, purpose: str, event: int, client: int) -> float:
        return self.quantile(draws.number(seed, purpose, event, client))

    def check(self, clients: int, field: str) -> None:
        """Accept any number of clients."""


@checked("delay ")
@dataclass(frozen=True)
class Constant(_Drawn):
    """Always the same."""

    value: Annotated[float, Option("the delay", low=0, high=LONGEST, example=1.0)]

    def at(self, seed: int, purpose: str, event: int, client: int) -> float:  # noqa: ARG002
        return self.value


@checked("delay ")
@dataclass(frozen=True)
class Uniform(_Drawn):
    """Anything between two lengths, equally likely."""

    low: Annotated[float, Option("the shortest", low=0, high=LONGEST, example=0.5)]
    high: Annotated[float, Option("the longest", low=0, high=LONGEST, example=1.5)]

    def __post_init__(self) -> None:
        if self.high < self.low:
            raise check.fail("delay high", self.high, f"a number from low={self.low:g}")

    def quantile(self, u: float) -> float:
        return self.low + u * (self.high - self.low)


@checked("delay ")
@dataclass(frozen=True)
class Exponential(_Drawn):
    """Memoryless: however long one has waited, as much again is to be expected."""

    mean: Mean

    def quantile(self, u: float) -> float:
        return -self.mean * math.log1p(-u)


@checked("delay ")
@dataclass(frozen=True)
class Lognormal(_Drawn):
    """A heavy tail, as measured on real networks and phones."""

    median: Annotated[float, Option("half of the delays are shorter", low=0, high=LONGEST, example=1.0)]
    sigma: Annotated[float, Option("σ, the spread of the logarithm", low=0, high=10)] = 0.5

    def quantile(self, u: float) -> float:
        return self.median * math.exp(self.sigma * NormalDist().inv_cdf(u))


@checked("delay ")
@dataclass(frozen=True)
class Gamma(_Drawn):
    """The sum of `shape` exponential delays."""

    mean: Mean
    shape: Annotated[float, Option("1 is exponential, larger is more regular", low=0.01, high=1e6)] = 2.0

    def quantile(self, u: float) -> float:
        from scipy.special import gammaincinv

        return self.mean / self.shape * float(gammaincinv(self.shape, u))


@checked("delay ")
@dataclass(frozen=True)
class Trace(_Drawn):
    """Recorded delays, drawn again: a file with one number in each line, or `device,delay`.

    With devices, each client is one of them, drawn once, and waits as long as that one did. The first line
    may be a heading. A run notes the digest of the file, and refuses to go on with another one.
    """

    path: Annotated[str | Path, Option("the file", example="delays.csv")]
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", str(self.path))
        object.__setattr__(self, "digest", recorded.digest("delay path", str(self.path)))
        _recorded(str(self.path), self.digest)

    def at(self, seed: int, purpose: str, event: int, client: int) -> float:
        devices = _recorded(str(self.path), self.digest)
        lengths = devices[int(draws.number(seed, "device", client) * len(devices))]
        return lengths[int(draws.number(seed, purpose, event, client) * len(lengths))]


@checked("delay ")
@dataclass(frozen=True)
class Classes(_Drawn):
    """Speed classes: each client belongs to one, drawn once; 10 is ten times slower than 1."""

    shares: Annotated[
        Sequence[tuple[float, float]],
        Option(
            "which share of the clients has which factor",
            allowed=ALLOWED_SHARES,
            check=_shares,
            example=[(0.9, 1.0), (0.1, 10.0)],
        ),
    ]

    def at(self, seed: int, purpose: str, event: int, client: int) -> float:  # noqa: ARG002
        u = draws.number(seed, purpose, 0, client)  # the same in every event
        for share, factor in self.shares:
            if u < share:
                return factor
            u -= share
        return self.shares[-1][1]


@dataclass(frozen=True)
class Listed:
    """One number for each client."""

    values: tuple[float, ...]

    def at(self, seed: int, purpose: str, event: int, client: int) -> float:  # noqa: ARG002
        return self.values[client]

    def check(self, clients: int, field: str) -> None:
        if len(self.values) != clients:
            raise check.fail(field, self.values, f"one number for each of the {clients} clients")


@checked("delay ")
@dataclass(frozen=True)
class Scaled:
    """A delay whose length is each client's own: its factor, the same in every event, times a new draw."""

    of: Annotated[Any, _delay("the delay", example=1.0)]
    factor: Annotated[
        Any,
        _delay("of each client: one for each, classes(...), or a delay that it is drawn from once", 2.0),
    ]

    def at(self, seed: int, purpose: str, event: int, client: int) -> float:
        factor: float = self.factor.at(seed, f"{purpose} factor", 0, client)
        length: float = self.of.at(seed, purpose, event, client)
        return factor * length

    def check(self, clients: int, field: str) -> None:
        self.of.check(clients, field)
        self.factor.check(clients, f"{field} factor")


# ---- all delays of a turn


@checked("delays ")
@dataclass(frozen=True)
class Delays:
    """What a client's turn takes on the virtual clock: download + compute · speed · steps + upload.

    A number is the same for everyone; `exponential(2.0)` and its kin are drawn anew for each turn;
    `scaled(...)` differs between clients.
    """

    download: Annotated[Any, _delay("from a client's request to the beginning of its work")] = 0.0
    upload: Annotated[Any, _delay("from the end of its work to the arrival of what it sends")] = 0.0
    compute: Annotated[Any, _delay("for one local step")] = 0.0
    speed: Annotated[
        Any, _delay("a factor of compute that each client keeps, such as classes([(0.9, 1), (0.1, 10)])")
    ] = 1.0
    dropout: Annotated[
        Any, Option("the probability that an upload never arrives", allowed=ALLOWED_DROPOUT, check=_dropout)
    ] = 0.0

    def __post_init__(self) -> None:
        if not self.computes and self.speed != Constant(1.0):
            speed = self.speed.value if isinstance(self.speed, Constant) else self.speed
            raise check.fail("delays speed", speed, "1 without compute=: it is a factor of what a step takes")

    def length(self, seed: int, event: int, client: int, steps: int, informed: bool = False) -> float:
        """Return the time from a client's request to the arrival of its upload; who is informed need not
        download."""
        download, compute, upload = self.parts(seed, event, client, steps)
        return (0.0 if informed else download) + upload + compute

    def parts(self, seed: int, event: int, client: int, steps: int) -> tuple[float, float, float]:
        """Return how long a client downloads, computes and uploads in this turn."""
        download: float = self.download.at(seed, "download", event, client)
        upload: float = self.upload.at(seed, "upload", event, client)
        if not self.computes:
            return download, 0.0, upload
        speed: float = self.speed.at(seed, "speed", 0, client)
        compute: float = self.compute.at(seed, "compute", event, client)
        return download, speed * compute * steps, upload

    def lost(self, seed: int, event: int, client: int) -> bool:
        """Return whether this upload never arrives."""
        chance: float = self.dropout if isinstance(self.dropout, float) else self.dropout[client]
        return chance > 0 and draws.number(seed, "dropout", event, client) < chance

    @functools.cached_property
    def fixed(self) -> float | None:
        """How long every turn takes, if all take the same time and all uploads arrive."""
        down, up = self.download, self.upload
        if self.computes or self.dropout != 0.0:
            return None
        return down.value + up.value if isinstance(down, Constant) and isinstance(up, Constant) else None

    @functools.cached_property
    def computes(self) -> bool:
        """Whether local steps take time."""
        return bool(self.compute != Constant(0.0))

    def check(self, clients: int) -> None:
        """Raise a ValueError if something was given for another number of clients."""
        for name in ("download", "compute", "upload", "speed"):
            getattr(self, name).check(clients, f"delays {name}")
        if isinstance(self.dropout, tuple) and len(self.dropout) != clients:
            raise check.fail("delays dropout", self.dropout, f"one for each of the {clients} clients")


constant, uniform, exponential, lognormal, gamma = Constant, Uniform, Exponential, Lognormal, Gamma
trace, classes, scaled, delays = Trace, Classes, Scaled, Delays

ONE_UNIT = Delays(upload=1.0)
"""The delays of a schedule without any: each turn takes one unit of time."""


# ---- recorded delays


@functools.lru_cache(maxsize=16)
def _recorded(path: str, digest: str) -> tuple[tuple[float, ...], ...]:
    """Return the values of a file by device; of one device if it names none."""
    if recorded.digest("delay path", path) != digest:
        raise check.fail("delay path", path, "the file as it was when the run began")
    devices: dict[str, list[float]] = {}
    columns = 0
    for number, row in recorded.rows("delay path", path):
        columns = columns or len(row)
        if len(row) > 2 or len(row) != columns:
            raise check.fail("delay path", path, f"one delay, or device,delay, in every line (line {number})")
        device = row[0].strip() if columns == 2 else ""
        value = recorded.as_number(row[-1])
        if value is None or not 0 <= value <= LONGEST:
            raise check.fail(
                "delay path", path, f"delays that are numbers from 0 (line {number}: {row[-1]!r})"
            )
        devices.setdefault(device, []).append(value)
    if not devices:
        raise check.fail("delay path", path, "a file with at least one number")
    return tuple(map(tuple, devices.values()))
