"""A server step needs a quorum of usable uploads; a round without it is abandoned, and counted."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import partita as pt
from partita import schedule
from partita.cli import tables
from partita.core.parts import Algorithm
from partita.core.types import Cohort, ServerState
from partita.engine.callbacks import Callback, Event
from partita.schedule import asynchronous, delays, exponential, synchronous
from partita.schedule.clock import Clock, ClockedSchedule

CLIENTS, HALF = 10, 5
# clients 0 to 4 never report
HALF_LOST = delays(upload=exponential(1.0), dropout=[1 - 1e-12] * HALF + [0.0] * HALF)
NOBODY = delays(upload=exponential(1.0), dropout=1 - 1e-12)


def run(method: Algorithm | None = None, **options: Any) -> pt.Run:
    data = pt.data.digits(clients=CLIENTS, partition=pt.data.label_skew(classes=3), test=0.4)
    usual = {"rounds": 4, "steps": 2, "batch": 8, "baselines": False, "evaluate_every": 1}
    return pt.federate(pt.models.mlp(64, 8, 10), data, method or pt.fedavg(lr=0.1), **{**usual, **options})


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(torch.equal(v, b[k]) for k, v in a.items())


def late_for(quorum: int | float) -> schedule.Synchronous:
    return synchronous(delays=HALF_LOST, deadline=100.0, quorum=quorum)


@pytest.mark.parametrize("method", [pt.scaffold(lr=0.1), pt.fedadam(lr=0.1, server_lr=0.1)])
def test_without_its_quorum_a_round_changes_nothing(method) -> None:
    """Server's model, its optimizer and extras, and what clients keep; with the quorum met they change."""
    with pytest.warns(UserWarning, match="all 4 rounds were abandoned"):
        short = run(method, schedule=late_for(HALF + 1))
    start = dict(pt.models.mlp(64, 8, 10).named_parameters())
    assert same(short.shared, {k: v.detach() for k, v in start.items()})
    assert not len(short.store.touched)
    assert short.summary()["clock"]["abandoned"] == 4 == short.summary()["rounds"]
    assert [row["abandoned"] for row in short.metrics] == [1, 2, 3, 4]

    met = run(method, schedule=late_for(HALF))
    assert met.summary()["clock"]["abandoned"] == 0
    assert not same(met.shared, short.shared)


@pytest.mark.parametrize(("quorum", "abandoned"), [(0.5, 0), (0.51, 4)])
def test_a_share_is_of_those_who_were_asked(quorum, abandoned) -> None:
    schedule = late_for(quorum)
    if abandoned:
        with pytest.warns(UserWarning, match="abandoned"):
            found = run(schedule=schedule)
    else:
        found = run(schedule=schedule)
    assert found.summary()["clock"]["abandoned"] == abandoned


@pytest.mark.parametrize("attack", [pt.attack.nonfinite(), pt.attack.malformed()])
def test_uploads_that_are_set_aside_do_not_count(attack) -> None:
    """Everyone reports, but three of ten are unusable; personal parts of an abandoned round are not kept."""
    options = {"attack": attack, "byzantine": [0, 1, 2], "method": pt.fedalt(personal="output", lr=0.1)}
    timely = delays(upload=exponential(1.0))
    with pytest.warns(UserWarning, match="abandoned"):
        short = run(schedule=synchronous(delays=timely, deadline=100.0, quorum=8), **options)
    assert short.summary()["clock"]["abandoned"] == 4
    assert not len(short.store.touched)
    met = run(schedule=synchronous(delays=timely, deadline=100.0, quorum=7), **options)
    assert met.summary()["clock"]["abandoned"] == 0
    assert len(met.store.touched) >= 7


def test_a_quorum_that_is_met_changes_no_bits() -> None:
    """States wait for the end of the round, and then are what they would have been."""
    timely, method = delays(upload=exponential(1.0)), pt.fedalt(personal="output", lr=0.1)
    one, many = (
        run(method, schedule=synchronous(delays=timely, deadline=100.0, quorum=q)) for q in (1, CLIENTS)
    )
    assert same(one.shared, many.shared)
    assert same(one.client(3).personal, many.client(3).personal)
    assert np.array_equal(one.scores(), many.scores())


def test_in_parts_too(monkeypatch) -> None:
    """A cohort that does not fit into one block is saved as a whole, or not at all."""
    monkeypatch.setattr("partita.engine.stage.BLOCK_CLIENTS", 3)
    method, timely = pt.fedalt(personal="output", lr=0.1), delays(upload=exponential(1.0))
    found = run(method, schedule=synchronous(delays=timely, deadline=100.0, quorum=CLIENTS))
    assert len(found.store.touched) == CLIENTS
    with pytest.warns(UserWarning, match="abandoned"):
        short = run(method, schedule=late_for(HALF + 1))
    assert not len(short.store.touched)


def test_uploads_of_earlier_rounds_count_where_few_are_free() -> None:
    """late='apply': the server asks those who are free, and waits for so many uploads all the same."""
    waits = delays(upload=[1.0] * 3 + [7.0] * 7)
    made = synchronous(delays=waits, deadline=1.0, quorum=3, late="apply")
    turns = made.begin(schedule.StageSpec(CLIENTS, 8, 0, 20, 0, 0.0, steps=lambda _: 1))
    for version in range(20):
        cohort = turns.next(ServerState({}, {}, {}, version))
        assert cohort.quorum == 3
        assert len(cohort.clients) >= 3


