"""Where the time of a run goes: seconds by what they were spent on."""

from __future__ import annotations

import time

import torch

NAMES = ("cohort", "states", "steps", "screening", "aggregation", "server", "evaluation", "metrics", "files")
"""cohort: who reports; states: what clients keep; files: rows, checkpoints."""


class Phases:
    """Seconds of each phase without those that began inside it.

    A GPU works while the host goes on; a round waits for it at the end of its steps, and as a rule nowhere
    else. With `wait` the host waits at both ends of every phase: each has the time that its work took.
    """

    def __init__(self, device: str, wait: bool = False) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(NAMES, 0.0)
        self._wait = wait and device != "cpu"
        self._open: list[tuple[str, float, list[float]]] = []  # name, begin, seconds of those inside

    def __call__(self, name: str) -> Phases:
        """`with phases(name):` counts what happens inside as this phase."""
        self._open.append((name, self._now(), []))
        return self

    def __enter__(self) -> None:
        """It has begun."""

    def __exit__(self, *error: object) -> None:
        name, begin, inside = self._open.pop()
        took = self._now() - begin
        self.seconds[name] += took - sum(inside)
        if self._open:
            self._open[-1][2].append(took)

    def _now(self) -> float:
        if self._wait:
            torch.cuda.synchronize()
        return time.perf_counter()
