"""The process of a peer: `python -m adapters.worker ADAPTER JOB FILE`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from adapters.job import Adapter, Declined, Job
from partita.core.device import arithmetic


def main(adapter: str, job: str, file: str) -> None:
    """Have the peer do the job; write the seconds of its rounds, or what went wrong."""
    try:
        result: dict[str, Any] = {"seconds": _seconds(adapter, Job(*json.loads(job)))}
    except Declined as reason:
        result = {"error": str(reason)}
    except BaseException as error:  # some packages end the process when something fails
        result = {"error": f"{type(error).__name__}: {error}".strip(": ")}
    Path(file).write_text(json.dumps(result))


def _seconds(adapter: str, job: Job) -> list[float]:
    run: Adapter = import_module(adapter).rounds
    with arithmetic(job.precision):
        times: Sequence[float] = run(job)
    if len(times) != job.rounds + 1:
        raise RuntimeError(f"it ended after {len(times)} of {job.rounds + 1} rounds")
    return [float(x) for x in np.diff(times)]


def _end_with_the_parent() -> None:
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)  # and the workers that the peer has started


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    main(*sys.argv[1:])
