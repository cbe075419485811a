"""A client that holds a part of the model keeps that part of its optimizer's state."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import partita as pt
from partita import capacity

RUN = {"rounds": 3, "steps": 2, "batch": 4, "baselines": False, "progress": False, "seed": 1}
ADAM = {"optimizer": pt.optim.adamw(eps=1e-3), "optimizer_state": "keep", "accumulate": 2}


def data() -> pt.data.FederatedData:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(48, 4))
    return pt.data.from_arrays(x, (x[:, 0] > 0).astype(int), np.arange(48) % 4, test=0.25, seed=0)


@pytest.mark.parametrize(
    "devices",
    [capacity.depth({"strong": 0, "weak": 1}), capacity.width({"strong": 1.0, "weak": 0.5})],
    ids=["depth", "width"],
)
@pytest.mark.filterwarnings("ignore:capacity. narrow and wide models share")
def test_a_weak_client_keeps_its_part_of_the_state(devices: pt.Capacity) -> None:
    loop, vmap = (
        pt.federate(
            pt.models.mlp(4, 6, 6, 2, seed=1),
            data(),
            pt.ditto(0.05, **ADAM),
            capacity=devices,
            executor=executor,
            **RUN,
        )
        for executor in ("loop", "vmap")
    )
    weak = [row["class"] == "weak" for row in loop.clients]
    assert any(weak)
    assert not all(weak)
    for i, is_weak in enumerate(weak):
        mine, stacked = loop.client(i).memory, vmap.client(i).memory
        assert mine.keys() == stacked.keys()
        for k, value in mine.items():
            torch.testing.assert_close(value, stacked[k], rtol=0, atol=1e-6)
        for word in ("optimizer.", "optimizer_of_shared."):
            m = mine[f"{word}m.hidden1.linear.weight"]
            held = int((m.abs().sum(1) > 0).sum())
            assert held == (6 if not is_weak else 0 if devices.name == "depth" else 3)
            assert float(mine[f"{word}t.hidden1.linear.weight"]) == (6.0 if held else 0.0)
            assert float(mine[f"{word}t.output.linear.weight"]) == 6.0
