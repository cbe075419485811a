"""A transport within one process: clients answer when the server waits. For tests, trials and demos."""

from __future__ import annotations

import time
from collections.abc import Mapping

from partita.deploy.transport import Arrival, Handler

PAUSE_SECONDS = 0.01


class Local:
    """Clients in this process, by name. When the server waits, all that was asked is answered, in order.

    So all turns take the same time, as those of a simulation without delays do.
    """

    def __init__(self, clients: Mapping[str, Handler]) -> None:
        self.clients = dict(clients)
        self._queue: list[tuple[str, str, tuple[bytes, ...]]] = []

    def present(self) -> frozenset[str]:
        """Return the names of all clients."""
        return frozenset(self.clients)

    def send(self, name: str, request: str, *body: bytes) -> None:
        """Queue a request."""
        self._queue.append((name, request, body))

    def cancel(self, name: str, request: str) -> None:
        """Forget a request, if it was not worked yet."""
        self._queue = [item for item in self._queue if item[:2] != (name, request)]

    def receive(self, timeout: float) -> list[Arrival]:
        """Let clients work all that was asked of them, and return the replies."""
        queue, self._queue = self._queue, []
        there = [item for item in queue if item[0] in self.clients]
        if not there:
            time.sleep(min(timeout, PAUSE_SECONDS))  # something else may happen meanwhile
        self._queue = [item for item in queue if item[0] not in self.clients]
        return [Arrival(name, request, self._worked(name, body)) for name, request, body in there]

    def _worked(self, name: str, body: tuple[bytes, ...]) -> bytes:
        """Return what a client replies."""
        return self.clients[name].handle(b"".join(body))

    def close(self) -> None:
        """Forget all requests."""
        self._queue.clear()
