"""Ctrl-C while the command is still loading: it stops with exit code 130, and says nothing of where it was.

Imported before all else of the package, and of no effect where Partita is a library of another program.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path
from types import FrameType

STOPPED = 130


def is_command() -> bool:
    """Return whether this process is `partita` or `python -m partita.cli`."""
    as_module = ("-m", "partita.cli") in itertools.pairwise(sys.orig_argv)
    return as_module or (bool(sys.argv) and Path(sys.argv[0]).stem == "partita")


def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    """End at once: nothing has begun, and a library that tries to import another may lose an exception."""
    os._exit(STOPPED)


def loaded() -> None:
    """Let Ctrl-C be what it is in every program from here on."""
    if signal.getsignal(signal.SIGINT) is stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, stop)
