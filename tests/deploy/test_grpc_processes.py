"""Whole runs over gRPC, each client and the server in a process of its own, that die and come back.

What comes of each fault is compared with a simulation that had none: every client's model has its bits.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import small_experiment
from cable import Cable, until
from machines import NAMES, ROUNDS, Machines, equal_models, equal_states, figure, same, simulated
from safetensors.torch import load_file

import partita as pt
from partita import load
from partita.deploy import Client, Local, serve
from partita.deploy import keys as deployed
from support import each

pytestmark = pytest.mark.slow

DEADLINE = 3  # seconds


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    there = Machines(tmp_path)
    yield there
    there.close()


@pytest.mark.parametrize("method", small_experiment.METHODS)
def test_three_processes_are_the_simulation(machines: Machines, method: str) -> None:
    words = ("--set", f"method={method}")
    clients = {name: machines.client(name, *words) for name in NAMES}
    machines.ends(machines.server(*words), "server")
    for name, process in clients.items():
        machines.ends(process, name)
    equal_models(machines, method)
    equal_states(machines, method)
    same({"server": load(machines.out).shared}, {"server": simulated(method).shared})


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_client_that_is_killed(machines: Machines, when: str) -> None:
    """Before it has trained, and when its state is saved and its reply is not sent: it begins again."""
    clients = [machines.client(name) for name in ("a", "c")]
    killed = machines.client("b", fault=when, number=2)
    server = machines.server()
    machines.ends(killed, "b", -signal.SIGKILL)
    with figure(
        f"kill -9 of a client, {when} it has saved its state: from its restart to the end of the run"
    ):
        clients.append(machines.client("b"))
        machines.ends(server, "server")
    for process in clients:
        assert process.wait(60) == 0
    equal_models(machines)


def test_a_server_that_is_killed_between_rounds(machines: Machines) -> None:
    clients = [machines.client(name) for name in NAMES]
    machines.ends(machines.server(fault="round", number=3), "server", -signal.SIGKILL)
    with figure("kill -9 of the server between rounds: from its restart to the end of the run"):
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
    with figure("kill -9 of the server in a round: from its restart to the end of the run"):
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
    with figure("kill -9 of all of them: from their restart to the end of the run"):
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
    moment = "when it is told the last model" if when == "last" else f"in the evaluation after round {number}"
    with figure(f"kill -9 of a client {moment}: from its restart to the end of the run"):
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
    with figure("a client that was away at the end: from its start, and --resume, until it has its model"):
        late = machines.client("b")
        again = machines.server("--resume", "--patience", "10min")  # a and c, who have theirs, do not come
        machines.ends(again, "server")
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
    moment = "at the end" if fault == "end" else f"in the {fault} of round {number}"
    with figure(f"kill -9 of the server {moment}: from its restart to the end of the run"):
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
    with figure("kill -9 of all of them in the last round: from their restart to the end of the run"):
        clients = [machines.client(name) for name in NAMES]
        machines.ends(machines.server("--resume"), "server")
    for process in clients:
        assert process.wait(60) == 0
    equal_models(machines)


@pytest.mark.parametrize(("fault", "number"), [("round", 3), ("scores", 4)])
def test_a_private_server_that_is_killed_releases_once(machines: Machines, fault: str, number: int) -> None:
    """With the secret that it drew, a run without faults has the bits of each client's model."""
    words = ("--set", "uploads=[gaussian(noise=2.0, clip=0.1, quantile=0.5)]")
    clients = [machines.client(name, *words) for name in NAMES]
    server = machines.server(*words, fault=fault, number=number)
    machines.ends(server, "server", -signal.SIGKILL)
    secret = json.loads(next(machines.out.rglob("run.json")).read_text())["secret"]
    moment = "between rounds" if fault == "round" else "in an evaluation"
    with figure(f"kill -9 of a private server {moment}: from its restart to the end of the run"):
        machines.ends(machines.server(*words, "--resume"), "server")
    for process in clients:
        assert process.wait(60) == 0
    uploads = [pt.privacy.gaussian(noise=2.0, clip=0.1, quantile=0.5)]
    made = replace(small_experiment.experiment("fedalt", ROUNDS), uploads=uploads)

    def client(name: str, folder: Path) -> Client:
        return Client(made, name, small_experiment.data(name), folder)

    there = {name: client(name, machines.folder / "whole" / name) for name in NAMES}
    serve(made, list(NAMES), Local(there), None, secret=secret, report=False, progress=False)
    for name, whole in there.items():
        killed = client(name, machines.state(name))
        after, without = (
            load_file(c.export(machines.folder / f"{name}-{i}.safetensors"))
            for i, c in enumerate((killed, whole))
        )
        same({name: after}, {name: without})


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
        with figure(f"connections that break for {seconds} s: from their return to the end of the run"):
            cable.mend()
            machines.ends(server, "server")
        for process in clients:
            assert process.wait(60) == 0
        equal_models(machines)
    finally:
        cable.close()
        machines.close()


def test_a_client_that_never_comes_back(machines: Machines) -> None:
    """With a deadline, its rounds take the deadline, and the run is over without it."""
    clients = [machines.client(name) for name in ("a", "c")]
    killed = machines.client("b", fault="before", number=2)
    server = machines.server("--deadline", f"{DEADLINE}s", "--patience", "5s")
    machines.ends(killed, "b", -signal.SIGKILL)
    with figure(
        f"kill -9 of a client that stays away, --deadline {DEADLINE}s: until the run was over"
    ) as took:
        machines.ends(server, "server")
    assert took() <= DEADLINE * ROUNDS + 10
    for process in clients:
        assert process.wait(60) == 0
    assert "client b: no answer in time" in machines.text("server")
    assert set(machines.models(names=("a", "c"))) == {"a", "c"}


def test_another_experiment_is_named(machines: Machines) -> None:
    """The server says who differs and in what, and does not begin."""
    for name in NAMES:
        machines.client(name, *(("--set", "width=32") if name == "b" else ()))
    with figure(
        "another experiment at a client, --enrolment 20s: from the start of all to the end of the server"
    ):
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
    machines.ends(machines.start("stranger", "client", "--site", site), "stranger", 3)
    assert "not to be trusted" in machines.text("stranger")
    machines.held("b").unlink()
    machines.ends(server, "server")
    for process in clients:
        assert process.wait(60) == 0
    equal_models(machines)
