"""What tests of whole deployments share: processes on this machine, and what a simulation makes of them."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import small_experiment
import torch
from safetensors.torch import load_file

from partita import Run
from partita.cli.deploy.demo import _free_port
from partita.core.types import Tensors
from partita.deploy import Client
from partita.deploy import keys as deployed
from partita.deploy.heads import address_of
from partita.deploy.states import States

HERE = Path(__file__).parent
EXPERIMENT = HERE / "small_experiment.py"
NAMES = small_experiment.NAMES
ROUNDS = 6


@functools.cache
def simulated(method: str) -> Run:
    """The run of all three in one process."""
    experiment = replace(small_experiment.experiment(method, ROUNDS), data=small_experiment.everyone())
    return experiment.run(executor="loop", device="cpu", baselines=False, progress=False)


def models_of(run: Run, names: Sequence[str] = NAMES) -> dict[str, Tensors]:
    """Each client's own model as a simulation ends with it."""
    return {name: run.client(i).model("personal").state_dict() for i, name in enumerate(names)}


@contextlib.contextmanager
def figure(what: str) -> Iterator[Callable[[], float]]:
    """Print how long something takes; what it gives returns the seconds afterwards."""
    begin, seconds = time.monotonic(), list[float]()
    yield lambda: seconds[0]
    seconds.append(time.monotonic() - begin)
    print(f"figure: {what}: {seconds[0]:.1f} s")


class Machines:
    """The processes of one deployment, on one machine, in one folder."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self.folder, self.host, self.port = folder, host, _free_port()
        self.processes: list[subprocess.Popen[bytes]] = []
        deployed.make(folder / "keys", NAMES, [host], port=self.port)
        self.out = folder / "run"

    def start(
        self, log: str, *command: str, fault: str = "none", number: int = 0, within: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """Start a command; `within` are words before it that change what it sees of this machine."""
        actor = self.actor(log, fault, number)
        return self.run(log, [*within, *actor, "deploy", command[0], str(EXPERIMENT), *command[1:]])

    def actor(self, log: str, fault: str, number: int) -> list[str]:
        """Words in the place of `partita`, with a fault."""
        return [sys.executable, str(HERE / "actor.py"), fault, str(number), str(self.held(log)), "--"]

    def run(self, log: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a process, whose streams go to a file."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        with open(self.folder / f"{log}.log", "ab") as file:
            process = subprocess.Popen(words, stdout=file, stderr=file, env=environment, cwd=self.folder)
        self.processes.append(process)
        return process

    def server(self, *more: str, **fault: Any) -> subprocess.Popen[bytes]:
        roster = str(self.folder / "keys" / "server" / "roster.toml")
        words = ["--roster", roster, "--listen", f"{self.host}:{self.port}", "--out", str(self.out)]
        return self.start("server", "server", *words, "--enrolment", "3min", *more, **fault)

    def client(self, name: str, *more: str, **fault: Any) -> subprocess.Popen[bytes]:
        site = str(self.folder / "keys" / name / "site.toml")
        return self.start(name, "client", "--site", site, "--give-up", "3min", *more, **fault)

    def held(self, log: str) -> Path:
        return self.folder / f"{log}.held"

    def text(self, log: str) -> str:
        return (self.folder / f"{log}.log").read_text()

    def ends(self, process: subprocess.Popen[bytes], log: str, code: int = 0) -> None:
        assert process.wait(180) == code, self.text(log)

    def state(self, name: str) -> Path:
        """The folder of a client."""
        return self.folder / "keys" / name / "state"

    def models(
        self, method: str = "fedalt", names: Sequence[str] = NAMES, rounds: int = ROUNDS
    ) -> dict[str, Tensors]:
        """What each client's disk makes of its own model."""
        models = {}
        for name in names:
            experiment = small_experiment.experiment(method, rounds)
            one = Client(experiment, name, small_experiment.data(name), self.state(name))
            file = self.folder / f"{name}.safetensors"
            file.unlink(missing_ok=True)
            models[name] = load_file(one.export(file))
        return models

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def equal_models(machines: Machines, method: str = "fedalt", names: Sequence[str] = NAMES) -> None:
    """Compare what each client has exported with the simulation, bit for bit."""
    same(machines.models(method, names), models_of(simulated(method)))


def same(one: dict[str, Tensors], other: dict[str, Tensors]) -> None:
    """Compare tensors by client, for the clients of the first."""
    assert one
    for name, tensors in one.items():
        assert set(tensors) == set(other[name])
        for key, value in tensors.items():
            assert torch.equal(value, other[name][key]), (name, key)


def equal_states(machines: Machines, method: str) -> None:
    """Compare what each client has on its disk, a memory that no model shows included."""
    run = simulated(method)
    for number, name in enumerate(NAMES):
        (folder,) = [path for path in machines.state(name).iterdir() if path.is_dir()]
        states = States(folder.parent, folder.name)
        address = address_of(states.last()[0].get("address"))
        expected = run.client(number)._state
        if not expected.personal and not expected.memory:
            assert not address.exists
            continue
        found = states.load(address)
        same({"personal": found.personal, "memory": found.memory}, expected._asdict())
