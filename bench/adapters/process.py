"""A peer runs in a process of its own: what it sets, leaves behind or breaks stays there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from adapters import PEERS
from adapters.job import Job
from partita.report.words import shorten

LIMIT = 600.0  # seconds
LONGEST = 200  # characters of an error


@dataclass
class Turns:
    """The seconds of a peer's rounds so far. Once it has failed it keeps the error and is not asked again."""

    name: str
    job: Job
    seconds: list[float] = field(default_factory=list)
    error: str | None = None

    def measure(self) -> None:
        """Have it run the job once more."""
        if self.error is None:
            seconds, self.error = measured(PEERS[self.name].adapter, self.job)
            self.seconds += seconds

    def speed(self) -> Speed:
        """Return the speed of the median round."""
        if self.error is not None:
            return Speed(None, self.error)
        work = self.job.work
        return Speed(work.cohort * work.steps / statistics.median(self.seconds))


@dataclass(frozen=True)
class Speed:
    """Client steps per second, or the error that prevented them."""

    steps: float | None
    error: str | None = None


def measured(adapter: str, job: Job, limit: float = LIMIT) -> tuple[list[float], str | None]:
    """Return the seconds of each round and no error, or no seconds and the error."""
    with tempfile.TemporaryDirectory(prefix="partita-", ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "result.json"
        words = [sys.executable, "-m", "adapters.worker", adapter, json.dumps(job), str(file)]
        code = _wait(words, folder, limit)
        if not file.is_file():
            ended = f"no result after {limit:g} s" if code is None else f"its process ended with code {code}"
            return [], ended
        result = json.loads(file.read_text())
    error = result.get("error")
    return result.get("seconds", []), None if error is None else shorten(" ".join(error.split()), LONGEST)


def _wait(words: Sequence[str], folder: str, limit: float) -> int | None:
    """Return the exit code, None where it took too long. Nothing of it is left running."""
    path = os.pathsep.join(map(os.path.abspath, sys.path))  # it works in another folder
    process = subprocess.Popen(
        words,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,  # never written to: when it closes, the worker ends
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a group of its own, so that its workers can be ended with it
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
