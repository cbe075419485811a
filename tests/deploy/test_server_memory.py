"""A server holds the model once for a round, however many clients are to receive it."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from cable import Echo, Net, replies, until
from deployed import Recorded, experiment

import partita as pt
from partita.deploy import Local
from partita.deploy.grpc import frames
from partita.deploy.server import serve

CLIENTS, BYTES = 50, 4_000_000
LARGE = pt.models.logistic(BYTES // 8 - 1, 2)


class Full(Exception):
    """Ends a run when all requests of a round wait."""


class Waiting(Recorded):
    """A transport that looks at what waits when a whole cohort has been asked."""

    peak = 0

    def send(self, name: str, request: str, *body: bytes) -> None:
        Local.send(self, name, request, *body)
        if len(body[1]) >= BYTES and not tracemalloc.is_tracing():
            tracemalloc.start()
        if len([item for item in self._queue if len(item[2][1]) >= BYTES]) == CLIENTS:
            self.peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            raise Full

    def receive(self, timeout: float) -> list:  # type: ignore[type-arg]
        return Local.receive(self, timeout)


def test_requests_of_a_round_share_the_model() -> None:
    x = np.zeros((4, BYTES // 8 - 1), dtype="float32")
    data = pt.data.from_arrays(x, np.arange(4) % 2, np.zeros(4, dtype=int), test=0.5)
    made = experiment(model=LARGE, data=data, algorithm=pt.fedavg(0.1), rounds=1, evaluate_every=1)
    names = [f"c{i}" for i in range(CLIENTS)]
    transport = Waiting(dict.fromkeys(names))  # who is never asked
    with pytest.raises(Full):
        serve(made, pt.data.Population.make([2] * CLIENTS, names=names), transport, None, report=False)
    bodies = [body[1] for *_, body in transport._queue]
    assert len(bodies) == CLIENTS
    assert len({id(body) for body in bodies}) == 1
    assert transport.peak < BYTES


def test_what_waits_for_a_link_is_shared_too(net: Net) -> None:
    transport, model = net.server(), bytes(range(256)) * (BYTES // 256)
    for number in range(CLIENTS):
        transport.send("a", str(number), f"head {number}".encode(), model)
    waiting = transport._desks["a"].requests
    until(lambda: len(waiting) == CLIENTS)
    assert all(body[1] is model for body in waiting.values())
    for number in range(3, CLIENTS):
        transport.cancel("a", str(number))
    net.client("a", transport.port, Echo())
    found = replies(transport, 3)
    assert all(arrival.body == f"head {arrival.request}".encode() + model for arrival in found)


def test_buffers_are_cut_as_one_message_is() -> None:
    """Whatever their lengths are, all frames but the last are as long as one may be."""
    rng = np.random.default_rng(0)
    for lengths in ([], [0], [5], [5, 0, 7], [frames.PIECE], [3, 2 * frames.PIECE - 3], [9, frames.PIECE, 8]):
        buffers = [rng.bytes(n) for n in lengths]
        assert list(frames.message("one", *buffers)) == list(frames.message("one", b"".join(buffers)))
        pieces = [frames.unpacked(f).piece for f in frames.message("one", *buffers)]
        assert b"".join(pieces) == b"".join(buffers)
        assert all(len(piece) == frames.PIECE for piece in pieces[:-1])
