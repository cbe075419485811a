"""Checks of what a user passes: each names the field, the value and what is allowed."""

from __future__ import annotations

import difflib
import inspect
import math
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any

LARGEST = 2**63 - 1  # of whole numbers in tensors and arrays
BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


class Refused(ValueError):
    """Raised for a wrong argument: its `field`, the `value` that was given, and what is `allowed`."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}={_cut(value)}: expected {allowed}")
        self.field, self.value, self.allowed = field, value, allowed

    def __reduce__(self) -> tuple[type[Refused], tuple[str, object, str]]:
        plain = self.value is None or isinstance(self.value, str | int | float)
        return Refused, (self.field, self.value if plain else _Printed(_cut(self.value)), self.allowed)


class _Printed(str):
    """What a value looked like, in another process."""

    def __repr__(self) -> str:
        return str(self)


def fail(field: str, value: object, allowed: str) -> Refused:
    """Return the error that a check raises."""
    return Refused(field, value, allowed)


def _cut(value: object) -> str:
    """Return a value as a message shows it: on one line, and not too long.

    A number of thousands of digits has no text, and some objects fail to give theirs.
    """
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"<{type(value).__name__}>"
    most = 300 if isinstance(value, str) else 80  # paths are long
    return text if len(text) <= most else text[: most - 3] + "..."


def warn(text: str) -> None:
    """Warn at the first line outside of the package, which is the user's."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] == "partita":
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def number(
    field: str, value: Any, *, low: float = -math.inf, high: float = math.inf, open_low: bool = False
) -> float:
    """Return a finite number in a range; `open_low` excludes the lower end."""
    try:
        x = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        x = math.nan
    if math.isfinite(x) and low <= x <= high and not (open_low and x == low):
        return x
    allowed = f"a number {'above' if open_low else 'from'} {low:g}" if low > -math.inf else "a number"
    raise fail(field, value, allowed + (f" up to {high:g}" if high < math.inf else ""))


def integer(field: str, value: Any, *, low: int | None = None, high: int | None = None) -> int:
    """Return a whole number in a range, and never larger than what tensors count with."""
    allowed = "a whole number"
    if high is None and isinstance(value, Integral) and abs(int(value)) > LARGEST:
        high = LARGEST
    allowed += f" from {low}" if low is not None else ""
    allowed += f" up to {high}" if high is not None else ""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise fail(field, value, allowed)
    n = int(value)
    if (low is not None and n < low) or (high is not None and n > high) or abs(n) > LARGEST:
        raise fail(field, value, allowed)
    return n


def boolean(field: str, value: Any) -> bool:
    """Return True or False, and refuse all else."""
    if not isinstance(value, bool):
        raise fail(field, value, "True or False")
    return value


def _amount(text: str, units: Mapping[str, float]) -> float:
    """Return a number with a unit, such as '8GiB', in the unit that is 1; NaN if it is none."""
    text = text.strip().lower()
    unit = next((u for u in sorted(units, key=len, reverse=True) if text.endswith(u)), "")
    try:
        return float(text.removesuffix(unit)) * units.get(unit, 1)
    except ValueError:
        return math.nan


def size(field: str, value: Any) -> int:
    """Return bytes, from '8GiB', '500MB' or a number of them."""
    if isinstance(value, str):
        amount = _amount(value, BYTES)
        if not math.isfinite(amount):
            raise fail(field, value, "a number of bytes such as 500000000, '500MB' or '8GiB'")
        value = int(amount)
    return integer(field, value, low=1)


def duration(field: str, value: Any) -> float:
    """Return seconds above 0, from '90min', '2h' or a number of them."""
    try:
        return number(
            field, _amount(value, SECONDS) if isinstance(value, str) else value, low=0, open_low=True
        )
    except ValueError:
        raise fail(field, value, "seconds above 0, or such as '90s', '30min', '2h' or '1d'") from None


def choice(field: str, value: Any, allowed: Iterable[str]) -> Any:
    """Return one of a few words; suggest one on a typo."""
    words = allowed if isinstance(allowed, Sequence) else list(allowed)
    if not isinstance(value, str) or value not in words:
        raise fail(field, value, f"one of {', '.join(map(repr, words))}{meant(value, words)}")
    return value


def meant(value: object, words: Iterable[str]) -> str:
    """Return ' (did you mean ...?)' when another word is close to the value, or begins with it."""
    text, others = str(value).lower(), {str(w).lower(): str(w) for w in words if str(w) != str(value)}
    close = difflib.get_close_matches(text, others, n=1)
    close = close or [w for w in others if len(text) > 2 and w.startswith(text)]
    return f" (did you mean {others[close[0]]!r}?)" if close else ""


def path(field: str, value: Any) -> Path:
    """Return a path; an empty one would be the folder one is in."""
    if not isinstance(value, str | PathLike) or not str(value):
        raise fail(field, value, "the path of a folder")
    return Path(value)


def takes(field: str, value: Any, arguments: int, allowed: str) -> Any:
    """Return a function that takes so many arguments; `iid` instead of `iid()` does not."""
    if not callable(value) or isinstance(value, type):
        raise fail(field, value, allowed)
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # some built-in functions have none
        return value
    try:
        signature.bind(*[None] * arguments)
    except TypeError as error:
        raise fail(field, value, f"{allowed} ({error})") from None
    return value


def schedule(field: str, value: Any) -> Any:
    """Return None, or something that can begin as a schedule."""
    if value is not None and (not hasattr(value, "begin") or isinstance(value, type)):
        raise fail(field, value, "a schedule such as partita.schedule.synchronous()")
    return value
