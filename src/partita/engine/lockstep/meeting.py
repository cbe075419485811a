"""Where runs wait for each other.

Each run has a greenlet. It goes on until it asks for something (`Seat.ask`), and waits; when all of them
wait, `Meeting` answers all that they have asked, and they go on in turn. Only one of them runs at a time, in
the thread of the meeting: nothing that a run does between two questions can disturb another.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from greenlet import greenlet

from partita.engine.stopping import Interrupt, watched_by

T = TypeVar("T")

_SEAT: contextvars.ContextVar[Seat | None] = contextvars.ContextVar("seat", default=None)


def seat() -> Seat | None:
    """Return the seat of the run that is going on here, None where it is alone."""
    return _SEAT.get()


class Seat:
    """The place of a run at a meeting.

    number  among the runs
    kin     (setup, number of the stage) -> what runs have in common whose clients can be one batch
    """

    def __init__(self, number: int, kin: Callable[[Any, int], str]) -> None:
        self.number, self.kin = number, kin
        self._run: greenlet | None = None
        self._result: Any = None
        self._error: BaseException | None = None

    def begin(self, body: Callable[[], Any], hub: greenlet) -> None:
        """Take a run, which waits for its first turn."""

        def run(*_: Any) -> None:
            _SEAT.set(self)
            try:
                self._result = body()
            except BaseException as error:  # it is raised when the others have come to their ends
                self._error = error

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

    @property
    def result(self) -> Any:
        """What the run has returned; raise what has ended it."""
        if self._error is not None:
            raise self._error
        return self._result


class Failure:
    """The answer to a question that has led to an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Meeting(Generic[T]):
    """Lets runs go on together, and answers what they ask.

    answer  ({seat: question} of all that wait) -> {seat: answer}
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
            while answers:
                waiting = {}
                for place, answer in answers.items():
                    question = place.turn(answer)
                    if interrupt.insisted:  # at once: the others write nothing
                        raise KeyboardInterrupt
                    if not place.ended:
                        waiting[place] = question
                answers = self._answer(waiting) if waiting else {}
        return [place.result for place in seats]
