"""When a stage has converged, by the validation samples, and the state that was the best until now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from partita.core.types import ServerState, Tensors

PATIENCE = 10
"""Evaluations without an improvement, after which a run has converged."""
LEAST = 0.01
"""The share of the best validation loss by which a loss must be lower to count as an improvement."""


@dataclass
class Convergence:
    """What the evaluations of a stage on validation samples have shown so far.

    score, loss  the best ones, and `round` the round of the best score (of equal ones the least loss)
    waited       evaluations since the score improved, or the loss by a share of LEAST
    least        the loss at the last such improvement
    server       the server's state in that round, and `states` the clients', where they are to be kept
    """

    score: float | None = None
    loss: float | None = None
    least: float | None = None
    round: int = -1
    waited: int = 0
    server: ServerState | None = None
    states: Tensors | None = None

    def see(self, round: int, score: float | None, loss: float | None, higher_is_better: bool) -> bool:
        """Note an evaluation; return whether it is the best so far."""
        if score is None:
            return False
        sign = 1.0 if higher_is_better else -1.0
        better = self.score is None or sign * score > sign * self.score
        lower = loss is not None and (self.least is None or loss < self.least - LEAST * abs(self.least))
        self.waited = 0 if better or lower else self.waited + 1
        if lower:
            self.least = loss
        tied = score == self.score and loss is not None and (self.loss is None or loss < self.loss)
        if better or tied:
            self.score, self.loss, self.round = score, loss, round
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
