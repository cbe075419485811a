"""The virtual clock: who leaves, who arrives, deadlines and quorums, stragglers, who is active."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import partita as pt
from partita.core.types import Cohort, ServerState
from partita.schedule import StageSpec
from support import each

S = pt.schedule


def begin(schedule: Any, clients: int, cohort: int | None = None, rounds: int = 10**6, seed: int = 0) -> Any:
    spec = StageSpec(clients, cohort or clients, 0, rounds, seed, 0.0, lambda _: 10)
    schedule.check(clients, cohort or clients)
    return schedule.of(pt.fedavg(lr=0.1)).begin(spec)


def server(version: int) -> ServerState:
    return ServerState({"w": torch.tensor(float(version))}, {}, {}, version)


def cohorts(turns: Any, count: int) -> list[Cohort]:
    return [turns.next(server(v)) for v in range(count)]


PAPER = S.delays(download=S.uniform(0.5, 1.5), upload=S.scaled(S.uniform(0.5, 1.5), S.uniform(4, 6)))


@settings(max_examples=60, deadline=None)
@given(
    clients=st.integers(1, 9),
    share=st.floats(0.1, 1),
    buffer=st.integers(1, 9),
    dropout=st.sampled_from([0.0, 0.5]),
    most=st.sampled_from([None, 0, 2]),
    order=st.sampled_from(["random", "same"]),
    length=st.sampled_from([0.0, 1.0, S.exponential(1.0), S.uniform(0, 2)]),
    seed=st.integers(0, 5),
)
def test_what_always_holds(
    clients: int,
    share: float,
    buffer: int,
    dropout: float,
    most: int | None,
    order: str,
    length: Any,
    seed: int,
) -> None:
    at_work = max(1, int(share * clients))
    buffer = min(buffer, at_work if order == "same" else clients)
    delays = S.delays(upload=length, dropout=dropout)
    asked = S.asynchronous(at_work, buffer, delays=delays, max_staleness=most, order=order)
    turns = begin(asked, clients, seed=seed)
    time, had = 0.0, Counter[int]()
    for version in range(12):
        cohort = turns.next(server(version))
        assert len(cohort.clients) == buffer == len(set(cohort.clients))
        assert cohort.time >= time
        time = cohort.time
        there = [f.client for f in turns.clock.flights]
        assert len(set(there)) == len(there) <= at_work
        assert not set(there) & set(cohort.clients)
        assert set(turns.clock.models) == {f.version for f in turns.clock.flights}
        assert most is None or max(cohort.staleness) <= most
        places = sorted(p for g in cohort.groups for p in g.positions)
        assert places == list(range(buffer))
        for group in cohort.groups:  # what each has is the model of the version it asked for
            assert float(group.download.shared["w"]) == group.download.version
            for place in group.positions:
                assert cohort.staleness[place] == version - group.download.version
                had[cohort.clients[place]] += 1
        if order == "same":
            assert len(had) <= at_work


@settings(max_examples=40, deadline=None)
@given(
    deadline=st.sampled_from([None, 0.0, 0.5, 3.0]),
    quorum=st.sampled_from([1, 3, 0.5, 1.0]),
    late=st.sampled_from(["drop", "apply"]),
    dropout=st.sampled_from([0.0, 0.6]),
    order=st.sampled_from(["random", "turns"]),
)
def test_synchronous_rounds_end_when_they_should(
    deadline: float | None, quorum: int | float, late: str, dropout: float, order: str
) -> None:
    delays = S.delays(upload=S.exponential(2.0), dropout=dropout)
    more = {} if deadline is None else {"deadline": deadline, "quorum": quorum, "late": late}
    turns = begin(S.synchronous(order, delays=delays, **more), 10, 4)
    now = 0.0
    for version in range(15):
        cohort = turns.next(server(version))
        in_time = [d for d, age in zip(cohort.delays, cohort.staleness) if age == 0]
        sent = len(in_time) + len(cohort.late) + len(cohort.lost)
        wanted = 4 if deadline is None else quorum if isinstance(quorum, int) else int(np.ceil(quorum * 4))
        took = cohort.time - now
        if deadline is not None and took > deadline + 1e-9:  # only to wait for the quorum
            assert len(in_time) <= wanted
        if deadline is None:
            assert sent == 4 or order == "turns"  # the last turn of all clients may be short
            assert not cohort.late
        if late == "drop":
            assert set(cohort.staleness) <= {0}
            assert not turns.in_flight().clients
        now = cohort.time


def test_a_late_upload_is_applied_in_the_round_in_which_it_arrives() -> None:
    delays = S.delays(upload=S.scaled(1.0, [1.0, 1.0, 2.5]))
    turns = begin(S.synchronous(delays=delays, deadline=1.0, late="apply", staleness="sqrt"), 3)
    first, second, third = cohorts(turns, 3)
    assert (first.clients, second.clients) == ((0, 1), (0, 1))  # the third is still at work
    assert (third.clients, third.staleness) == ((2, 0, 1), (2, 0, 0))
    assert turns.discount(2) == pytest.approx(3**-0.5)
    dropped = begin(S.synchronous(delays=delays, deadline=1.0), 3)
    assert [c.late for c in cohorts(dropped, 3)] == [(2,)] * 3


def test_everybody_is_lost() -> None:
    """A round without any upload is over when all have failed to answer; the run goes on."""
    data = pt.data.digits(clients=4, seed=0)
    run = pt.federate(
        pt.models.mlp(64, 8, 10),
        data,
        pt.fedalt("output", lr=0.1),
        rounds=30,
        cohort=1,
        steps=2,
        batch=8,
        schedule=S.synchronous(delays=S.delays(upload=1.0, dropout=0.7)),
        evaluate_every=1,
        baselines=False,
    )
    lost = run.summary()["clock"]["lost"]
    assert 10 < lost < 30
    assert sum(c["reports"] for c in run.clients) == 30 - lost
    assert sum(c["lost"] for c in run.clients) == lost
    assert run.summary()["clock"]["time"] == 30


def test_whoever_is_idle_comes_next_with_the_same_probability() -> None:
    turns = begin(S.asynchronous(3, delays=S.delays(upload=S.exponential(1.0))), 8)
    seen = Counter(c for cohort in cohorts(turns, 4000) for c in cohort.clients)
    expected = 4000 / 8
    assert max(abs(seen[c] - expected) for c in range(8)) < 5 * expected**0.5


def test_the_choice_among_idle_ones_is_exact() -> None:
    clock = begin(S.asynchronous(1), 9).clock
    clock.busy = [0, 3, 4, 8]
    assert [clock._idle(i) for i in range(5)] == [1, 2, 5, 6, 7]


def test_cost_follows_those_at_work() -> None:
    """A million clients, five of them at work: nothing is as long as the clients are many."""
    turns = begin(S.asynchronous(5, delays=PAPER), 10**6)
    cohorts(turns, 50)
    assert len(turns.clock.busy) <= 5
    assert max(len(v) for v in vars(turns.clock).values() if hasattr(v, "__len__")) <= 5


# ---- stragglers


def rate(turns: Any, count: int) -> float:
    return count / cohorts(turns, count)[-1].time


@pytest.mark.parametrize("order", ["random", "same"])
def test_a_straggler_does_not_slow_the_asynchronous_server(order: str) -> None:
    """Ten times slower than the others: the server steps at least 90 % as often."""
    factor = [1.0] * 30
    slow = [10.0, *factor[1:]]

    def asked(own: list[float]) -> Any:
        delays = S.delays(download=S.uniform(0.5, 1.5), upload=S.scaled(S.uniform(4, 6), own))
        return begin(S.asynchronous(24, delays=delays, order=order), 30)

    assert rate(asked(slow), 3000) > 0.9 * rate(asked(factor), 3000)


def test_a_deadline_keeps_a_straggler_from_holding_up_a_round() -> None:
    def asked(own: list[float], **options: Any) -> Any:
        delays = S.delays(upload=S.scaled(S.uniform(4, 6), own))
        return begin(S.synchronous(delays=delays, **options), 10)

    slow = [10.0] + [1.0] * 9
    usual = rate(asked([1.0] * 10), 50)
    assert rate(asked(slow), 50) < usual / 5
    for late in ("drop", "apply"):
        assert rate(asked(slow, deadline=6.0, late=late), 50) >= min(usual, 1 / 6.0) * 0.99
    turns = asked(slow, deadline=6.0)
    for cohort in cohorts(turns, 20):
        assert (len(cohort.clients), cohort.late) == (9, (0,))


def test_asynchronous_clients_are_more_active() -> None:
    """30 clients and the paper's delays: over three times the share at work of ten per synchronous round."""

    def active(turns: Any, count: int) -> float:
        found = cohorts(turns, count)
        return sum(c.activity for c in found) / (found[-1].time * 30)

    synchronous = active(begin(S.synchronous(delays=PAPER), 30, 6), 100)
    at_once = active(begin(S.asynchronous(24, delays=PAPER), 30), 1000)
    assert at_once == pytest.approx(0.8, abs=0.01)
    assert at_once > 3 * synchronous


