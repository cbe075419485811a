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

from partita.cli.bench.peers import PEERS
from partita.cli.bench.peers.job import Job

LIMIT = 600.0  # seconds
LONGEST = 200


@dataclass
class Turns:
    """The seconds of a peer's rounds so far; once it has failed, why, and it is not asked again."""

    name: str
    job: Job
    seconds: list[float] = field(default_factory=list)
    error: str | None = None

    def measure(self) -> None:
        """Another turn."""
        if self.error is None:
            found, self.error = measured(PEERS[self.name].adapter, self.job)
            self.seconds += found

    def speed(self) -> Speed:
        """The median round in client steps per second."""
        if self.error is not None:
            return Speed(None, self.error)
        work = self.job.work
        return Speed(work.cohort * work.steps / statistics.median(self.seconds))


@dataclass(frozen=True)
class Speed:
    """Client steps per second, or why there are none."""

    steps: float | None
    error: str | None = None


def measured(adapter: str, job: Job, limit: float = LIMIT) -> tuple[list[float], str | None]:
    """Seconds of each round, or the error."""
    with tempfile.TemporaryDirectory(prefix="partita-", ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "found.json"
        words = [sys.executable, "-m", "partita.cli.bench.peers.alone", adapter, json.dumps(job), str(file)]
        code = _wait(words, folder, limit)
        if not file.is_file():
            late = code is None
            return [], f"no result after {limit:g} s" if late else f"its process ended with code {code}"
        found = json.loads(file.read_text())
    error = found.get("error")
    return found.get("seconds", []), None if error is None else _short(error)


def _wait(words: Sequence[str], folder: str, limit: float) -> int | None:
    """The exit code; None where it took too long. Nothing of it is left running."""
    path = os.pathsep.join(map(os.path.abspath, sys.path))  # it works in another folder
    process = subprocess.Popen(
        words,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,  # never written to: its end says that nobody waits any more
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


def _short(error: str) -> str:
    """On one line."""
    text = " ".join(error.split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
