"""Where the time of a run goes: seconds by what they were spent on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

NAMES = ("cohort", "states", "steps", "screening", "aggregation", "server", "evaluation", "metrics", "files")
"""cohort: who reports; states: what clients keep; files: rows, checkpoints."""


class Phases:
    """Seconds of each phase without those that began inside it.

    A GPU works while the host goes on. With `wait` the host waits for it at both ends, so that each
    phase has the time that it took; without, whoever needs a result first has it.
    """

    def __init__(self, device: str, wait: bool = False) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(NAMES, 0.0)
        self._wait = wait and device != "cpu"
        self._inside: list[float] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count what happens inside as this phase."""
        begin = self._now()
        self._inside.append(0.0)
        try:
            yield
        finally:
            took = self._now() - begin
            self.seconds[name] += took - self._inside.pop()
            if self._inside:
                self._inside[-1] += took

    def _now(self) -> float:
        if self._wait:
            torch.cuda.synchronize()
        return time.perf_counter()