def test_activity_is_the_time_between_request_and_arrival() -> None:
    turns = begin(S.synchronous(delays=S.delays(upload=S.scaled(1.0, [1.0, 2.0, 4.0]))), 3)
    cohort = turns.next(server(0))
    assert (cohort.time, cohort.activity) == (4.0, 7.0)
    turns = begin(S.synchronous(delays=S.delays(upload=S.scaled(1.0, [1.0, 2.0, 4.0])), deadline=3.0), 3)
    cohort = turns.next(server(0))
    assert (cohort.time, cohort.activity, cohort.late) == (3.0, 6.0, (2,))


def test_the_end_of_time() -> None:
    """No server step after it, and looking ahead changes nothing."""
    asked = S.asynchronous(5, delays=PAPER)
    free = begin(asked, 10)
    ended = begin(S.asynchronous(5, delays=PAPER, until=40.0), 10)
    version = 0
    while not ended.done(server(version)):
        assert ended.next(server(version)).time == free.next(server(version)).time <= 40.0
        version += 1
    assert version > 10
    assert free.next(server(version)).time > 40.0


def test_time_that_is_up_before_anyone_reports() -> None:
    data = pt.data.digits(clients=4, seed=0)
    schedule = S.synchronous(delays=S.delays(upload=5.0), until=1.0)
    with pytest.warns(UserWarning, match="until=1: stage 1 ends before anyone can report"):
        run = pt.federate(pt.models.mlp(64, 10), data, pt.fedavg(0.1), rounds=3, schedule=schedule)
    assert run.summary()["rounds"] == 0
    assert "0 rounds" in str(run.summary())


