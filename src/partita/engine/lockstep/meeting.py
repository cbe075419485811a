"""Where runs wait for each other.

Each run has a greenlet. It goes on until it asks for something (`Seat.ask`), and waits; when all of them
wait, `Meeting` answers all that they have asked, and they go on in turn. Only one of them runs at a time, in
the thread of the meeting: nothing that a run does between two questions can disturb another.
"""

from __future__ import annotations

import contextvars
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from greenlet import GreenletExit, greenlet

from partita.core import check
from partita.engine.stopping import Interrupt, Stopped, watched_by

LOG = logging.getLogger("partita")

T = TypeVar("T")

LAST_QUESTIONS = 8
"""Questions that a run may have on its way out; none is answered."""

_SEAT: contextvars.ContextVar[Seat | None] = contextvars.ContextVar("seat", default=None)


def seat() -> Seat | None:
    """Return the seat of the run that is going on here, None where it is alone."""
    return _SEAT.get()


def clock() -> Callable[[], float]:
    """Return the clock by which this run counts what its parts take.

    In lockstep it stands still while others go on; of what several compute as one, each has a share.
    """
    place = _SEAT.get()
    return time.perf_counter if place is None else lambda: time.perf_counter() - place.waited


def once(what: Hashable, make: Callable[[], T]) -> T:
    """Return what `make` returns: in lockstep it is made by the first run that asks, for all."""
    place = _SEAT.get()
    if place is None:
        return make()
    if what not in place.common:
        place.common[what] = make()
    found: T = place.common[what]
    return found


class Seat:
    """The place of a run at a meeting.

    number  among the runs
    result  what the run has returned, and `error` what has ended it
    kin     (setup, number of the stage) -> what runs have in common whose clients can be one batch
    common  what all runs of the meeting use, by name
    share   the seconds of the last answer that are this run's
    waited  seconds that it has waited for the others
    """

    def __init__(self, number: int, kin: Callable[[Any, int], str], common: dict[Any, Any]) -> None:
        self.number, self.kin, self.common = number, kin, common
        self.share = self.waited = 0.0
        self.result: Any = None
        self.error: BaseException | None = None
        self._run: greenlet | None = None

    def begin(self, body: Callable[[], Any], hub: greenlet) -> None:
        """Take a run, which waits for its first turn."""

        def run(*_: Any) -> None:
            _SEAT.set(self)
            check.CALLER.set(lambda: hub.gr_frame)
            try:
                self.result = body()
            except BaseException as error:  # it is raised when the others have come to their ends
                self.error = error

        self._run = greenlet(run, parent=hub)
        self._run.gr_context = contextvars.copy_context()

    def turn(self, answer: Any) -> Any:
        """Let the run go on with an answer; return its next question, None when it has ended."""
        assert self._run is not None
        return self._run.switch(answer)

    def ask(self, question: Any) -> Any:
        """Wait for the answer to a question; raise the error that it led to."""
        assert self._run is not None
        assert self._run.parent is not None
        asked, self.share = time.perf_counter(), 0.0
        answer = self._run.parent.switch(question)
        self.waited += time.perf_counter() - asked - self.share
        if isinstance(answer, Failure):
            raise answer.error
        return answer

    @property
    def ended(self) -> bool:
        """Whether the run has come to its end."""
        return self._run is not None and self._run.dead

    def leave(self) -> None:
        """End a run that waits: it gives back what it holds, such as its folder, and writes nothing."""
        assert self._run is not None
        for _ in range(LAST_QUESTIONS):
            if not self._run or self._run.dead:  # not begun, or over
                return
            self._run.throw(GreenletExit)


class Failure:
    """The answer to a question that has led to an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Meeting(Generic[T]):
    """Lets runs go on together, and answers what they ask.

    answer  ({seat: question} of all that wait) -> {seat: answer}, of some of them at least
    kin     see `Seat`
    """

    def __init__(
        self, answer: Callable[[dict[Seat, Any]], dict[Seat, Any]], kin: Callable[[Any, int], str]
    ) -> None:
        self._answer, self._kin = answer, kin

    def run(self, bodies: Sequence[Callable[[], T]]) -> list[T]:
        """Carry the runs out and return what they return, in their order.

        Where one ends with an error, the others go on to their ends; then it is raised. Signals reach all of
        them, and each writes its checkpoint before it ends; a second signal ends them where they are.
        """
        hub, common = greenlet.getcurrent(), dict[Any, Any]()
        seats = [Seat(number, self._kin, common) for number in range(len(bodies))]
        with Interrupt() as interrupt, watched_by(interrupt), _all_leave(seats):
            for place, body in zip(seats, bodies):
                place.begin(body, hub)
            answers: dict[Seat, Any] = dict.fromkeys(seats)
            waiting: dict[Seat, Any] = {}
            while answers:
                for place, answer in answers.items():
                    waiting.pop(place, None)
                    question = place.turn(answer)
                    if interrupt.insisted and place.error is not None:  # at once: the others write nothing
                        raise place.error
                    if not place.ended:
                        waiting[place] = question
                answers = self._answer(waiting) if waiting else {}
        errors = [place.error for place in seats if place.error is not None]
        if errors:  # that time is up, or a signal came, is known; what else went wrong is not
            errors.sort(key=lambda error: isinstance(error, Stopped) or not isinstance(error, Exception))
            for other in errors[1:]:
                if not isinstance(other, Stopped) and isinstance(other, Exception):
                    LOG.error("another run ended with %s", check.named_reason(other))
            raise errors[0]
        return [place.result for place in seats]


@contextmanager
def _all_leave(seats: Iterable[Seat]) -> Iterator[None]:
    """At the end, also by an error, let no run wait for ever: nobody would give back what it holds."""
    try:
        yield
    finally:
        for place in seats:
            place.leave()
