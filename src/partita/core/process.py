"""What processes of Partita's own, the program and its workers, set for themselves.

The library sets nothing that others might notice.
"""

from __future__ import annotations

import contextlib
import ctypes
import os


def keep_freed_memory(limit: int = 1 << 29) -> None:
    """Let the process keep up to `limit` bytes of freed memory instead of returning them to the system.

    Clients of a large model free and take the same tens of megabytes in turn; getting them back from the
    system page by page costs a tenth of the time. glibc only; elsewhere nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        trim_threshold, map_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
        libc.mallopt(map_threshold, 1 << 25)
        libc.mallopt(trim_threshold, limit)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
