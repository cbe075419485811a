"""The number of threads that a run computes with: sums are split among them, so it decides the last bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from partita.core import check
from partita.core.process import cores
from partita.engine.lockstep import seat
from partita.engine.record import read_json


@contextmanager
def same_threads(folder: Path | None) -> Iterator[None]:
    """Let torch use as many threads as the run in this folder began with; at the end, as many as before.

    Without a run in the folder nothing is changed; nor in a run that goes on with others, whose threads are
    those of all of them.
    """
    now = torch.get_num_threads()
    wanted = now if seat() is not None else _recorded(folder) or now
    if wanted == now:
        yield
        return
    available, reason = cores(), f"{now} are set now, and another number would change the last bits"
    if wanted > available:
        reason = f"this machine has {available} cores, so it takes longer; fewer would change the last bits"
    check.warn(f"resume: the run in {folder} began with {wanted} threads and continues with them: {reason}")
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(now)


def _recorded(folder: Path | None) -> int | None:
    """Return the number of threads in config.json, None if it has none."""
    if folder is None or not (folder / "config.json").is_file():
        return None
    executor = read_json(folder / "config.json").get("executor")
    threads = executor.get("threads") if isinstance(executor, dict) else None
    return threads if isinstance(threads, int) and not isinstance(threads, bool) and threads > 0 else None
