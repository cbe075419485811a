"""Whole runs over gRPC, each client and the server in a process of its own, that die and come back.

What comes of each fault is compared with a simulation that had none: every client's model has its bits.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import small_experiment
import torch
from cable import Cable, until
from safetensors.torch import load_file

from partita.cli.deploy.demo import _free_port
from partita.core.types import Tensors
from partita.deploy import Client
from partita.deploy import keys as deployed
from support import each

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
NAMES = small_experiment.NAMES
ROUNDS = 6


@functools.cache
def simulated(method: str) -> dict[str, Tensors]:
    """Each client's own model as a simulation ends with it."""
    experiment = replace(small_experiment.experiment(method, ROUNDS), data=small_experiment.everyone())
    run = experiment.run(executor="loop", device="cpu", baselines=False, progress=False)
    return {name: run.client(i).model("personal").state_dict() for i, name in enumerate(NAMES)}


class Machines:
    """The processes of one deployment, on one machine, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, _free_port()
        self.processes: list[subprocess.Popen[bytes]] = []
        deployed.make(folder / "keys", NAMES, port=self.port)
        self.out = folder / "run"

    def start(self, log: str, *command: str, fault: str = "none", number: int = 0) -> subprocess.Popen[bytes]:
        words = [sys.executable, str(HERE / "actor.py"), fault, str(number), str(self.held(log)), "--"]
        words += ["deploy", command[0], str(HERE / "small_experiment.py"), *command[1:]]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        with open(self.folder / f"{log}.log", "ab") as file:
            process = subprocess.Popen(words, stdout=file, stderr=file, env=environment, cwd=self.folder)
        self.processes.append(process)
        return process

    def server(self, *more: str, **fault: object) -> subprocess.Popen[bytes]:
        roster = str(self.folder / "keys" / "server" / "roster.toml")
        words = ["--roster", roster, "--listen", f"127.0.0.1:{self.port}", "--out", str(self.out)]
        return self.start("server", "server", *words, "--enrolment", "3min", *more, **fault)  # type: ignore[arg-type]

    def client(self, name: str, *more: str, **fault: object) -> subprocess.Popen[bytes]:
        site = str(self.folder / "keys" / name / "site.toml")
        return self.start(name, "client", "--site", site, "--give-up", "3min", *more, **fault)  # type: ignore[arg-type]

    def held(self, log: str) -> Path:
        return self.folder / f"{log}.held"

    def text(self, log: str) -> str:
        return (self.folder / f"{log}.log").read_text()

    def ends(self, process: subprocess.Popen[bytes], log: str, code: int = 0) -> None:
        assert process.wait(180) == code, self.text(log)

    def models(
        self, method: str = "fedalt", rounds: int = ROUNDS, names: tuple[str, ...] = NAMES
    ) -> dict[str, Tensors]:
        """What each client's disk makes of its own model."""
        models = {}
        for name in names:
            experiment = small_experiment.experiment(method, rounds)
            state = self.folder / "keys" / name / "state"
            one = Client(experiment, name, small_experiment.data(name), state)
            models[name] = load_file(one.export(self.folder / f"{name}.safetensors"))
        return models

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    there = Machines(tmp_path)
    yield there
    there.close()


def same(one: dict[str, Tensors], other: dict[str, Tensors]) -> None:
    for name in NAMES:
        assert set(one[name]) == set(other[name])
        for key, value in one[name].items():
            assert torch.equal(value, other[name][key]), (name, key)


def equal_models(machines: Machines, method: str = "fedalt") -> None:
    same(machines.models(method), simulated(method))


@pytest.mark.parametrize("method", small_experiment.METHODS)
def test_three_processes_are_the_simulation(machines: Machines, method: str) -> None:
    words = ("--set", f"method={method}")
    clients = {name: machines.client(name, *words) for name in NAMES}
    machines.ends(machines.server(*words), "server")
    for name, process in clients.items():
        machines.ends(process, name)
    equal_models(machines, method)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_client_that_is_killed(machines: Machines, when: str) -> None:
    """Before it has trained, and when its state is saved and its reply is not sent: it begins again."""
    clients = [machines.client(name) for name in ("a", "c")]
    killed = machines.client("b", fault=when, number=2)
    server = machines.server()
    machines.ends(killed, "b", -signal.SIGKILL)
    clients.append(machines.client("b"))
    machines.ends(server, "server")
    for process in clients:
        assert process.wait(60) == 0
    equal_models(machines)


