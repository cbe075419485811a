"""Synchronous rounds: who comes next is known in time to read its state ahead."""

from __future__ import annotations

import pytest
import torch

import partita as pt
from partita.core.types import Cohort, ServerState
from partita.engine.store import DiskStore
from partita.schedule.base import StageSpec
from partita.schedule.clock import Clock
from support import each


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


@each("order", ["random", "turns"])
@each("cohort", [3, 7])
def test_cohorts_that_come_back_together_need_no_queue(order, cohort, monkeypatch) -> None:
    """The shorter way of a plain round has the results, and leaves the state, of the long one."""

    def rounds() -> tuple[list[Cohort], dict]:
        spec = StageSpec(7, cohort, 0, 9, 0, 1.5, lambda client: 1)  # noqa: ARG005
        schedule = pt.schedule.synchronous(order, delays=pt.schedule.delays(upload=0.1)).begin(spec)
        server = ServerState({"w": torch.zeros(3)}, {}, {}, 0)
        cohorts = [schedule.next(server._replace(version=i // 2)) for i in range(9)]  # some versions twice
        return cohorts, {k: v for k, v in vars(schedule.clock).items() if not callable(v)}

    short = rounds()
    monkeypatch.setattr(Clock, "is_plain", False)
    long = rounds()
    assert str(short) == str(long)
    assert short[0][1].staleness == (0,) * len(short[0][1].clients)
