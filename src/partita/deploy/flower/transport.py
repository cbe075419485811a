"""The server's side: Flower's grid as a transport, on which each client is the SuperNode that has its key.

Flower delivers a message once, and keeps it in the memory of a SuperNode. What is lost with a process there
is sent again: a request names all that its answer depends on, so who is asked twice answers twice alike.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from partita.core import check
from partita.deploy.flower import messages
from partita.deploy.grpc.tls import key_fingerprint
from partita.deploy.transport import Arrival

LOOK = 1.0
"""Seconds between two looks at who is there."""
PACE = 0.2
"""Seconds between two looks for replies."""
AGAIN = 5.0
"""Seconds after which a client is asked again whose SuperNode has answered with an error."""


@dataclass
class Sent:
    """A request that is with a SuperNode: its messages, and when the SuperNode was started."""

    request: str
    body: tuple[bytes, ...]
    started: str
    messages: set[str] = field(default_factory=set)


@dataclass
class Line:
    """What one client is asked: one request at a time, the others wait here.

    quiet  the moment until which nothing is sent, after an error
    away   whether the last that was heard of it is an error
    """

    queue: collections.deque[tuple[str, tuple[bytes, ...]]] = field(default_factory=collections.deque)
    sent: Sent | None = None
    quiet: float = 0.0
    away: bool = False


class FlowerTransport:
    """Requests and replies over the grid of a Flower federation.

    grid     what Flower gives a ServerApp
    roster   the fingerprint of each client's SuperNode key, by name; nobody else is asked
    largest  bytes of the largest reply that is taken
    notice   is told the name of a client ('' for no client in particular), and what has happened
    """

    def __init__(
        self,
        grid: Any,
        roster: Mapping[str, str],
        *,
        largest: int,
        notice: Callable[[str, str], None] = lambda name, text: None,  # noqa: ARG005
    ) -> None:
        self.grid, self.largest, self.notice = grid, largest, notice
        self._names: dict[str, str] = {}
        self._roster, self._followed = dict(roster), dict[str, str]()
        self._lines: dict[str, Line] = collections.defaultdict(Line)
        self._nodes: dict[str, Any] = {}
        self._keys: dict[bytes, str] = {}
        self._looked = -LOOK
        self._strangers: set[str] = set()

    def present(self) -> frozenset[str]:
        """Return the clients whose SuperNode is connected, and has not answered with an error just now."""
        self._look()
        return frozenset(name for name in self._nodes if not self._is_away(name))

    def send(self, name: str, request: str, *body: bytes) -> None:
        """Queue a request for a client."""
        self._lines[name].queue.append((request, body))

    def cancel(self, name: str, request: str) -> None:
        """Give up a request; a SuperNode that has it already works it for nobody."""
        line = self._lines[name]
        line.queue = collections.deque(item for item in line.queue if item[0] != request)
        if line.sent is not None and line.sent.request == request:
            line.sent = None

    def receive(self, timeout: float) -> list[Arrival]:
        """Send what is next, and return what has come; wait up to `timeout` seconds for the first."""
        end = time.monotonic() + timeout
        while True:
            self._look()
            for name, node in self._nodes.items():
                self._send_next(name, node)
            arrivals = self._arrivals()
            left = end - time.monotonic()
            if arrivals or left <= 0:
                return arrivals
            time.sleep(min(PACE, left))

    def revise(self, roster: Mapping[str, str]) -> None:
        """Follow a new roster at the next look; another thread may say it. Others are asked nothing more."""
        self._roster = dict(roster)

    def close(self) -> None:
        """Forget all requests."""
        self._lines.clear()

    # ---- who is there

    def _look(self) -> None:
        """Find the SuperNodes of the roster, by the keys with which they have signed in."""
        if self._followed is not self._roster:
            self._followed = roster = self._roster
            self._names, self._looked = {key: name for name, key in roster.items()}, -LOOK
            for name in self._lines.keys() - roster.keys():
                del self._lines[name]
        if time.monotonic() - self._looked < LOOK:
            return
        found = {}
        for node in self.grid.get_nodes():
            key = self._fingerprint(node.public_key)
            if key in self._names:
                found[self._names[key]] = node
            elif key not in self._strangers:
                self._strangers.add(key)
                self.notice("", f"SuperNode {node.node_id} has the key {key}, which is not on the roster")
        for name in sorted(found.keys() ^ self._nodes.keys()):
            self.notice(name, "its SuperNode is there" if name in found else "its SuperNode has gone")
        self._nodes, self._looked = found, time.monotonic()

    def _fingerprint(self, key: bytes) -> str:
        """Return the fingerprint of a public key; '' for one that cannot be read."""
        if key not in self._keys:
            try:
                self._keys[key] = key_fingerprint(key)
            except ValueError:
                self._keys[key] = ""
        return self._keys[key]

    def _is_away(self, name: str) -> bool:
        """Return whether a client cannot be asked now, though its SuperNode is there."""
        line = self._lines[name]
        asked = bool(line.queue or line.sent)
        return line.away and (asked or time.monotonic() < line.quiet)

    # ---- messages

    def _send_next(self, name: str, node: Any) -> None:
        """Send a client its next request, or what was lost when its SuperNode started again."""
        line = self._lines[name]
        if line.sent is not None and line.sent.started != node.last_activated_at:
            self.notice(name, "its SuperNode has started again; it is asked again")
            line.sent.started = node.last_activated_at
            self._push(name, line, node)
        elif line.sent is None and line.queue and time.monotonic() >= line.quiet:
            line.sent = Sent(*line.queue.popleft(), node.last_activated_at)
            self._push(name, line, node)

    def _push(self, name: str, line: Line, node: Any) -> None:
        assert line.sent is not None
        ids = list(self.grid.push_messages([messages.request(b"".join(line.sent.body), node.node_id)]))
        if ids and ids[0]:
            line.sent.messages.add(ids[0])
        else:
            self._failed(name, line, "Flower has not taken a request")

    def _failed(self, name: str, line: Line, reason: str) -> None:
        """Ask again later."""
        assert line.sent is not None
        self.notice(name, f"{reason}; it is asked again in {AGAIN:g} s")
        line.queue.appendleft((line.sent.request, line.sent.body))
        line.sent, line.away, line.quiet = None, True, time.monotonic() + AGAIN

    def _arrivals(self) -> list[Arrival]:
        """Return the replies that have come; an error of Flower's is none."""
        waiting = {
            message: name for name, line in self._lines.items() if line.sent for message in line.sent.messages
        }
        arrivals = []
        for message in self.grid.pull_messages(list(waiting)) if waiting else ():
            name = waiting.get(message.metadata.reply_to_message_id)
            line = self._lines[name] if name is not None else None
            if name is None or line is None or line.sent is None:
                continue
            if message.has_error():
                self._lost(name, line, message)
            else:
                line.away = False
                body = messages.reply_of(message, self.largest)
                arrivals.append(Arrival(name, line.sent.request, body))
                line.sent = None
        return arrivals

    def _lost(self, name: str, line: Line, message: Any) -> None:
        """Take an error of Flower's; what was sent a second time may still be answered."""
        assert line.sent is not None
        line.sent.messages.discard(message.metadata.reply_to_message_id)
        if not line.sent.messages:
            reason = check.shortened(str(message.error.reason))
            self._failed(name, line, f"Flower reports error {int(message.error.code)}: {reason}")
