"""Who is away, at the end and before: who is waited for and for how long, who is left out, what is said."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deployed import (
    Recorded,
    assert_same,
    bits_of_deployment,
    bits_of_simulation,
    clients_of,
    deployed,
    experiment,
    simulated,
)
from test_deployed_recovery import Kill, Killed
from test_faults import without_bob
from test_live import _is

import partita as pt
from partita.core.check import Refused
from partita.deploy import Arrival, Client, Local, serve
from partita.deploy.wire import unpack
from partita.engine.callbacks import Callback, Event
from partita.recipes.experiment import Experiment
from support import each

NAMES = ["ann", "bob", "cy"]
NOT_TOLD = "client bob has not got its model (not connected): start it, then the server again with --resume"


class Leaving(Recorded):
    """A transport whose bob is away between two moments; what he was asked waits for him, as over a link."""

    leaves, returns = float("inf"), float("inf")

    def away(self) -> bool:
        return self.leaves <= time.monotonic() < self.returns

    def present(self) -> frozenset[str]:
        return frozenset(self.clients) - ({"bob"} if self.away() else set())

    def receive(self, timeout: float) -> list[Arrival]:
        waits = [item for item in self._queue if self.away() and item[0] == "bob"]
        self._queue = [item for item in self._queue if item not in waits]
        arrivals = super().receive(timeout)
        self._queue = [*waits, *self._queue]
        return arrivals

    def leave(self, seconds: float = float("inf")) -> None:
        self.leaves = time.monotonic()
        self.returns = self.leaves + seconds


class AtEnd(Callback):
    """Does something when the rounds are over."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action

    def end(self, what: str) -> None:  # noqa: ARG002
        self.action()


class After(Callback):
    """Does something after a round."""

    def __init__(self, number: int, action: Callable[[], None]) -> None:
        self.number, self.action = number, action

    def round(self, event: Event) -> None:
        if event.round == self.number:
            self.action()


def leaving(
    made: Experiment, folder: Path, seconds: float, **options: Any
) -> tuple[float, dict[str, Client]]:
    """Run an experiment whose bob leaves for so long at the end; return how long that end took."""
    transports: list[Leaving] = []
    began: list[float] = []

    def made_of(clients: Mapping[str, Client]) -> Leaving:
        transports.append(Leaving(clients))
        return transports[-1]

    def gone() -> None:
        transports[-1].leave(seconds)
        began.append(time.monotonic())

    _, clients = deployed(made, folder, made_of, callbacks=[AtEnd(gone)], **options)
    return time.monotonic() - began[0], clients


# ---- at the end


def test_who_is_away_for_a_moment_at_the_end_gets_its_model(tmp_path: Path) -> None:
    seconds, clients = leaving(experiment(), tmp_path, 0.5, patience=20.0)
    assert 0.4 < seconds < 10
    assert_same(clients["bob"].model(), simulated(experiment()).personalized(1))


def test_who_is_away_at_the_end_gets_its_model_when_the_server_is_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = experiment()
    with caplog.at_level(logging.WARNING, logger="partita"):
        seconds, clients = leaving(made, tmp_path, 60.0, patience=0.3)
    assert seconds < 10
    assert NOT_TOLD in caplog.text
    with pytest.raises(Refused, match="start this client, then the server again with --resume"):
        clients["bob"].model()
    fresh = clients_of(made, tmp_path)
    transport = Leaving({"bob": fresh["bob"]})  # the others have ended long ago, and are not waited for
    transport.leave(0.5)
    begin = time.monotonic()
    serve(made, NAMES, transport, tmp_path / "out", resume=True, patience=20.0, report=False, progress=False)
    assert 0.4 < time.monotonic() - begin < 10
    assert_same(fresh["bob"].model(), simulated(made).personalized(1))
    begin = time.monotonic()
    serve(made, NAMES, Local({}), tmp_path / "out", resume=True, patience=20.0, report=False, progress=False)
    assert time.monotonic() - begin < 5  # all have theirs


