"""Checks of what a user passes: each names the field, the value and what is allowed."""

from __future__ import annotations

import difflib
import inspect
import math
import sys
import warnings
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any

LARGEST = 2**63 - 1  # of whole numbers in tensors and arrays


class Refused(ValueError):
    """Raised for a wrong argument: its `field`, the `value` that was given, and what is `allowed`."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}={_cut(value)}: expected {allowed}")
        self.field, self.value, self.allowed = field, value, allowed

    def __reduce__(self) -> tuple[type[Refused], tuple[str, object, str]]:
        plain = self.value is None or isinstance(self.value, str | int | float)
        return Refused, (self.field, self.value if plain else _Shown(_cut(self.value)), self.allowed)


class _Shown(str):
    """What a value looked like, in another process."""

    def __repr__(self) -> str:
        return str(self)


def fail(field: str, value: object, allowed: str) -> Refused:
    """Return the error that a check raises."""
    return Refused(field, value, allowed)


def _cut(value: object) -> str:
    """A value as a message shows it."""
    shown, most = _shown(value), 300 if isinstance(value, str) else 80  # paths are long
    return shown if len(shown) <= most else shown[: most - 3] + "..."


def warn(text: str) -> None:
    """Warn at the first line outside of the package: the user's."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] == "partita":
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def reason(error: BaseException) -> str:
    """Return the first line of an error's message, or its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def named_reason(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, for errors of foreign code."""
    return f"{type(error).__name__}: {reason(error)[:200]}" if str(error).strip() else type(error).__name__


def _shown(value: object) -> str:
    """On one line; a number of thousands of digits has no text, and some objects fail to give theirs."""
    try:
        return " ".join(repr(value).split())
    except Exception:
        return f"<{type(value).__name__}>"


def number(
    field: str, value: Any, *, low: float = -math.inf, high: float = math.inf, open_low: bool = False
) -> float:
    """A finite number in a range; `open_low` excludes the lower end."""
    try:
        x = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        x = math.nan
    if math.isfinite(x) and low <= x <= high and not (open_low and x == low):
        return x
    allowed = f"a number {'above' if open_low else 'from'} {low:g}" if low > -math.inf else "a number"
    raise fail(field, value, allowed + (f" up to {high:g}" if high < math.inf else ""))


def integer(field: str, value: Any, *, low: int | None = None, high: int | None = None) -> int:
    """A whole number in a range, and never larger than what tensors count with."""
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
    """True or False."""
    if not isinstance(value, bool):
        raise fail(field, value, "True or False")
    return value


def size(field: str, value: Any) -> int:
    """Bytes from '8GiB', '500MB' or a number of them."""
    units = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    if isinstance(value, str):
        text = value.strip().upper()
        unit = next((u for u in sorted(units, key=len, reverse=True) if text.endswith(u)), "")
        try:
            value = int(float(text.removesuffix(unit)) * units.get(unit, 1))
        except (ValueError, OverflowError):
            raise fail(field, value, "a number of bytes such as 500000000, '500MB' or '8GiB'") from None
    return integer(field, value, low=1)


def duration(field: str, value: Any) -> float:
    """Seconds above 0, from '90min', '2h' or a number of them."""
    units = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
    seconds = value
    if isinstance(value, str):
        text = value.strip().lower()
        unit = next((u for u in sorted(units, key=len, reverse=True) if text.endswith(u)), "")
        try:
            seconds = float(text.removesuffix(unit)) * units.get(unit, 1)
        except ValueError:
            seconds = None
    try:
        return number(field, seconds, low=0, open_low=True)
    except ValueError:
        raise fail(field, value, "seconds above 0, or such as '90s', '30min', '2h' or '1d'") from None


def choice(field: str, value: Any, allowed: Iterable[str]) -> Any:
    """One of a few words, with a suggestion on a typo."""
    words = allowed if isinstance(allowed, Sequence) else list(allowed)
    if not isinstance(value, str) or value not in words:
        raise fail(field, value, f"one of {', '.join(map(repr, words))}{meant(value, words)}")
    return value


def meant(value: object, words: Iterable[str]) -> str:
    """' (did you mean ...?)' when another word is close to the value, or begins with it."""
    text, known = str(value).lower(), {str(w).lower(): str(w) for w in words if str(w) != str(value)}
    close = difflib.get_close_matches(text, known, n=1)
    close = close or [w for w in known if len(text) > 2 and w.startswith(text)]
    return f" (did you mean {known[close[0]]!r}?)" if close else ""


def path(field: str, value: Any) -> Path:
    """A path; an empty one would be the folder one is in."""
    if not isinstance(value, str | PathLike) or not str(value):
        raise fail(field, value, "the path of a folder")
    return Path(value)


def takes(field: str, value: Any, arguments: int, allowed: str) -> Any:
    """A function that can be called with so many arguments; `iid` instead of `iid()` cannot."""
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
    """None, or something that can be put to work as a schedule."""
    if value is not None and (not hasattr(value, "begin") or isinstance(value, type)):
        raise fail(field, value, "a schedule such as partita.schedule.synchronous()")
    return value
