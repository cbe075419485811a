"""Synchronous rounds: who comes next is known in time to read its state ahead."""

from __future__ import annotations

import pytest
import torch

import partita as pt
from partita.engine.store import DiskStore


@pytest.mark.parametrize("order", ["random", "turns"])
def test_states_of_the_next_cohort_are_read_ahead(order, tmp_path, monkeypatch) -> None:
    """Expected are those whom the next round loads, but for those who change in this one."""
    told: list[tuple[str, list[int]]] = []
    load, expect = DiskStore.load, DiskStore.prefetch

    def loads(store, clients):
        told.append(("load", sorted(clients)))
        return load(store, clients)

    def expects(store, clients):
        told.append(("prefetch", sorted(clients)))
        expect(store, clients)

    monkeypatch.setattr(DiskStore, "load", loads)
    monkeypatch.setattr(DiskStore, "prefetch", expects)
    options = {
        "rounds": 6,
        "cohort": 3,
        "batch": 8,
        "baselines": False,
        "evaluate_every": 100,
        "schedule": pt.schedule.synchronous(order=order),
    }
    data, method = pt.data.digits(clients=12), pt.fedalt(personal="output", lr=0.1)
    model = pt.models.mlp(64, 8, 10)
    found = pt.federate(model, data, method, store="disk", out=tmp_path, **options)
    rounds = [clients for what, clients in told if what == "prefetch"]
    assert len(rounds) == 6
    loaded = [told[i + 1][1] for i, (what, _) in enumerate(told[:-1]) if what == "prefetch"]
    for now, soon, expected in zip(loaded, loaded[1:], rounds):
        assert expected == [c for c in soon if c not in now]
    memory = pt.federate(model, data, method, store="memory", **options)
    assert all(torch.equal(found.shared[k], v) for k, v in memory.shared.items())