def test_a_server_that_is_killed_between_rounds(machines: Machines) -> None:
    clients = [machines.client(name) for name in NAMES]
    machines.ends(machines.server(fault="round", number=3), "server", -signal.SIGKILL)
    machines.ends(machines.server("--resume"), "server")
    for process in clients:
        assert process.wait(60) == 0
    equal_models(machines)


def test_a_server_that_is_killed_in_a_round(machines: Machines) -> None:
    """Some have trained and some have not; their states go on from those of the checkpoint."""
    clients = [machines.client("a"), machines.client("b", fault="hold", number=3), machines.client("c")]
    server = machines.server()
    until(machines.held("b").exists)
    server.kill()
    server.wait()
    machines.held("b").unlink()
    machines.ends(machines.server("--resume"), "server")
    for process in clients:
        assert process.wait(60) == 0
    equal_models(machines)


def test_all_are_killed_in_a_round(machines: Machines) -> None:
    everyone = [machines.client("a"), machines.client("b", fault="hold", number=3), machines.client("c")]
    everyone.append(machines.server())
    until(machines.held("b").exists)
    for process in everyone:
        process.kill()
        process.wait()
    machines.held("b").unlink()
    clients = [machines.client(name) for name in NAMES]
    machines.ends(machines.server("--resume"), "server")
    for process in clients:
        assert process.wait(60) == 0
    equal_models(machines)


@pytest.mark.parametrize(("when", "number"), [("score", 2), ("score", ROUNDS), ("last", 0)])
def test_a_client_that_is_killed_in_an_evaluation_or_at_the_end(
    machines: Machines, when: str, number: int
) -> None:
    """It is asked, or told, again when it is back."""
    clients = [machines.client(name) for name in ("a", "c")]
    killed = machines.client("b", fault=when, number=number)
    server = machines.server()
    machines.ends(killed, "b", -signal.SIGKILL)
    assert server.poll() is None
    clients.append(machines.client("b"))
    machines.ends(server, "server")
    for process in clients:
        assert process.wait(60) == 0
    equal_models(machines)


def test_a_client_that_is_away_at_the_end(machines: Machines) -> None:
    """It gets its model when it is back, and the server is started again."""
    clients = [machines.client(name) for name in ("a", "c")]
    killed = machines.client("b", fault="last")
    server = machines.server("--patience", "3s")
    machines.ends(killed, "b", -signal.SIGKILL)
    for path in (machines.folder / "keys" / "b" / "state").glob("*/last"):
        path.unlink()
    machines.ends(server, "server")
    assert "client b has not got its model" in machines.text("server")
    for process in clients:
        assert process.wait(60) == 0
    late = machines.client("b")
    begin = time.monotonic()
    machines.ends(machines.server("--resume"), "server")
    assert time.monotonic() - begin < 40  # it does not wait for a and c, who have theirs
    machines.ends(late, "b")
    equal_models(machines)


@pytest.mark.parametrize(
    ("fault", "number"), [("scores", 4), ("scores", ROUNDS), ("round", ROUNDS), ("end", 0)]
)
def test_a_server_that_is_killed_in_an_evaluation_or_at_the_end(
    machines: Machines, fault: str, number: int
) -> None:
    clients = [machines.client(name) for name in NAMES]
    machines.ends(machines.server(fault=fault, number=number), "server", -signal.SIGKILL)
    machines.ends(machines.server("--resume"), "server")
    for process in clients:
        assert process.wait(60) == 0
    equal_models(machines)