def test_a_client_that_is_killed_when_it_is_told_the_end(tmp_path: Path) -> None:
    """It is told again when it is back, in the same run of the server."""
    made = experiment()

    class Dying(Leaving):
        deaths = 0

        def receive(self, timeout: float) -> list[Arrival]:
            arrivals = super().receive(timeout)
            told = [a for a in arrivals if _is(a, "bob", "last")]
            if told and not self.deaths:
                self.deaths += 1
                self.leave(0.3)
                (path,) = (tmp_path / "clients" / "1").glob("*/last")
                path.unlink()
                self.clients["bob"] = clients_of(made, tmp_path)["bob"]
                body = next(m for m in self.messages if _asks(m, told[0].request))
                self._queue.append(("bob", told[0].request, (body,)))  # a link sends again what has no reply
                return [a for a in arrivals if a not in told]
            return arrivals

    deployed(made, tmp_path, Dying, patience=20.0)
    assert_same(clients_of(made, tmp_path)["bob"].model(), simulated(made).personalized(1))


def _asks(message: bytes, request: str) -> bool:
    return unpack(message, 1 << 30)[0].get("id") == request


# ---- taken out of the roster


class Revoked(Recorded):
    """Bob hears what he is asked after the first round, and answers nothing."""

    silent = 0.0

    def receive(self, timeout: float) -> list[Arrival]:
        return [a for a in super().receive(timeout) if not (self.silent and a.name == "bob")]


