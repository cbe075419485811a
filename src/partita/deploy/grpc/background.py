"""The event loop of gRPC: one in a process, in a thread of its own, for servers and clients alike.

gRPC hands the events of all loops to each of them, so that one that has ended would fail the others.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any


@functools.cache
def loop() -> asyncio.AbstractEventLoop:
    """Return the loop, which runs from the first call until the process ends."""
    background = asyncio.new_event_loop()
    threading.Thread(target=background.run_forever, name="partita-grpc", daemon=True).start()
    return background


def start(work: Coroutine[Any, Any, None]) -> Future[None]:
    """Begin work on the loop."""
    return asyncio.run_coroutine_threadsafe(work, loop())
