"""Clients that are elsewhere: what a run asks of them where it holds neither their samples nor their states.

A run whose clients are real is the same loop. What arrives from them lies in `state.pending`, as what was
computed and has not been used yet; the store has an address for each client's state; the schedule runs on
real time. This is the rest of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from partita.core import check
from partita.engine.samples import Scored
from partita.schedule import Running, Schedule, StageSpec

if TYPE_CHECKING:
    from partita.engine.stage import Stage
    from partita.engine.state import State


class Elsewhere(Protocol):
    """The clients of a run, from the server's side."""

    def begin(self, schedule: Schedule, spec: StageSpec) -> Running:
        """Start a schedule on real time."""
        ...

    def enter(self, stage: Stage, state: State) -> None:
        """Take part in a stage that begins, or that a resumed run goes on with."""
        ...

    def scored(self, stage: Stage, state: State, model: str, split: str, every_sample: bool) -> Scored:
        """Ask clients how a model does on their samples; NaN for those who do not say."""
        ...


class Nowhere:
    """An executor for a server whose clients are elsewhere: whatever it is asked to compute is refused."""

    name = "elsewhere"

    def __init__(self, bound: Any) -> None:
        self.bound = bound

    def __call__(self, program: Any, *arguments: Any) -> Any:  # noqa: ARG002
        reason = "the server holds no samples, so that its clients compute this, each for itself"
        raise check.fail("program", program.name, "", reason)

    def prefetch(self, *arguments: Any) -> None:
        """Do nothing: there are no samples to draw."""

    def release(self, kept: Any = ()) -> None:
        """Do nothing: nothing is lent."""

    def on(self, data: Any, counted: Any = None) -> Nowhere:
        """Return this executor bound to `data`."""
        return Nowhere(self.bound.on(data, counted))