@each("when", ["in a round", "between rounds"])
@each("schedule", ["synchronous", "asynchronous"])
def test_who_is_revoked_is_lost_at_once(
    when: str, schedule: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a deadline; his line is taken out while he is at work, or before he is asked."""
    schedules = {"synchronous": pt.schedule.synchronous(), "asynchronous": pt.schedule.asynchronous(buffer=3)}
    made = experiment(schedule=schedules[schedule], rounds=8, evaluate_every=8)
    transport = Revoked(clients_of(made, tmp_path / when / schedule))
    wait = 0.5 if when == "in a round" else 0.0

    def admitted() -> list[str]:
        out = transport.silent and time.monotonic() >= transport.silent + wait
        return ["ann", "cy"] if out else NAMES

    def silence() -> None:
        transport.silent = time.monotonic()

    options: dict[str, Any] = {"callbacks": [After(1, silence)], "report": False, "enrolment": 1.0}
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="partita"):
        run = serve(made, NAMES, transport, None, admitted=admitted, **options)
    assert time.monotonic() - begin < 20
    assert run.facts["rounds"] == 8
    assert run.facts["clock"]["abandoned"] == 0
    assert "client bob: not on the roster any more" in caplog.text
    assert "has not got its model" not in caplog.text
    if when == "in a round":
        assert run.facts["clock"]["lost"] == 1
    asked = [unpack(m, 1 << 30)[0] for m in transport.messages]
    assert sum(h["kind"] == "train" and h["number"] == 1 for h in asked) <= 3
    assert list(transport.clients["bob"].folder.glob("*/state-*"))  # what he has stays on his disk


def test_a_run_goes_on_with_a_shorter_roster(tmp_path: Path) -> None:
    """The others keep their numbers; who comes back under his name has his own again."""
    made = experiment(checkpoint_every=1, rounds=6)
    clients = clients_of(made, tmp_path)
    options: dict[str, Any] = {"report": False, "progress": False}
    with pytest.raises(Killed):
        serve(made, NAMES, Local(clients), tmp_path / "out", callbacks=[Kill(2)], **options)
    for wrong in (["dan", "eve"], ["cy", "ann"]):
        with pytest.raises(Refused, match="clients of the run in the same order"):
            serve(made, wrong, Local(clients), tmp_path / "out", resume=True, **options)
    two = {name: one for name, one in clients.items() if name != "bob"}
    states = {path: path.read_bytes() for path in clients["bob"].folder.glob("*/state-*")}
    with pytest.raises(Killed):
        serve(made, list(two), Local(two), tmp_path / "out", resume=True, callbacks=[Kill(4)], **options)
    assert {path: path.read_bytes() for path in clients["bob"].folder.glob("*/state-*")} == states
    transport = Recorded(clients)
    run = serve(made, NAMES, transport, tmp_path / "out", resume=True, **options)
    asked = [unpack(m, 1 << 30)[0] for m in transport.messages]
    addresses = [h["address"] for h in asked if h["kind"] == "train" and h["number"] == 1]
    assert [address[1] for address in addresses] == [0, 3, 4]  # from where he was when he was left out
    assert run.facts["clients"] == 3
    assert run.facts["excluded"] == []


def test_who_is_revoked_before_anything_is_as_who_never_answers(tmp_path: Path) -> None:
    made = experiment()
    clients = clients_of(made, tmp_path)
    with pytest.raises(Killed):
        serve(
            replace(made, checkpoint_every=3),
            NAMES,
            Local(clients),
            tmp_path / "out",
            callbacks=[Kill(1)],
            report=False,
        )
    two = {name: one for name, one in clients.items() if name != "bob"}
    again = replace(made, checkpoint_every=3)
    run = serve(again, list(two), Local(two), tmp_path / "out", resume=True, report=False)
    assert_same(run.shared, without_bob())


# ---- away while at work


def test_patience_counts_from_when_a_client_has_gone(tmp_path: Path) -> None:
    """A link that breaks for a moment, in a turn that takes longer than the server's patience."""

    class Slow(Leaving):
        held: tuple[Arrival, ...] = ()
        since = 0.0

        def receive(self, timeout: float) -> list[Arrival]:
            arrivals = super().receive(timeout)
            slow = tuple(a for a in arrivals if _is(a, "bob", "upload"))
            if slow and not self.since:
                self.held, self.since = slow, time.monotonic()
                return [a for a in arrivals if a not in slow]
            if self.held and time.monotonic() > self.since + 1.0 and self.leaves == float("inf"):
                self.leave(0.2)
            if self.held and time.monotonic() > self.since + 1.5:
                arrivals, self.held = [*arrivals, *self.held], ()
            return arrivals

    made = experiment(schedule=pt.schedule.asynchronous(concurrency=3, buffer=3), evaluate_every=3)
    run, clients = deployed(made, tmp_path, Slow, out=None, patience=0.6)
    assert run.facts["clock"]["lost"] == 0
    assert_same(bits_of_simulation(simulated(made)), bits_of_deployment(run, clients))


# ---- how long a run may take


@each("silence", ["silent", "away"])
def test_a_run_is_over_within_its_deadlines(silence: str, tmp_path: Path) -> None:
    """Bob never answers anything again, connected or not; all rounds and 10 s are enough."""

    class Frozen(Recorded):
        frozen = False

        def present(self) -> frozenset[str]:
            return frozenset(self.clients) - ({"bob"} if self.frozen and silence == "away" else set())

        def receive(self, timeout: float) -> list[Arrival]:
            arrivals = super().receive(timeout)
            self.frozen = self.frozen or any(_is(a, "bob", "upload") for a in arrivals)
            return [a for a in arrivals if not (self.frozen and a.name == "bob")]

    deadline, rounds = 0.5, 4
    transports: list[Frozen] = []

    def made_of(clients: Mapping[str, Client]) -> Frozen:
        transports.append(Frozen(clients))
        return transports[-1]

    begin = time.monotonic()
    made = experiment(rounds=rounds, evaluate_every=rounds)
    run, _ = deployed(made, tmp_path, made_of, out=None, deadline=deadline, patience=1.0)
    assert rounds * deadline <= time.monotonic() - begin < rounds * deadline + 10
    assert run.facts["rounds"] == rounds
    assert run.facts["clock"]["late"] == rounds
    heads = [unpack(m, 1 << 30)[0] for m in transports[0].messages]
    asked = [h["version"] for h in heads if h["kind"] == "score" and h.get("number") == 1]
    assert asked.count(rounds) == (silence == "silent")  # one question, of several, is waited for
