"""Checks of what a user passes: each names the field, the value and what is allowed."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any


def fail(field: str, value: object, allowed: str) -> ValueError:
    """The error that every check raises."""
    shown = " ".join(repr(value).split())
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return ValueError(f"{field}={shown}: expected {allowed}")


def number(
    field: str, value: Any, *, low: float = -math.inf, high: float = math.inf, open_low: bool = False
) -> float:
    """A finite number in a range; `open_low` excludes the lower end."""
    allowed = f"a number {'above' if open_low else 'from'} {low:g}" if low > -math.inf else "a number"
    allowed += f" up to {high:g}" if high < math.inf else ""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise fail(field, value, allowed)
    x = float(value)
    if x < low or x > high or (open_low and x == low):
        raise fail(field, value, allowed)
    return x


def integer(field: str, value: Any, *, low: int | None = None, high: int | None = None) -> int:
    """A whole number in a range."""
    allowed = "a whole number"
    allowed += f" from {low}" if low is not None else ""
    allowed += f" up to {high}" if high is not None else ""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise fail(field, value, allowed)
    n = int(value)
    if (low is not None and n < low) or (high is not None and n > high):
        raise fail(field, value, allowed)
    return n


def choice(field: str, value: Any, allowed: Iterable[str]) -> Any:
    """One of a few words, with a suggestion on a typo."""
    words = list(allowed)
    if value not in words:
        raise fail(field, value, f"one of {', '.join(map(repr, words))}{meant(value, words)}")
    return value


def meant(value: object, words: Iterable[str]) -> str:
    """' (did you mean ...?)' when a word is close to the value."""
    close = difflib.get_close_matches(str(value), list(words), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
