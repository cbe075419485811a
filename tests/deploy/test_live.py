"""Schedules on real time: deadlines and quorums, who is slow, who is gone."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from deployed import (
    Recorded,
    assert_same,
    bits_of_deployment,
    bits_of_simulation,
    clients_of,
    deployed,
    experiment,
    simulated,
    without_times,
)
from test_faults import without_bob

import partita as pt
import small
from algorithms.test_every_algorithm import SINGLE
from partita.core.check import Refused
from partita.deploy import Arrival, Client, Local, fleet, serve
from partita.deploy.wire import unpack
from support import each

BRIEFLY = 0.05


class Silent(Recorded):
    """Bob hears what he is asked to train, and never answers."""

    def __init__(self, clients: Mapping[str, Client]) -> None:
        super().__init__(clients)
        self.change = lambda arrival: [] if _is(arrival, "bob", "upload") else [arrival]


def _is(arrival: Arrival, name: str, kind: str) -> bool:
    return arrival.name == name and unpack(arrival.body, 1 << 30)[0]["kind"] == kind


# ---- synchronous


def test_a_deadline_leaves_out_who_is_late(tmp_path: Path) -> None:
    run, clients = deployed(experiment(), tmp_path, Silent, out=None, deadline=BRIEFLY, patience=BRIEFLY)
    assert_same(run.shared, without_bob())
    assert run.facts["clock"]["late"] == 3
    assert run.facts["clock"]["abandoned"] == 0
    assert run.facts["excluded"] == []  # he has done nothing wrong
    assert run.store.touched.tolist() == [0, 2]
    assert list(clients["bob"].folder.glob("*/state-*"))  # what he computed is on his disk, and never used


@each("quorum, abandoned", [(2, 0), (3, 3), (0.6, 0), (0.7, 3), (1.0, 3)])
def test_a_round_below_its_quorum_is_abandoned(quorum: Any, abandoned: int, tmp_path: Path) -> None:
    terms: dict[str, Any] = {"deadline": BRIEFLY, "quorum": quorum, "patience": BRIEFLY}
    run, _ = deployed(experiment(), tmp_path, Silent, out=None, **terms)
    assert run.facts["clock"]["abandoned"] == abandoned
    if not abandoned:
        assert_same(run.shared, without_bob())
        return
    assert run.outcome is not None
    initial = run.outcome.state.initial
    assert_same(run.shared, {k: initial[k] for k in run.shared})  # weights unchanged
    assert run.store.touched.tolist() == []  # and so are the states


def test_a_signal_ends_a_server_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a deadline it would wait for ever; then it goes on where its checkpoint is."""

    class Interrupted(Silent):
        looks = 0

        def receive(self, timeout: float) -> list[Arrival]:
            self.looks += 1
            if self.looks == 8:
                signal.raise_signal(signal.SIGINT)
            return super().receive(timeout)

    monkeypatch.setattr(fleet, "GRACE_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        deployed(experiment(), tmp_path, Interrupted)
    run, clients = deployed(experiment(), tmp_path, resume=True)
    assert_same(bits_of_simulation(simulated(experiment())), bits_of_deployment(run, clients))


def test_a_late_reply_is_nobodys(tmp_path: Path) -> None:
    """Bob's reply to a round comes when the next one has begun."""

    class Slow(Recorded):
        def __init__(self, clients: Mapping[str, Client]) -> None:
            super().__init__(clients)
            self._late: list[Arrival] = []

        def receive(self, timeout: float) -> list[Arrival]:
            arrivals = super().receive(timeout)
            slow = [a for a in arrivals if _is(a, "bob", "upload")]
            others = [a for a in arrivals if a not in slow]
            if others and not slow:  # something else has been asked since
                others, self._late = [*self._late, *others], []
            self._late += slow
            return others

    run, _ = deployed(experiment(), tmp_path, Slow, out=None, deadline=BRIEFLY, patience=BRIEFLY)
    assert_same(run.shared, without_bob())
    assert run.outcome is not None
    elsewhere: Any = run.outcome.stage.setup.elsewhere
    assert elsewhere.ignored > 0


def test_evaluation_skips_who_is_not_there(tmp_path: Path) -> None:
    class Absent(Recorded):
        """Bob trains, and is away whenever scores are asked for; cy says nothing of hers."""

        def present(self) -> frozenset[str]:
            training = any(unpack(b"".join(body), 1 << 30)[0]["kind"] == "train" for *_, body in self._queue)
            enrolled = len(self.messages) > 12
            return frozenset(self.clients) - ({"bob"} if enrolled and not training else set())

        def receive(self, timeout: float) -> list[Arrival]:
            return [a for a in super().receive(timeout) if not _is(a, "cy", "scores")]

    made = experiment()
    run, _ = deployed(made, tmp_path, Absent, out=None, patience=BRIEFLY)
    alone = simulated(made)
    assert_same(run.shared, alone.shared)  # nobody is set aside for it
    scores = run.scores("personal")
    assert [math.isnan(score) for score in scores] == [False, True, True]
    assert scores[0] == alone.scores("personal")[0]
    sizes, row = made.data.sizes("test"), run.metrics[-1]
    assert row["test.personal"] == pytest.approx(scores[0] * sizes[0] / sizes[0])


@each("order", ["random", "turns"])
def test_the_same_cohorts_as_in_a_simulation(order: str, tmp_path: Path) -> None:
    schedule = pt.schedule.synchronous(order, delays=pt.schedule.delays(upload=3.0), deadline=50.0)
    made = experiment(data=SINGLE, model=pt.models.mlp(6, 5, 4, seed=1), cohort=3, rounds=4)
    made = experiment(data=SINGLE, model=made.model, cohort=3, rounds=4, schedule=schedule)
    run, clients = deployed(made, tmp_path, out=None)
    assert_same(bits_of_simulation(simulated(made)), bits_of_deployment(run, clients))


# ---- asynchronous


METHODS = {
    "fedasync": pt.fedasync(0.1),
    "fedbuff": pt.fedbuff(0.1, buffer=2),
    "fedalt": pt.fedalt("output", 0.1),
    "scaffold": pt.scaffold(0.1),
}
SCHEDULES = {
    "plain": pt.schedule.asynchronous(concurrency=3),
    "buffer": pt.schedule.asynchronous(concurrency=3, buffer=2, staleness="inverse"),
    "same": pt.schedule.asynchronous(concurrency=4, order="same", max_staleness=1),
}


@each("name", METHODS, slow=lambda name: name in ("fedbuff", "scaffold"))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_asynchronous_equals_its_simulation(name: str, schedule: str, tmp_path: Path) -> None:
    """Where all turns take the same time, as they do in this process."""
    shape = {"data": SINGLE, "model": pt.models.mlp(6, 5, 4, seed=1), "rounds": 7, "evaluate_every": 4}
    made = experiment(algorithm=METHODS[name], schedule=SCHEDULES[schedule], **shape)
    run, clients = deployed(made, tmp_path, out=None)
    alone = simulated(made)
    assert_same(bits_of_simulation(alone), bits_of_deployment(run, clients))
    assert without_times(alone) == without_times(run)


class Slowly(Recorded):
    """Bob's uploads take so many looks longer than all others."""

    looks = 5

    def __init__(self, clients: Mapping[str, Client]) -> None:
        super().__init__(clients)
        self._late: list[tuple[int, Arrival]] = []
        self._look = 0

    def receive(self, timeout: float) -> list[Arrival]:
        self._look += 1
        arrivals = super().receive(timeout)
        slow = [a for a in arrivals if _is(a, "bob", "upload")]
        self._late += [(self._look + self.looks, a) for a in slow]
        due = [a for look, a in self._late if look <= self._look]
        self._late = [item for item in self._late if item[0] > self._look]
        return [*[a for a in arrivals if a not in slow], *due]


def test_a_round_without_a_deadline_waits_for_who_has_gone(tmp_path: Path) -> None:
    """However short the patience is: the round has all of its cohort, when the client is back."""

    class Back(Slowly):
        looks = 20

        def present(self) -> frozenset[str]:
            return frozenset(self.clients) - ({"bob"} if self._late else set())

    made = experiment()
    run, clients = deployed(made, tmp_path, Back, out=None, patience=BRIEFLY)
    assert run.facts["clock"]["lost"] == run.facts["clock"]["late"] == 0
    assert_same(bits_of_simulation(simulated(made)), bits_of_deployment(run, clients))


def test_a_slow_client_is_heard(tmp_path: Path) -> None:
    made = experiment(schedule=pt.schedule.asynchronous(concurrency=3), rounds=24, evaluate_every=24)
    run, _ = deployed(made, tmp_path, Slowly, out=None, patience=BRIEFLY)
    assert 1 in run.store.touched
    reports = run.table.numbers("reports")
    assert 1 <= reports[1] < reports[0]
    assert run.facts["clock"]["staleness"]["max"] >= 4
    assert run.facts["clock"]["lost"] == 0


def test_who_is_gone_does_not_hold_up_the_others(tmp_path: Path) -> None:
    class Gone(Silent):
        def present(self) -> frozenset[str]:
            enrolled = any(unpack(b, 1 << 30)[0]["kind"] == "train" for b in self.messages)
            return frozenset(self.clients) - ({"bob"} if enrolled else set())

    made = experiment(schedule=pt.schedule.asynchronous(concurrency=1), rounds=6, evaluate_every=6)
    run, _ = deployed(made, tmp_path, Gone, out=None, patience=BRIEFLY)
    assert run.facts["rounds"] == 6
    assert run.facts["clock"]["lost"] > 0  # he was chosen, and given up
    assert set(run.store.touched.tolist()) <= {0, 2}


# ---- clients that come later


@each("name", ["fedalt", "ditto", "fedavg", "perfedavg"], slow=lambda name: name in ("fedavg", "perfedavg"))
def test_who_comes_later_is_personalized_by_the_methods_rule(name: str, tmp_path: Path) -> None:
    method = {"fedalt": pt.fedalt("output", 0.1)}.get(name) or getattr(pt, name)(0.1)
    data = small.data()
    made = experiment(algorithm=method, data=data.subset([0, 1]))
    clients = {**clients_of(made, tmp_path), "cy": Client(made, "cy", data, tmp_path / "cy")}
    run = serve(made, ["ann", "bob"], Local(clients), None, report=False)
    alone = simulated(made)
    assert_same(run.shared, alone.shared)  # it has no part in training
    assert_same(alone.personalize(data.subset([2])).personalized(0), clients["cy"].model())
    assert run.outcome is not None
    elsewhere: Any = run.outcome.stage.setup.elsewhere
    expected = alone.personalize(data.subset([2])).scores("personal")[0]
    assert elsewhere.newcomers["cy"]["scores"]["accuracy"] == expected


# ---- what is refused


REFUSED: dict[str, dict[str, Any]] = {
    "attack": {"attack": pt.attack.sign_flip(), "byzantine": ["bob"]},
    "newcomers": {"newcomers": ["bob"]},
    "measures": {"measures": [pt.measures.gradient_norm()]},
    "keep": {"keep": "best"},
    "until": {"schedule": pt.schedule.synchronous(until=3.0)},
    "stragglers": {"schedule": pt.schedule.synchronous(stragglers=0.5)},
    "late": {
        "schedule": pt.schedule.synchronous(delays=pt.schedule.delays(), deadline=1.0, late="apply"),
    },
    "choose": {"schedule": pt.schedule.synchronous(choose=pt.schedule.power_of_choice(d=3)), "cohort": 2},
    "norm": {
        "norm": "static",
        "model": torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)),
        "algorithm": pt.fedavg(0.1),
    },
}


@each("field", REFUSED)
def test_what_is_of_simulations_is_refused_by_name(field: str, tmp_path: Path) -> None:
    made = experiment(**REFUSED[field])
    with pytest.raises(Refused) as error:
        deployed(made, tmp_path, out=None)
    assert error.value.field == field
    assert "among real clients" in str(error.value)


def test_wrong_terms_are_refused(tmp_path: Path) -> None:
    for field, value in (
        ("deadline", -1),
        ("patience", 0),
        ("quorum", 0),
        ("quorum", 4),
        ("quorum", 1.5),
        ("quorum", True),
    ):
        with pytest.raises(Refused) as error:
            deployed(experiment(), tmp_path, out=None, **{field: value})
        assert error.value.field == field


def test_what_happens_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="partita"):
        deployed(experiment(), tmp_path, Silent, out=None, deadline=BRIEFLY, patience=BRIEFLY)
    assert any("bob" in record.getMessage() for record in caplog.records)
