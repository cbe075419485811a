"""Callbacks, which a run calls while it runs. Subclass `Callback` and pass it as `callbacks=[...]`.

A callback ends the run after the round by raising `partita.Stop("no progress")` in `round` or `evaluation`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from partita.core.notebook import in_notebook

FEW = 4  # workers whose loads are shown one by one


class Event(NamedTuple):
    """One finished round. `what` names the run: the method, or a baseline of it.

    `excluded` names the clients whose uploads were set aside in this round; `phases` are the seconds of the
    run so far by what they were spent on, as in summary.json; `diverged` counts the honest clients so far
    whose training diverged; `abandoned` counts the rounds so far in which the server took no step, for want
    of usable uploads; `workers` is the share of time that each worker was at work since the event before;
    `privacy` is what the transforms of uploads accounted for at the last evaluation, such as epsilon.
    """

    what: str
    round: int
    rounds: int
    train_loss: float | None
    excluded: tuple[str, ...]
    phases: Mapping[str, float] = MappingProxyType({})
    diverged: int = 0
    abandoned: int = 0
    workers: tuple[float, ...] = ()
    privacy: Mapping[str, float] = MappingProxyType({})


class Callback:
    """All methods may be overridden; none has to be."""

    def start(self, what: str, round: int, rounds: int) -> None:
        """A run begins, or goes on from `round`."""

    def config(self, what: str, config: Mapping[str, Any]) -> None:
        """Receive what config.json holds, right after `start`."""

    def note(self, what: str, text: str) -> None:
        """Something beside rounds takes a while now; an empty text says that it is over."""

    def round(self, event: Event) -> None:
        """A round is over."""

    def evaluation(self, what: str, row: Mapping[str, Any]) -> None:
        """Receive a row of metrics.jsonl."""

    def end(self, what: str) -> None:
        """The run is over."""

    def summary(self, what: str, summary: Mapping[str, Any]) -> None:
        """Receive what summary.json holds, right after `end`."""

    def close(self) -> None:
        """All runs are over, by their end or by an error."""


class Trace(Callback):
    """Writes a trace of some rounds, on CPU and GPU, for chrome://tracing or ui.perfetto.dev."""

    def __init__(self, path: Path, skip: int = 2, rounds: int = 2) -> None:
        self._path, self._skip, self._rounds = path, skip, rounds
        self._what = ""
        self._profile: Any = None

    def start(self, what: str, round: int, rounds: int) -> None:
        """Trace the first run only: the others are alike. Where few rounds are left, trace the last ones."""
        left = rounds - round
        if self._what or left < 1:
            return
        from torch.profiler import profile, schedule

        warmup = int(left > 1)
        active = min(self._rounds, left - warmup)
        plan = schedule(wait=min(self._skip, left - active - warmup), warmup=warmup, active=active, repeat=1)
        self._what = what
        self._profile = profile(
            schedule=plan, on_trace_ready=lambda p: p.export_chrome_trace(str(self._path))
        )
        self._profile.start()

    def round(self, event: Event) -> None:
        """Advance the profiler."""
        if self._profile is not None and event.what == self._what:
            self._profile.step()

    def close(self) -> None:
        """Write the trace."""
        if self._profile is not None:
            self._profile.stop()


class ProgressBar(Callback):
    """Shows a bar per run, on the standard error stream or in a notebook: round, loss, diverged clients,
    time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        notebook = in_notebook()
        self._progress = Progress(
            TextColumn("{task.description:>18}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=Console(stderr=not notebook, force_jupyter=notebook),
        )
        self._tasks: dict[str, Any] = {}

    def start(self, what: str, round: int, rounds: int) -> None:
        """Add a bar."""
        if not self._tasks:
            self._progress.start()
        self._tasks[what] = self._progress.add_task(what, total=rounds, completed=round, note="loss -")

    def round(self, event: Event) -> None:
        """Move the bar."""
        loss = "-" if event.train_loss is None else f"{event.train_loss:.4f}"
        gone = f", [red]{event.diverged} diverged[/red]" if event.diverged else ""
        gone += f", {event.abandoned} abandoned" if event.abandoned else ""
        gone += f", ε {event.privacy['epsilon']:.2f}" if "epsilon" in event.privacy else ""
        gone += _busy(event.workers)
        self._progress.update(self._tasks[event.what], completed=event.round, note=f"loss {loss}{gone}")

    def note(self, what: str, text: str) -> None:
        """Show the text beside the bar."""
        if what in self._tasks and text:
            self._progress.update(self._tasks[what], note=text)

    def close(self) -> None:
        """Stop drawing and give the terminal its cursor back, if there still is one."""
        with contextlib.suppress(OSError):
            self._progress.stop()


def _busy(workers: tuple[float, ...]) -> str:
    """Return such as ', workers 98 95 % busy'; of many workers the least and the most."""
    loads = [
        f"{100 * load:.0f}" for load in (workers if len(workers) <= FEW else (min(workers), max(workers)))
    ]
    if not loads:
        return ""
    if len(workers) <= FEW:
        return f", workers {' '.join(loads)} % busy"
    return f", {len(workers)} workers {loads[0]} to {loads[1]} % busy"
