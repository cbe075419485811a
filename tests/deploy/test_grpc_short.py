"""A whole run of a server and two clients, in processes of their own, that takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import small_experiment
from machines import EXPERIMENT, NAMES, Machines, models_of, same

from partita.cli.deploy import server
from partita.cli.deploy.options import experiment_of
from partita.deploy import roster
from partita.deploy.grpc.tls import Credentials

ROUNDS = 2


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    there = Machines(tmp_path)
    yield there
    there.close()


def test_a_server_and_two_clients_are_the_simulation(machines: Machines) -> None:
    """All of it, in little: TLS, processes, a round of each, scores, and what each client has at the end."""
    names = NAMES[:2]
    processes = [machines.client(name, "--set", f"rounds={ROUNDS}") for name in names]
    folder = machines.folder / "keys" / "server"
    pinned = roster.read(folder / roster.FILE)
    roster.write(folder / roster.FILE, {name: pinned[name] for name in names})
    own = Credentials(*[folder / name for name in ("ca.crt", "server.crt", "server.key")])
    made = experiment_of(str(EXPERIMENT), [f"rounds={ROUNDS}"])
    listen = f"127.0.0.1:{machines.port}"
    server.train(made, folder / roster.FILE, listen, own, machines.out, status=0, quiet=True)
    assert [process.wait(60) for process in processes] == [0, 0]
    together = replace(made, data=small_experiment.everyone().subset([0, 1]))
    run = together.run(executor="loop", device="cpu", baselines=False, progress=False)
    same(machines.models(names=names, rounds=ROUNDS), models_of(run, names))
