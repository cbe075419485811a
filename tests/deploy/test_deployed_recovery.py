"""Killed, restarted, resumed, asked twice, answered out of order: the same bits."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deployed import (
    Bits,
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

import partita as pt
from algorithms.test_every_algorithm import SINGLE
from partita.core.check import Refused
from partita.deploy import Arrival, Client, Local, serve
from partita.deploy.states import States
from partita.deploy.wire import unpack
from support import each

LR = 0.1
PIPELINE = pt.pipeline(
    pt.stage(pt.fedavg(LR), rounds=2),
    pt.stage(pt.fedalt("output", LR), rounds=2, cohort=2),
    pt.stage(pt.ditto(LR), rounds=2, cohort=3),
    pt.stage(pt.finetune("all", LR), epochs=1),
)
ASYNCHRONOUS = pt.schedule.asynchronous(concurrency=3, buffer=2)
DATA = SINGLE.subset([0, 1, 4, 5])
RUNS: dict[str, dict[str, Any]] = {
    "fedavg": {"algorithm": pt.fedavg(LR)},
    "fedalt": {"algorithm": pt.fedalt("output", LR)},
    "scaffold": {"algorithm": pt.scaffold(LR)},
    "feedback": {"algorithm": pt.fedavg(LR), "uploads": [pt.transforms.topk(0.3)]},
    "asynchronous": {"algorithm": pt.fedalt("output", LR), "schedule": ASYNCHRONOUS},
    "pipeline": {"algorithm": PIPELINE},
    "private": {
        "algorithm": pt.fedalt("output", LR, weighting="uniform"),
        "uploads": [pt.privacy.gaussian(noise=0.5, clip=0.2, quantile=0.5), pt.transforms.topk(0.3)],
    },
}
"""States of each kind: none, a personal part, a memory, one of compression, in flight, in stages; secrets."""
SECRET = 7
every_run = each("name", RUNS, slow=lambda name: name in ("fedavg", "scaffold"))


def made_of(name: str) -> Any:
    own = RUNS[name]
    rounds = None if name == "pipeline" else 5
    shape = {"model": pt.models.mlp(6, 5, 4, seed=1), "data": DATA, "rounds": rounds, "cohort": 3}
    return experiment(**{**shape, **({"cohort": None} if name == "pipeline" else {}), **own})


@cache
def plain(name: str) -> tuple[Any, Bits, list[dict[str, Any]]]:
    """The experiment of a name, its bits and its rows without any accident: those of its simulation."""
    with tempfile.TemporaryDirectory() as folder:
        made = made_of(name)
        run, clients = deployed(made, Path(folder), out=None, secret=SECRET)
        bits = bits_of_deployment(run, clients)
        if made.uploads and any(t.release is not None for t in made.uploads):
            return made, bits, without_times(run)  # a simulation has other noise
        alone = simulated(made)
        assert_same(bits_of_simulation(alone), bits)
        assert without_times(alone) == without_times(run)
        for i, client in enumerate(clients.values()):
            assert_same(alone.personalized(i), client.model())
        return made, bits, without_times(run)


class Killed(BaseException):
    """Ends a process of these tests."""


class Kill(pt.callbacks.Callback):
    def __init__(self, after: int) -> None:
        self.after = after

    def round(self, event: Any) -> None:
        if event.round == self.after:
            raise Killed


@every_run
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_server_that_was_killed_goes_on(name: str, every: int, tmp_path: Path) -> None:
    """Its clients are new processes, too; rounds after the last checkpoint are taken again."""
    made, bits, rows = plain(name)
    for after in (1, 3):
        clients = clients_of(made, tmp_path)
        options = {"resume": after == 3, "callbacks": [Kill(after)], "report": False, "secret": SECRET}
        with pytest.raises(Killed):
            serve(
                replace(made, checkpoint_every=every),
                list(clients),
                Local(clients),
                tmp_path / "out",
                **options,
            )
    clients = clients_of(made, tmp_path)
    run = serve(
        replace(made, checkpoint_every=every),
        list(clients),
        Local(clients),
        tmp_path / "out",
        resume=True,
        report=False,
    )
    assert_same(bits, bits_of_deployment(run, clients))
    assert without_times(run) == rows


class Mortal(Recorded):
    """A transport whose clients die while they train, and come back with their disks."""

    made: Any
    folder: Path
    when = "before"
    deaths = 0

    def receive(self, timeout: float) -> list[Arrival]:  # noqa: ARG002
        queue, self._queue = self._queue, []
        arrivals = []
        for name, request, body in queue:
            if unpack(b"".join(body), 1 << 30)[0]["kind"] == "train" and self.deaths % 3 != 2:
                self._die(name, b"".join(body))
            self.deaths += 1
            arrivals.append(Arrival(name, request, self._worked(name, body)))
        return arrivals

    def _die(self, name: str, body: bytes) -> None:
        """Let a client work a request up to some point, and begin anew with its disk alone."""
        save = States.save

        def dying(self: States, *arguments: Any) -> None:
            if Mortal.when == "after":
                save(self, *arguments)
            raise Killed

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(States, "save", dying)
            with contextlib.suppress(Killed):
                self.clients[name].handle(body)
        self.clients[name] = clients_of(self.made, self.folder)[name]


@each("name", ["fedalt", "feedback", "asynchronous"], slow=lambda name: name == "fedalt")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_client_that_is_killed_around_saving(name: str, when: str, tmp_path: Path) -> None:
    made, bits, _ = plain(name)
    kind = type("MortalNow", (Mortal,), {"made": made, "folder": tmp_path})
    Mortal.when = when
    run, _ = deployed(made, tmp_path, kind, out=None)
    assert_same(bits, bits_of_deployment(run, clients_of(made, tmp_path)))


class Twice(Recorded):
    """Each request comes twice, the second time when others have been worked; so does each reply."""

    def __init__(self, clients: Mapping[str, Client]) -> None:
        super().__init__(clients)
        self._old: list[tuple[str, tuple[bytes, ...]]] = []

    def receive(self, timeout: float) -> list[Arrival]:
        self._old += [(name, body) for name, _, body in self._queue]
        arrivals = super().receive(timeout)
        for name, body in self._old[-4:]:  # of rounds before, too
            self._worked(name, body)
        return [*arrivals, *arrivals]


@every_run
def test_asked_twice(name: str, tmp_path: Path) -> None:
    made, bits, _ = plain(name)
    run, clients = deployed(made, tmp_path, Twice, out=None, secret=SECRET)
    assert_same(bits, bits_of_deployment(run, clients))


class Shuffled(Recorded):
    """Replies come one at a time and in any order."""

    def __init__(self, clients: Mapping[str, Client]) -> None:
        super().__init__(clients)
        self._there: list[Arrival] = []
        self._rng = np.random.default_rng(1)

    def receive(self, timeout: float) -> list[Arrival]:
        self._there += super().receive(timeout)
        if not self._there:
            return []
        return [self._there.pop(int(self._rng.integers(len(self._there))))]


@each("name", ["fedalt", "feedback", "pipeline"], slow=lambda name: name == "pipeline")
def test_answered_out_of_order(name: str, tmp_path: Path) -> None:
    made, bits, _ = plain(name)
    run, clients = deployed(made, tmp_path, Shuffled, out=None, enrolment=60.0)
    assert_same(bits, bits_of_deployment(run, clients))


def test_a_client_that_lost_the_models_of_stages_is_sent_them_again(tmp_path: Path) -> None:
    made, bits, _ = plain("pipeline")

    class Forgetful(Recorded):
        def receive(self, timeout: float) -> list[Arrival]:  # noqa: ARG002
            for path in tmp_path.glob("clients/*/*/stage-*"):
                path.unlink()
            fresh = clients_of(made, tmp_path)
            self.clients = {name: fresh[name] for name in self.clients}  # and what they had in memory
            queue, self._queue = self._queue, []
            return [Arrival(n, request, self._worked(n, body)) for n, request, body in queue]

    run, clients = deployed(made, tmp_path, Forgetful, out=None)
    assert_same(bits, bits_of_deployment(run, clients))


def test_clients_keep_no_more_states_than_checkpoints_need(tmp_path: Path) -> None:
    made = experiment(rounds=9, checkpoint_every=1)
    _, clients = deployed(made, tmp_path)
    for client in clients.values():
        assert len(list(client.folder.glob("*/state-*"))) <= 3
    many = experiment(rounds=9, checkpoint_every=4)
    _, clients = deployed(many, tmp_path / "many")
    for client in clients.values():
        events = {int(p.name.split("-")[2]) for p in client.folder.glob("*/state-*")}
        assert {7, 8} <= events  # of the last two checkpoints, in rounds 8 and 9
        assert len(events) <= 3


def test_a_finished_run_is_not_begun_again(tmp_path: Path) -> None:
    made = experiment()
    _, clients = deployed(made, tmp_path)
    before = (tmp_path / "out" / "deployment" / "run.json").read_bytes()
    with pytest.raises(Refused) as error:
        serve(made, list(clients), Local(clients), tmp_path / "out", report=False)
    assert error.value.field == "out"
    assert (tmp_path / "out" / "deployment" / "run.json").read_bytes() == before
    with pytest.raises(Refused) as error:
        serve(made, ["cy", "ann", "bob"], Local(clients), tmp_path / "out", resume=True, report=False)
    assert error.value.field == "roster"


def test_a_run_that_ended_can_be_read_without_its_clients(tmp_path: Path) -> None:
    run, _ = deployed(experiment(), tmp_path)
    read = pt.load(tmp_path / "out", model=pt.models.mlp(4, 3, 2))
    assert_same(read.shared, run.shared)
    for given in (run, read):
        with pytest.raises(Refused, match="never has a client's personal part"):
            _ = given.client("ann").personal
    shutil.rmtree(tmp_path / "clients")
    assert read.summary()["clients"] == 3
