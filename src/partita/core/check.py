"""Checks of what a user passes: each names the field, the value and what is allowed."""

from __future__ import annotations

import difflib
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import FrameType, NoneType
from typing import Any

LARGEST = 2**63 - 1  # whole number in tensors and arrays
BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


class Missing:
    """The value of an argument that was not given."""

    def __repr__(self) -> str:
        return "missing"

    def __reduce__(self) -> str:
        return "MISSING"  # there is one, in every process


MISSING = Missing()


class Refused(ValueError):
    """Raised for a wrong argument: its `field`, the `value` that was given, and what is `allowed`.

    `reason` says why the value is refused, where what is allowed does not say it by itself. What is `allowed`
    is empty where no value is.
    """

    def __init__(self, field: str, value: object, allowed: str, reason: str = "") -> None:
        given = field if value is MISSING else f"{field}={shortened(value)}"
        advice = f"{reason}; give {allowed}" if reason and allowed else reason or f"expected {allowed}"
        super().__init__(f"{given}: {advice}")
        self.field, self.value, self.allowed, self.reason = field, value, allowed, reason

    def within(self, part: str) -> Refused:
        """Return this error as one about an argument of `part`."""
        return Refused(f"{part}: {self.field}", self.value, self.allowed, self.reason)

    def __reduce__(self) -> tuple[type[Refused], tuple[str, object, str, str]]:
        plain = isinstance(self.value, str | int | float | NoneType | Missing)
        value = self.value if plain else _Text(shortened(self.value))
        return Refused, (self.field, value, self.allowed, self.reason)


class _Text(str):
    """The text of a value that stayed in another process."""

    def __repr__(self) -> str:
        return str(self)


def fail(field: str, value: object, allowed: str, reason: str = "") -> Refused:
    """Return the error that a check raises."""
    return Refused(field, value, allowed, reason)


def shortened(value: object) -> str:
    """Return the text of a value as a message shows it: on one line that is not too long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a number of thousands of digits has no text, and some objects fail to give theirs
        text = f"<{type(value).__name__}>"
    most = 300 if isinstance(value, str) else 80  # paths are long
    return text if len(text) <= most else text[: most - 3] + "..."


_said: ContextVar[set[str] | None] = ContextVar("said", default=None)


@contextmanager
def each_warning_once() -> Iterator[None]:
    """Give each distinct warning once within: in a run with its baselines, or in a study with all its runs.

    Python's own memory of warnings is lost whenever somebody changes its filters, as torch does.
    """
    if _said.get() is not None:  # the outer one decides
        yield
        return
    token = _said.set(set())
    try:
        yield
    finally:
        _said.reset(token)


def warn(text: str) -> None:
    """Warn at the first line outside of the package: the user's."""
    said = _said.get()
    if said is not None:
        if text in said:
            return
        said.add(text)
    frame: FrameType | None = sys._getframe()
    caller = CALLER.get()
    while frame is not None and _is_ours(str(frame.f_globals.get("__name__"))):
        frame = frame.f_back
        if frame is None and caller is not None:  # a run in lockstep has a stack of its own
            frame, caller = caller(), None
    place = sys._getframe() if frame is None else frame
    known = place.f_globals.setdefault("__warningregistry__", {})
    module = str(place.f_globals.get("__name__"))
    warnings.warn_explicit(text, UserWarning, place.f_code.co_filename, place.f_lineno, module, known)


CALLER: ContextVar[Callable[[], FrameType | None] | None] = ContextVar("caller", default=None)
"""Where the stack goes on at whose end a run in lockstep stands."""


def _is_ours(module: str) -> bool:
    """Return whether a frame is the package's own, or one of a context manager around it."""
    return module.split(".")[0] in ("partita", "contextlib")


def reason(error: BaseException) -> str:
    """Return the first line of an error's message, or its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def named_reason(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, for errors of foreign code."""
    return f"{type(error).__name__}: {reason(error)[:200]}" if str(error).strip() else type(error).__name__


_checked_before = ContextVar("checked before", default=False)


@contextmanager
def numbers_checked_before() -> Iterator[None]:
    """Let tensors pass as numbers: those of several clients, each of which was checked as a number."""
    token = _checked_before.set(True)
    try:
        yield
    finally:
        _checked_before.reset(token)


def number(
    field: str, value: Any, *, low: float = -math.inf, high: float = math.inf, open_low: bool = False
) -> float:
    """Return a finite number in a range; `open_low` excludes the lower end."""
    if _checked_before.get() and not isinstance(value, Real | str | None):
        return value  # type: ignore[no-any-return]
    try:
        x = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        x = math.nan
    if math.isfinite(x) and low <= x <= high and not (open_low and x == low):
        return x
    allowed = f"a number {'above' if open_low else 'from'} {low:g}" if low > -math.inf else "a number"
    raise fail(field, value, allowed + (f" up to {high:g}" if high < math.inf else ""))


def integer(field: str, value: Any, *, low: int | None = None, high: int | None = None) -> int:
    """Return a whole number in a range, never larger than what tensors count with."""
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
    """Return True or False."""
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
    """Return one of a few words; the error suggests one if the value is nearly it."""
    words = allowed if isinstance(allowed, Sequence) else list(allowed)
    if not isinstance(value, str) or value not in words:
        raise fail(field, value, f"one of {', '.join(map(repr, words))}{meant(value, words)}")
    return value


def meant(value: object, words: Iterable[str]) -> str:
    """Return ' (did you mean ...?)' when another word begins with the value, or is close to it."""
    text, candidates = str(value).lower(), {str(w).lower(): str(w) for w in words if str(w) != str(value)}
    close = [w for w in candidates if len(text) > 2 and w.startswith(text)]
    close = close or difflib.get_close_matches(text, candidates, n=1)
    return f" (did you mean {candidates[close[0]]!r}?)" if close else ""


def path(field: str, value: Any) -> Path:
    """Return a path; an empty one, which would be the current folder, is refused."""
    if not isinstance(value, str | PathLike) or not str(value):
        raise fail(field, value, "the path of a folder")
    return Path(value)


def takes(field: str, value: Any, arguments: int, allowed: str) -> Any:
    """Return a function that takes so many arguments, as `iid()` does and `iid` does not."""
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
    """Return None or a schedule."""
    if value is not None and (not hasattr(value, "begin") or isinstance(value, type)):
        raise fail(field, value, "a schedule such as partita.schedule.synchronous()")
    return value
