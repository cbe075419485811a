"""A transport within one process: clients answer when the server waits. For tests, trials and demos."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from partita.deploy.transport import Arrival, Handler


class Local:
    """Clients in this process, by name. Each works one request whenever the server waits, in turn."""

    def __init__(self, clients: Mapping[str, Handler]) -> None:
        self.clients = dict(clients)
        self._queues: dict[str, deque[tuple[str, bytes]]] = {name: deque() for name in clients}

    def present(self) -> frozenset[str]:
        """Return the names of all clients."""
        return frozenset(self.clients)

    def send(self, name: str, request: str, body: bytes) -> None:
        """Queue a request."""
        self._queues.setdefault(name, deque()).append((request, body))

    def cancel(self, name: str, request: str) -> None:
        """Forget a request, if it has not been worked."""
        queue = self._queues.get(name, deque())
        self._queues[name] = deque(item for item in queue if item[0] != request)

    def receive(self, timeout: float) -> list[Arrival]:  # noqa: ARG002 (nobody needs to wait)
        """Let each client work its first request, and return the replies."""
        arrivals = []
        for name, client in self.clients.items():
            if self._queues.get(name):
                request, body = self._queues[name].popleft()
                arrivals.append(Arrival(name, request, client.handle(body)))
        return arrivals

    def close(self) -> None:
        """Forget all requests."""
        self._queues.clear()