def test_all_are_killed_in_the_last_round(machines: Machines) -> None:
    last = ROUNDS - 1
    everyone = [machines.client("a"), machines.client("b", fault="hold", number=last), machines.client("c")]
    everyone.append(machines.server())
    until(machines.held("b").exists)
    for process in everyone:
        process.kill()
        process.wait()
    machines.held("b").unlink()
    clients = [machines.client(name) for name in NAMES]
    machines.ends(machines.server("--resume"), "server")
    for process in clients:
        assert process.wait(60) == 0
    equal_models(machines)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_asynchronous_run_whose_client_and_server_are_killed(machines: Machines, when: str) -> None:
    """Two such runs differ, so that no bits are compared: all end, nobody is set aside, all have a model."""
    rounds = 300
    words = ("--set", f"rounds={rounds}", "--set", "schedule=asynchronous", "--set", "evaluate_every=100")
    clients = [machines.client(name, *words) for name in ("a", "c")]
    killed = machines.client("b", *words, fault=when, number=0)
    server = machines.server(*words, fault="round", number=150)
    machines.ends(killed, "b", -signal.SIGKILL)
    clients.append(machines.client("b", *words))
    machines.ends(server, "server", -signal.SIGKILL)
    machines.ends(machines.server(*words, "--resume"), "server")
    for process in clients:
        assert process.wait(60) == 0
    for text in ("excluded", "is not on this client's disk"):
        assert text not in machines.text("server")
    assert set(machines.models(rounds=rounds)) == set(NAMES)


@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_a_client_that_never_answers_does_not_hold_up_deadlines(machines: Machines, how: str) -> None:
    cable, deadline = Cable(machines.port), 3
    try:
        site = machines.folder / "keys" / "b" / "site.toml"
        site.write_text(site.read_text().replace(f":{machines.port}", f":{cable.port}"))
        clients = [machines.client("a"), machines.client("c")]
        silent = machines.client("b", fault="hold", number=2)
        server = machines.server("--deadline", f"{deadline}s", "--patience", "2s")
        until(machines.held("b").exists)
        begin = time.monotonic()
        if how == "frozen":
            cable.freeze()
        else:
            silent.kill()
        machines.ends(server, "server")
        assert time.monotonic() - begin < deadline * ROUNDS + 10
        for process in clients:
            assert process.wait(60) == 0
        assert "client b has not got its model" in machines.text("server")
        machines.models(names=("a", "c"))
    finally:
        cable.close()


@each("seconds", [8, 60])
def test_a_link_that_is_down(tmp_path_factory: pytest.TempPathFactory, seconds: int) -> None:
    """The link of one client is cut in a round, for seconds: the round waits for it."""
    machines = Machines(tmp_path_factory.mktemp("down"))
    cable = Cable(machines.port)
    try:
        site = machines.folder / "keys" / "b" / "site.toml"
        site.write_text(site.read_text().replace(f":{machines.port}", f":{cable.port}"))
        clients = [machines.client("a"), machines.client("b", fault="hold", number=2), machines.client("c")]
        server = machines.server("--patience", "5min")
        until(machines.held("b").exists)
        cable.cut()
        machines.held("b").unlink()
        time.sleep(seconds)
        assert server.poll() is None
        cable.mend()
        machines.ends(server, "server")
        for process in clients:
            assert process.wait(60) == 0
        equal_models(machines)
    finally:
        cable.close()
        machines.close()


def test_another_experiment_is_named(machines: Machines) -> None:
    """The server says who differs and in what, and does not begin."""
    for name in NAMES:
        machines.client(name, *(("--set", "width=32") if name == "b" else ()))
    machines.ends(machines.server("--enrolment", "20s"), "server", 2)
    told = machines.text("server").splitlines()[-1]
    assert "'b'" in told
    assert "model" in told
    assert not (machines.out / "checkpoint").exists()


def test_a_stranger_is_refused_while_others_train(machines: Machines, tmp_path: Path) -> None:
    """Keys of another federation: its client ends with an error, the run does not notice."""
    deployed.make(tmp_path / "others", NAMES, port=machines.port)
    clients = [machines.client("a"), machines.client("b", fault="hold", number=2), machines.client("c")]
    server = machines.server()
    until(machines.held("b").exists)
    site = str(tmp_path / "others" / "a" / "site.toml")
    machines.ends(machines.start("stranger", "client", "--site", site), "stranger", 2)
    assert "not to be trusted" in machines.text("stranger")
    machines.held("b").unlink()
    machines.ends(server, "server")
    for process in clients:
        assert process.wait(60) == 0
    equal_models(machines)
