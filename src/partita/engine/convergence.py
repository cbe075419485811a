"""When a stage has converged, by the validation samples, and the state that was the best until now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partita.core.types import ServerState, Tensors

PATIENCE = 10
"""Evaluations without an improvement, after which a run has converged."""
WINDOW = 3
"""Evaluations whose mean is looked at: that of a single one is luck where validation samples are few."""
LEAST = 0.002
"""The share of all progress so far by which a score or a loss must be better to count as an improvement."""


@dataclass
class Convergence:
    """What the evaluations of a stage on validation samples have shown so far.

    last         scores and losses of the last evaluations; all below are of their means
    score, loss  the best score (of equal ones the one with the least loss) with its loss, and its `round`
    first        score and loss at the first evaluation
    mark         score and loss at their last improvements
    waited       evaluations since one of the two improved, and `seen` all of them
    server       the server's state in the best round, and `states` the clients', where they are to be kept
    """

    last: Sequence[Sequence[float]] = ()
    score: float | None = None
    loss: float | None = None
    round: int = -1
    first: Sequence[float] = ()
    mark: Sequence[float] = ()
    waited: int = 0
    seen: int = 0
    server: ServerState | None = None
    states: Tensors | None = None

    def see(self, round: int, score: float | None, loss: float | None, higher_is_better: bool) -> bool:
        """Note an evaluation; return whether it is the best so far."""
        if score is None or loss is None:
            return False
        self.last = [*self.last, [score, loss]][-WINDOW:]
        self.seen += 1
        if self.seen == WINDOW:  # what single evaluations have shown is no match for means
            self.score = self.loss = None
        score, loss = (sum(values) / len(values) for values in zip(*self.last))
        sign, now = (1.0 if higher_is_better else -1.0), (score, loss)
        is_first = self.seen == 1
        if is_first:
            self.first = self.mark = now
        better = self.score is None or sign * score > sign * self.score
        tied = score == self.score and (self.loss is None or loss < self.loss)
        if better or tied:
            self.score, self.loss, self.round = score, loss, round
        improved = list(map(_improved, self.first, self.mark, now, (sign, -1.0)))
        self.waited = 0 if is_first or any(improved) else self.waited + 1
        self.mark = [new if yes else old for yes, old, new in zip(improved, self.mark, now)]
        return better or tied

    def has_converged(self, patience: int | None) -> bool:
        """Return whether nothing has improved for so many evaluations."""
        return self.waited >= (PATIENCE if patience is None else patience)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {**vars(self), "server": None if self.server is None else self.server._asdict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what a checkpoint holds."""
        for name in vars(self):
            setattr(self, name, state[name])
        if self.server is not None:
            self.server = ServerState(**state["server"])


def _improved(first: float, mark: float, now: float, sign: float) -> bool:
    """Return whether a number is better than at its last improvement, by a share of the progress."""
    return sign * (now - mark) > LEAST * abs(mark - first)
