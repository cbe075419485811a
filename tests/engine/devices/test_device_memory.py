"""What a run says that a device needs: to train its part, and to let its samples pass the frozen pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from torch import nn

import partita as pt
from capacity.weak import convs, digits, mlp
from partita import capacity
from partita.core.parts import Capacity

BATCH = 8


def classes(model: nn.Module, devices: Capacity, **options) -> dict:
    work = {"rounds": 1, "steps": 1, "batch": BATCH, "baselines": False, "norm": "global"} | options
    run = pt.federate(model, digits(), pt.fedavg(lr=0.1), capacity=devices, **work)
    told = run.summary()["classes"]
    for row in run.clients:
        assert (row["memory"], row["capacity"]) == (
            told[row["class"]]["memory"],
            told[row["class"]]["capacity"],
        )
    return told


def test_the_frozen_dense_layer_of_the_weak_counts() -> None:
    """A layer 64 x 300 that a weak device passes, and ten outputs that it trains."""
    model = pt.models.mlp(64, 300, 10)
    found = classes(model, capacity.depth({"strong": 0, "weak": 1}))
    first, last = 64 * 300 + 300, 300 * 10 + 10
    whole = 2 * (first + last) + 2 * BATCH * 310
    assert found["strong"]["memory"] == 4 * whole
    assert found["weak"]["memory"] == 4 * (first + BATCH * (64 + 300))
    assert found["weak"]["memory"] > 4 * (2 * last + 2 * BATCH * 10)
    assert found["weak"]["capacity"] == pytest.approx((2 * last + 2 * BATCH * 10) / whole, abs=1e-6)


@pytest.mark.parametrize("pieces", [1, 2])
def test_as_many_blocks_as_a_device_holds_at_a_time(pieces: int) -> None:
    sizes = (64, 50, 40, 30, 10)
    model = pt.models.mlp(*sizes)
    found = classes(model, capacity.depth({"strong": 0, "weak": 3}, pieces=pieces))
    weights = [a * b + b for a, b in pairwise(sizes)]
    flows = [a + b for a, b in pairwise(sizes)]
    groups = [(0,), (1,), (2,)] if pieces == 1 else [(0, 1), (2,)]
    passing = [sum(weights[i] for i in g) + BATCH * max(flows[i] for i in g) for g in groups]
    assert found["weak"]["memory"] == 4 * max(passing) > 4 * (2 * weights[3] + 2 * BATCH * 10)


@pytest.mark.parametrize("model", [mlp, convs])
@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.filterwarnings("ignore:norm")
def test_runs_and_tables_agree(model, cut: int) -> None:
    """Also with BatchNorm, whose counters are of 8 bytes while its numbers are of 4."""
    table = capacity.memory(model(), (8, 8), BATCH)
    found = classes(model(), capacity.depth({"strong": 0, "weak": cut}, pieces=1))
    assert found["strong"]["memory"] == table.needed() == table.bytes()
    assert found["weak"]["memory"] == table.needed(cut) >= table.bytes(cut)
    assert found["weak"]["capacity"] == pytest.approx(table.after(cut).capacity, abs=1e-6)
    assert capacity.fit(model(), found["weak"]["memory"], (8, 8), BATCH) <= cut


def test_a_narrow_model_has_no_pieces() -> None:
    found = classes(mlp(), capacity.width({"strong": 1.0, "weak": 0.5}))
    assert found["weak"]["memory"] == capacity.memory(pt.models.mlp(64, 16, 8, 10), (8, 8), BATCH).bytes()


def test_the_paper_s_weak_femnist_client_needs_26_megabytes() -> None:
    table = capacity.memory(pt.models.leaf_cnn(), (28, 28))
    assert table.bytes(3) == 1_016_800
    assert table.needed(3) == 4 * (6_424_576 + 64 * 7 * 7 + 2048) == 25_719_040
    assert round(table.after(3).capacity, 2) == 0.02  # as in the paper's Table 1
