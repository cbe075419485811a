"""Numbers in the form that people read."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from partita.engine.record import human_bytes, number
from partita.engine.verdict import listed as listed

MISSING = "–"


def _of_any(write: Callable[[float], str]) -> Callable[[object], str]:
    """Let a function take any value: what is no finite number is missing."""

    @wraps(write)
    def of_any(value: object) -> str:
        x = number(value)
        return MISSING if x is None else write(x)

    return of_any


def score(value: object, digits: int = 4) -> str:
    """Write a score: 0.9624; large ones with fewer digits, tiny ones with as many as it takes."""
    x = number(value)
    if x is None:
        return MISSING
    if abs(x) >= 1000:
        return f"{x:,.1f}"
    return f"{x:.3g}" if 0 < abs(x) < 10 ** (1 - digits) else f"{x:.{digits}f}"


def spread(value: dict[str, float] | None, seeds: int) -> str:
    """Write 0.9624, or 0.9624 ± 0.0031 over several seeds."""
    if value is None:
        return MISSING
    return f"{score(value['mean'])} ± {deviation(value)}" if seeds > 1 else score(value["mean"])


def deviation(value: dict[str, float], shown: str | None = None) -> str:
    """Write the standard deviation with as many decimals as the mean (`shown`, if that is no score)."""
    decimals = (shown or score(value["mean"])).partition(".")[2]
    plain = decimals.isdigit() or not decimals
    return f"{value['std']:,.{len(decimals)}f}" if plain else f"{value['std']:.2g}"


@_of_any
def signed(x: float) -> str:
    """Write +0.0311 or −0.0311."""
    return f"{'+' if x > 0 else '−' if x < 0 else ''}{score(abs(x))}"


@_of_any
def count(x: float) -> str:
    """Write a number of things: 1,234; with a decimal only where a mean of counts has one."""
    return f"{x:,.0f}" if x == int(x) else f"{x:,.1f}"


def counted(value: object, noun: str) -> str:
    """Write 1 round, 50 rounds."""
    return f"{count(value)} {noun}" + ("" if number(value) == 1 else "s")


@_of_any
def rounded(x: float) -> str:
    """Write a large number without its decimals."""
    return f"{x:,.0f}"


@_of_any
def precise(x: float) -> str:
    """Write a number with three digits: 1.23, 1e-05."""
    return f"{x:.3g}"


@_of_any
def bytes_(x: float) -> str:
    """Write 12.3 MB."""
    return human_bytes(x)


@_of_any
def seconds(x: float) -> str:
    """Write 8.3 s, 4 min 05 s or 3 h 20 min."""
    if x < 60:
        return f"{x:.1f} s"
    minutes, rest = divmod(round(x), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


@_of_any
def units(x: float) -> str:
    """Write a virtual time or a rate with three digits, or all before the point: 0.0793, 60.9, 12, 1,204."""
    return f"{x:,.0f}" if abs(x) >= 99.95 or x == int(x) else f"{x:#.3g}"


@_of_any
def share(x: float) -> str:
    """Write 80 %, or 0.13 %."""
    return f"{100 * x:.0f} %" if x == 0 or abs(x) >= 0.0995 else f"{100 * x:.2g} %"


@_of_any
def p_value(x: float) -> str:
    """Write 0.031, or <0.001."""
    return "<0.001" if x < 0.001 else f"{x:.3f}"


def shorten(text: str, width: int) -> str:
    """Return a text, cut after `width` characters."""
    return text if len(text) <= width else text[: width - 1] + "…"