def test_a_clock_goes_on_from_its_state() -> None:
    asked = S.asynchronous(4, 2, delays=S.delays(upload=S.exponential(1.0), dropout=0.3), order="random")
    straight = begin(asked, 9)
    found = cohorts(straight, 20)
    first = begin(asked, 9)
    for v in range(7):
        first.next(server(v))
    second = begin(asked, 9)
    second.load_state(first.state())
    assert [second.next(server(v))[:1] for v in range(7, 20)] == [c[:1] for c in found[7:]]
    assert second.state() == straight.state()


@each(
    ("make", "field"),
    [
        (lambda: S.synchronous(deadline=1.0), "deadline"),
        (lambda: S.synchronous(deadline=-1.0, delays=PAPER), "deadline"),
        (lambda: S.synchronous(quorum=0), "quorum"),
        (lambda: S.synchronous(quorum=3, delays=PAPER), "quorum"),
        (lambda: S.synchronous(late="apply", delays=PAPER), "late"),
        (lambda: S.synchronous(delays=PAPER, deadline=1.0, staleness="sqrt"), "staleness"),
        (lambda: S.delays(speed=3.0), "speed"),
        (lambda: S.synchronous(quorum=1.5), "quorum"),
        (lambda: S.synchronous(late="maybe"), "late"),
        (lambda: S.synchronous(staleness="root"), "staleness"),
        (lambda: S.synchronous(until=0), "until"),
        (lambda: S.asynchronous(0), "concurrency"),
        (lambda: S.asynchronous(buffer=0), "buffer"),
        (lambda: S.asynchronous(delays=3.0), "delays"),
        (lambda: S.asynchronous(order="turns"), "order"),
        (lambda: S.asynchronous(max_staleness=-1), "max_staleness"),
        (lambda: begin(S.asynchronous(11), 10), "concurrency"),
        (lambda: begin(S.synchronous(delays=PAPER, deadline=1.0, quorum=5), 10, 4), "quorum"),
        (lambda: begin(S.asynchronous(delays=S.delays(upload=[1.0, 2.0])), 3), "upload"),
    ],
)
def test_wrong_schedules_are_named(make: Any, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        make()