def test_in_turns_the_last_cohort_may_be_smaller_than_the_quorum() -> None:
    found = run(
        rounds=6,
        cohort=4,
        schedule=synchronous("turns", delays=delays(upload=1.0), deadline=2.0, quorum=3),
    )
    assert found.summary()["clock"]["abandoned"] == 0


def test_a_quorum_above_the_cohort_is_refused() -> None:
    with pytest.raises(ValueError, match="quorum=6: expected a whole number from 1 up to 5"):
        run(cohort=5, schedule=synchronous(delays=delays(upload=1.0), deadline=1.0, quorum=6))


def test_some_rounds_are_abandoned_and_a_resumed_run_counts_on(tmp_path) -> None:
    """Everywhere that people look: metrics, summary, terminal, report, progress."""
    some = delays(upload=exponential(1.0), dropout=0.4)
    options = {"rounds": 12, "schedule": synchronous(delays=some, deadline=100.0, quorum=6)}
    told: list[int] = []

    class Heard(Callback):
        def round(self, event: Event) -> None:
            told.append(event.abandoned)

    straight = run(**options, callbacks=[Heard()])
    count = straight.summary()["clock"]["abandoned"]
    assert 0 < count < 12
    assert told[-1] == count == straight.metrics[-1]["abandoned"]
    assert f"{count} of 12 rounds abandoned" in str(straight.summary())
    assert f"{count} of 12 rounds abandoned" in str(tables.scores(straight, straight.summary()).caption)
    # the others are server steps
    clock = straight.summary()["clock"]
    assert clock["updates_per_time"] == pytest.approx((12 - count) / clock["time"])

    class Stop(Callback):
        def round(self, event: Event) -> None:
            if event.round == 7:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(**options, out=tmp_path / "run", callbacks=[Stop()])
    resumed = run(**options, out=tmp_path / "run", resume=True)
    assert resumed.summary()["clock"] == clock
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["clock"]["abandoned"] == count
    assert same(resumed.shared, straight.shared)
    assert "rounds abandoned" in (tmp_path / "run" / "report.html").read_text()


# ---- nobody reports


@pytest.mark.parametrize("until", [None, 30.0])
@pytest.mark.parametrize("kind", [synchronous, asynchronous])
def test_a_run_in_which_nobody_reports_ends(kind, until, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules[asynchronous.__module__], "MOST_FRUITLESS", 50)
    with pytest.warns(UserWarning, match="rounds were abandoned"):
        found = run(rounds=500 if until else 5, cohort=5, schedule=kind(delays=NOBODY, until=until))
    clock = found.summary()["clock"]
    assert clock["abandoned"] == found.summary()["rounds"] > 0
    assert clock["lost"] > 0
    assert until is None or (clock["time"] <= until and clock["abandoned"] < 500)


def test_without_a_patch_the_search_is_bounded_too() -> None:
    """Time passes `until` before the server gives up: no step is possible."""
    with pytest.warns(UserWarning, match=r"ends before anyone can report.*smaller dropout"):
        found = run(cohort=5, schedule=asynchronous(delays=NOBODY, until=3.0))
    assert found.summary()["rounds"] == 0


def test_the_first_ctrl_c_stops_a_run_in_which_nobody_reports(monkeypatch) -> None:
    monkeypatch.setattr(sys.modules[asynchronous.__module__], "MOST_FRUITLESS", 50)
    rounds: list[int] = []

    class Stop(Callback):
        def round(self, event: Event) -> None:
            rounds.append(event.round)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(rounds=10**6, cohort=5, schedule=asynchronous(delays=NOBODY), callbacks=[Stop()])
    assert rounds == [1]


def test_a_buffer_that_does_not_fill_is_used_as_it_is(monkeypatch) -> None:
    """Five clients report once and their uploads wait in the buffer; all others are lost."""
    monkeypatch.setattr(sys.modules[asynchronous.__module__], "MOST_FRUITLESS", 50)
    found = run(rounds=3, schedule=asynchronous(concurrency=CLIENTS, buffer=CLIENTS, delays=HALF_LOST))
    assert found.summary()["clock"]["abandoned"] == 0
    assert [row["reports"] for row in found.clients] == [0] * HALF + [3] * HALF


# ---- a client twice


@dataclass(frozen=True)
class Twice:
    """A schedule of a user's own that names a client twice."""

    delays: schedule.Delays
    staleness: str | None = None
    until: float | None = None

    def check(self, clients: int, cohort: int) -> None:
        """Fits all."""

    def of(self, algorithm: Algorithm) -> Twice:  # noqa: ARG002
        return self

    def begin(self, spec: schedule.StageSpec) -> RunningTwice:
        return RunningTwice(self, spec, Clock(spec.clients, spec.seed, self.delays, spec.steps, spec.time))


class RunningTwice(ClockedSchedule[Twice]):
    def next(self, server: ServerState) -> Cohort:
        landed = self.clock.send(server, [2, 7, 4, 7])
        return self.clock.cohort(server.version, [self.clock.land() for _ in landed], [], [])


def test_a_client_that_a_schedule_names_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"client 7 .*2 times.*expected each client once"):
        run(schedule=Twice(delays(upload=1.0)))
