"""How a run ends before its last round, with a checkpoint: by a signal, or at its time limit."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any, NoReturn

TERMINATIONS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals that end a process: a batch system's, and that of a closed terminal (not on Windows)."""


class Stop(Exception):
    """Raise it in `Callback.round` or `Callback.evaluation` to end the run after this round.

    The run ends as one whose rounds are over: it is evaluated, its results are written and `federate` returns
    it; the summary has the reason. Raised for a baseline, it ends the baseline alone, and of a pipeline it
    ends all stages. `Run.extend` goes on from there.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason or "a callback asked for it"


class Stopped(Exception):
    """Raised when the `max_time` of a run is over. A checkpoint is written; `resume=True` continues from it.

    `what` names the run (the method, or a baseline of it), of which `round` of `rounds` are done.
    """

    def __init__(self, what: str, round: int, rounds: int | None = None) -> None:
        super().__init__(what, round, rounds)
        self.what, self.round, self.rounds = what, round, rounds

    @property
    def where(self) -> str:
        """How far the run came, such as 'in fedalt at round 3 of 10'."""
        if self.rounds is None:
            return f"before {self.what}"
        return f"in {self.what} at round {self.round} of {self.rounds}"

    def __str__(self) -> str:
        return f"max_time is over: stopped {self.where}; go on with resume=True"


class Terminated(SystemExit):
    """Raised by SIGTERM and SIGHUP: ends the program with the exit code 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


def at_once(number: int, frame: FrameType | None = None) -> NoReturn:  # noqa: ARG001
    """Raise what ends the program for this signal."""
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the program like Ctrl-C, so that it can say how to resume."""
    handlers = {}
    if _in_main_thread():
        handlers = {
            n: signal.signal(n, at_once) for n in TERMINATIONS if signal.getsignal(n) is signal.SIG_DFL
        }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


_WATCH: ContextVar[Interrupt | None] = ContextVar("watch", default=None)


@contextlib.contextmanager
def watched_by(interrupt: Interrupt) -> Iterator[None]:
    """Let runs that begin within leave signals to this interrupt, which watches over all of them."""
    token = _WATCH.set(interrupt)
    try:
        yield
    finally:
        _WATCH.reset(token)


class Interrupt:
    """Ends a run after the round in progress, with a checkpoint, on Ctrl-C, SIGTERM, SIGHUP or a deadline.

    A second signal stops at once. Handlers that a program has set for SIGTERM and SIGHUP itself stay, and
    ignored signals stay ignored: `nohup` lets a run outlive its terminal.
    """

    def __init__(self, deadline: float = math.inf) -> None:
        self.deadline = deadline  # of time.monotonic()
        self._watch = _WATCH.get()
        self.insisted = False  # whether a second one did
        self._arrived = 0
        self._passed: dict[str, int] = {}  # by run, the last round that one of those watched over went beyond
        self._once_more = False
        self._handlers: dict[int, Any] = {}

    @property
    def requested(self) -> int:
        """The number of the signal that arrived, 0 if none has."""
        return self._arrived if self._watch is None else self._watch.requested

    def __enter__(self) -> Interrupt:
        if _in_main_thread() and self._watch is None:
            for number in (signal.SIGINT, *TERMINATIONS):
                if _ends_the_process(number):
                    self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
        if kind is None and self.requested:  # it arrived after the last check
            at_once(self.requested)

    def check(self, name: str, round: int, rounds: int, *, over: bool, save: Callable[[], None]) -> None:
        """Stop here, with a checkpoint, if a signal asked for it, or if time is up and a round is left.

        Runs that go on together stop after the same round: one that others are ahead of takes one more.
        """
        if self._lets_go_on(name, round, over):
            return
        if self.requested:
            save()
            at_once(self.requested)
        if time.monotonic() >= self.deadline and not over:
            save()
            raise Stopped(name, round, rounds)

    def _lets_go_on(self, name: str, round: int, over: bool) -> bool:
        """Return whether a run takes one more round, since others that are watched over already do."""
        watch = self._watch
        if watch is None:
            return False
        if not self.requested and time.monotonic() < self.deadline:
            watch._passed[name] = max(round, watch._passed.get(name, 0))
            return True
        behind = not over and not self._once_more and round <= watch._passed.get(name, 0)
        self._once_more = self._once_more or behind
        return behind

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._arrived:
            self.insisted = True
            at_once(number, frame)
        self._arrived = number


def _ends_the_process(number: int) -> bool:
    """Return whether a signal would end the process: not if it is ignored or handled by the program."""
    handler = signal.getsignal(number)
    if number == signal.SIGINT:
        return handler not in (signal.SIG_IGN, None)
    return handler is at_once or handler is signal.SIG_DFL


def _in_main_thread() -> bool:
    """Return whether this is the main thread, the only one that may set handlers of signals."""
    return threading.current_thread() is threading.main_thread()
