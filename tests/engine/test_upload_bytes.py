"""The bytes of a run are those that a codec writes of what clients send."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import partita as pt
from engine.passing import (
    CHAINS,
    SHORT,
    T,
    federate,
    methods,
)
from partita.core import codec
from partita.core.types import Message, Tensors
from partita.engine import channel
from reference import plain_compress as plain
from support import each


@each(
    ("method", "name"),
    [(method, name) for method in ("fedavg", "scaffold", "fedalt") for name in CHAINS],
    slow=lambda method, name: method != "fedavg" and name != SHORT,
)
def test_the_bytes_are_those_of_what_a_client_sends(method: str, name: str, monkeypatch) -> None:
    """Each message is packed, and what the server makes of the bytes is what the run goes on with."""
    sizes: list[int] = []
    way = channel.Way.__call__

    def packed(self, message: Message, publics, key: Tensor, residual: Tensors):
        arrived, lost = way(self, message, publics, key, residual)
        numbers = {k: v + residual.get(k, 0) for k, v in message.numbers.items()}
        sent, given = self.encode(Message(numbers, message.rest), publics, key, range(len(self.transforms)))
        layout = self.layout(message, publics)
        bytes_sent = codec.pack(sent, layout)
        sizes.append(len(bytes_sent))
        unpacked = self.decode(codec.unpack(bytes_sent, layout), given, key)
        for part, other in zip(arrived, unpacked):
            assert all(torch.equal(v, other[k]) for k, v in part.items())
        return arrived, lost

    monkeypatch.setattr(channel.Way, "__call__", packed)
    run = federate(methods()[method], CHAINS[name], executor="loop")
    reports = 3 * 5
    each_client = set(sizes)
    assert len(each_client) == 1
    assert run.metrics[-1]["bytes_up"] == run.summary()["bytes_up"] == reports * each_client.pop()


def test_bytes_of_devices_are_those_of_their_part() -> None:
    capacity = pt.capacity.depth({"strong": 0, "weak": 1})
    run = federate(uploads=[T.topk(0.1)], capacity=capacity, cohort=None, rounds=1)
    layers = {"hidden1": 64 * 16 + 16, "hidden2": 16 * 12 + 12, "output": 12 * 10 + 10}
    total = 0
    for row in run.clients:
        d = sum(n for k, n in layers.items() if row["class"] == "strong" or k != "hidden1")
        k = plain.count(0.1, d)
        total += 8 * k + -(-k * (d - 1).bit_length() // 8)
    assert run.summary()["bytes_up"] == total


def test_statistics_and_counters_travel_as_they_are() -> None:
    """BatchNorm's means and variances are no directions, and its counter is a whole number."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
    run = federate(model=model, uploads=[T.topk(0.01)], norm="global")
    dense = federate(model=model, norm="global", rounds=1)
    one = federate(model=model, uploads=[T.topk(0.01)], norm="global", rounds=1)
    for k in ("2.running_mean", "2.running_var", "2.num_batches_tracked"):
        torch.testing.assert_close(one.shared[k], dense.shared[k])
    d = 64 * 8 + 8 + 16 + 80 + 10
    k = plain.count(0.01, d)
    assert run.summary()["bytes_up"] == 15 * (8 * k + -(-k * 10 // 8) + 8 * 16 + 8)
    assert not any("running" in name for name in run.client(0).memory)
