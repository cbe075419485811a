"""What carries requests to clients and replies back. It knows nothing of what is in them."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Arrival(NamedTuple):
    """A reply that has come: who sent it, to which request, and its bytes.

    The body is empty where the transport refused the reply, because it is too large or broken.
    """

    name: str
    request: str
    body: bytes


class Transport(Protocol):
    """Carries requests to clients and replies back.

    Requests are named by whoever sends them. A client works its requests in order, and keeps them while the
    link is down. Only the first reply to a request that is waited for arrives; all others are ignored.
    """

    def present(self) -> frozenset[str]:
        """Return the names of the clients that are connected now."""
        ...

    def send(self, name: str, request: str, *body: bytes) -> None:
        """Queue a request for a client, which works its requests in order.

        Its bytes are those of these buffers, one after another. Requests of a round share the large ones: a
        transport keeps them as they are until it sends them.
        """
        ...

    def cancel(self, name: str, request: str) -> None:
        """Give up a request: nobody waits for its reply any more."""
        ...

    def receive(self, timeout: float) -> list[Arrival]:
        """Return what has come; wait up to `timeout` seconds for the first."""
        ...

    def close(self) -> None:
        """End all links."""
        ...


class Handler(Protocol):
    """The client's side: what the loop of a transport calls for each request."""

    def handle(self, body: bytes) -> bytes:
        """Return the reply to a request."""
        ...
