"""Synchronous rounds: who comes next is known in time to read its state ahead."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import partita as pt
from partita.core.check import Refused
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


@each("order", ["random", "turns", "cyclic", "poisson"])
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


def cohorts(order: str, clients: int, cohort: int, rounds: int, seed: int = 0) -> list[tuple[int, ...]]:
    spec = StageSpec(clients, cohort, 0, rounds, seed, 0.0, lambda client: 1)  # noqa: ARG005
    schedule = pt.schedule.synchronous(order).begin(spec)
    return [
        tuple(schedule.next(ServerState({"w": torch.zeros(1)}, {}, {}, t)).clients) for t in range(rounds)
    ]


def test_a_chance_of_each_client() -> None:
    """Sizes are binomial, every client comes as often as any other, and two of them come independently."""
    found = cohorts("poisson", 40, 10, 4000)
    sizes = np.array([len(c) for c in found])
    assert sizes.mean() == pytest.approx(10, abs=0.15)
    assert sizes.var() == pytest.approx(40 * 0.25 * 0.75, rel=0.08)
    there = np.zeros((4000, 40))
    for t, clients in enumerate(found):
        there[t, list(clients)] = 1
    assert np.abs(there.mean(0) - 0.25).max() < 0.03
    pairs = np.corrcoef(there.T)[np.triu_indices(40, 1)]
    assert abs(pairs.mean()) < 0.002  # fixed sizes would give −1/39
    assert np.abs(pairs).max() < 0.07


def test_the_cohort_is_everyone_where_the_chance_is_one() -> None:
    assert all(sorted(c) == list(range(9)) for c in cohorts("poisson", 9, 9, 5))


def test_a_fixed_order_lets_clients_rest_longest() -> None:
    """With 10 clients and cohorts of 3, whoever comes in round t comes again in round t + 4."""
    found = cohorts("cyclic", 10, 3, 12)
    assert found[:4] == found[4:8] == found[8:]
    assert sorted(c for cohort in found[:4] for c in cohort) == list(range(10))
    shuffled = cohorts("turns", 10, 3, 12)
    assert shuffled[:4] != shuffled[4:8]


@each(
    "order, expected",
    [
        ("poisson", (0.25, 100, 1)),
        ("random", (None, 100, 1)),
        ("turns", (None, 25, 1)),
        ("cyclic", (None, 25, 4)),
    ],
)
def test_what_a_schedule_promises(order, expected) -> None:
    """100 rounds of 10 of 40 clients: chance, most turns, rounds from one turn to the next."""
    assert pt.schedule.synchronous(order).participation(40, 10, 100) == expected
    if expected[1] < 100:
        turns = np.bincount([c for cohort in cohorts(order, 40, 10, 100) for c in cohort])
        assert turns.max() <= expected[1]


def test_late_uploads_keep_no_promise() -> None:
    delays = pt.schedule.delays(upload=pt.schedule.exponential(2.0))
    schedule = pt.schedule.synchronous("poisson", delays=delays, deadline=1.0, late="apply")
    assert schedule.participation(40, 10, 100) == (None, 100, None)


@each("first", [True, False])
def test_turns_in_rounds_that_begin_anywhere(first) -> None:
    """A later stage may begin in the middle of an order, and have the end of one and the next one."""
    found = cohorts("turns", 10, 4, 60)
    schedule = pt.schedule.synchronous("turns")
    for length in range(1, 9):
        starts = [0] if first else range(60 - length)
        most = max(np.bincount(np.concatenate(found[t : t + length])).max() for t in starts)
        assert schedule.participation(10, 4, length, first=first)[1] == most
    assert schedule.participation(10, 4, 0, first=first)[1] == 0


def by_chance(rounds: int = 200, cohort: int = 40, **options) -> list[Cohort]:
    spec = StageSpec(40, cohort, 0, rounds, 0, 0.0, lambda client: 1)  # noqa: ARG005
    schedule = pt.schedule.synchronous("poisson", **options).begin(spec)
    return [schedule.next(ServerState({"w": torch.zeros(1)}, {}, {}, t)) for t in range(rounds)]


def test_by_chance_an_upload_counts_whoever_else_is_late() -> None:
    """The server waits for nobody beyond the deadline: whether it did would depend on another client."""
    upload = pt.schedule.exponential(2.0)
    found = by_chance(cohort=2, delays=pt.schedule.delays(upload=upload), deadline=0.5)
    assert any(c.late and not c.clients for c in found)
    for cohort in found:
        assert all(delay <= 0.5 for delay in cohort.delays)
    with pytest.raises(Refused) as refused:
        pt.schedule.synchronous("poisson", delays=pt.schedule.delays(upload=upload), deadline=0)
    assert refused.value.field == "deadline"


def test_by_chance_clients_straggle_by_a_chance_of_their_own() -> None:
    """A fixed share would let one client decide that another one is late: counts are binomial."""
    late = np.array([len(c.late) for c in by_chance(400, stragglers=0.3)])
    assert late.mean() == pytest.approx(12, abs=0.5)
    assert late.var() == pytest.approx(40 * 0.3 * 0.7, rel=0.25)
