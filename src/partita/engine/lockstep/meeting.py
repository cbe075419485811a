"""Where runs wait for each other.

Each run has a greenlet. It goes on until it asks for something (`Seat.ask`), and waits; when all of them
wait, `Meeting` answers all that they have asked, and they go on in turn. Only one of them runs at a time, in
the thread of the meeting: nothing that a run does between two questions can disturb another.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from greenlet import greenlet

from partita.core import check
from partita.engine.stopping import Interrupt, Stopped, watched_by

LOG = logging.getLogger("partita")

T = TypeVar("T")

_SEAT: contextvars.ContextVar[Seat | None] = contextvars.ContextVar("seat", default=None)


def seat() -> Seat | None:
    """Return the seat of the run that is going on here, None where it is alone."""
    return _SEAT.get()


class Seat:
    """The place of a run at a meeting.

    number  among the runs
    result  what the run has returned, and `error` what has ended it
    kin     (setup, number of the stage) -> what runs have in common whose clients can be one batch
    """

    def __init__(self, number: int, kin: Callable[[Any, int], str]) -> None:
        self.number, self.kin = number, kin
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
        answer = self._run.parent.switch(question)
        if isinstance(answer, Failure):
            raise answer.error
        return answer

    @property
    def ended(self) -> bool:
        """Whether the run has come to its end."""
        return self._run is not None and self._run.dead


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
        them, and each writes its checkpoint before it ends.
        """
        hub, seats = greenlet.getcurrent(), [Seat(number, self._kin) for number in range(len(bodies))]
        with Interrupt() as interrupt, watched_by(interrupt):
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
                LOG.error("another run ended with %s", check.named_reason(other))
            raise errors[0]
        return [place.result for place in seats]
