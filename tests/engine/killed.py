"""A process that ends itself as `kill -9` would, at a point that is counted: no clock decides where."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from partita.engine.store import durable

NEVER = -1
SEED = "PARTITA_TEST_SEED"


def seeded() -> random.Random:
    """Draw from the seed in PARTITA_TEST_SEED, else from 0; pytest shows it with a failure."""
    seed = int(os.environ.get(SEED, "0"))
    print(f"{SEED}={seed}")
    return random.Random(seed)


def at_write(last: int) -> itertools.count[int]:
    """Die at the n-th call that changes something on disk, in the middle of it if it writes."""
    count = itertools.count()
    pwrite, save_file = os.pwrite, durable.save_file

    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if next(count) == last:
                if fn is pwrite:
                    fd, data, offset = args
                    pwrite(fd, data[: len(data) // 2], offset)
                if fn is save_file:
                    Path(args[1]).write_bytes(b"half of the tensors")
                os.kill(os.getpid(), signal.SIGKILL)
            return fn(*args, **options)

        return call

    durable.save_file = wrap(save_file)
    for name in ("pwrite", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
        setattr(os, name, wrap(getattr(os, name)))
    return count


def at_call(last: int, number: int = signal.SIGKILL) -> itertools.count[int]:
    """Send this signal at the n-th call of any function, of Python or of C: anywhere in the program."""
    count = itertools.count()

    def note(frame: FrameType, event: str, arg: object) -> None:  # noqa: ARG001
        if event in ("call", "c_call") and next(count) == last:
            os.kill(os.getpid(), number)

    sys.setprofile(note)
    return count
