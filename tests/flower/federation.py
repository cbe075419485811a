"""A federation of Flower on this machine: a SuperLink behind a gate, SuperNodes, client processes, and runs.

SuperNodes sign in with keys of their own over TLS, and reach the SuperLink only through the gate.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import small_experiment
from gate import Gate
from safetensors.torch import load_file

from partita.cli.deploy.demo import _free_port
from partita.core.types import Tensors
from partita.deploy import Client
from partita.deploy import keys as deployed
from partita.deploy import roster as rosters
from partita.deploy.grpc.tls import key_fingerprint

HERE = Path(__file__).parent
APP = HERE.parents[1] / "examples" / "deploy" / "flower"
EXPERIMENT = HERE.parent / "deploy" / "small_experiment.py"
ACTOR = HERE.parent / "deploy" / "actor.py"
BIN = Path(sys.executable).parent
NAMES = small_experiment.NAMES
PATIENCE = 240.0
SITE = """\
name = "{name}"
folder = "{folder}"
[door]
socket = "{socket}"
[leave]
scores = ["validation", "test"]
train_loss = true
"""

Process = subprocess.Popen[bytes]


def until(happened: Any, seconds: float = PATIENCE) -> Any:
    """Wait for something; fail if it does not happen."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if result := happened():
            return result
        time.sleep(0.05)
    raise AssertionError("it has not happened")


class Federation:
    """SuperLink and SuperNodes in a folder, and the client processes and the run of one test in another."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, _free_port()
        self.keys = folder / "keys" / "server"
        self.long: dict[str, Process] = {}
        self.clients: dict[str, Process] = {}
        self.ports: dict[str, int] = {}
        self.run = ""

    # ---- processes that stay

    def open(self) -> None:
        """Start all that stays, with the keys of a deployment for TLS."""
        deployed.make(self.folder / "keys", ["nobody"])
        self.gate = Gate(self.keys, self.port)
        words = ["flower-superlink", "--host", "127.0.0.1", "--port", str(self.port)]
        for option, file in (
            ("certfile", "server.crt"),
            ("keyfile", "server.key"),
            ("ca-certfile", "ca.crt"),
        ):
            words += [f"--ssl-{option}", str(self.keys / file)]
        words += ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        home = self.folder / "home"
        home.mkdir()
        authority = f'root-certificates = "{self.keys / "ca.crt"}"\n'
        (home / "config.toml").write_text(
            f'[superlink.here]\naddress = "127.0.0.1:{self.port}"\n{authority}'
            f'[superlink.gate]\naddress = "127.0.0.1:{self.gate.port}"\n{authority}'
        )
        self.long["superlink"] = self.start("superlink", *words, home=home)
        until(lambda: "Uvicorn running" in self.log("superlink"))
        for name in NAMES:
            self.key(name)
            self.flwr("supernode", "register", str(self.folder / f"{name}.pub"), "here")
            self.node(name)
        self.pin(self.folder / "roster.toml", NAMES)

    def key(self, name: str) -> None:
        """Make the key of a SuperNode."""
        file = str(self.folder / f"{name}.key")
        subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", file], check=True)
        (self.folder / f"{name}.key.pub").rename(self.folder / f"{name}.pub")

    def pin(self, roster: Path, names: Any) -> None:
        rosters.write(roster, {n: key_fingerprint((self.folder / f"{n}.pub").read_bytes()) for n in names})

    def node(self, name: str, **options: Any) -> Process:
        """Start a SuperNode."""
        words = ["flower-supernode", "--superlink", f"127.0.0.1:{self.gate.port}"]
        words += ["--root-certificates", str(options.pop("authority", self.keys / "ca.crt"))]
        words += ["--auth-supernode-private-key", str(options.pop("key", self.folder / f"{name}.key"))]
        words += ["--port", str(self.ports.setdefault(name, _free_port()))]
        words += ["--node-config", f'socket="{options.pop("door", self.socket(name))}"']
        log = f"node-{name}"
        self.long[log] = self.start(log, *words, **{"home": self.folder / f"home-{name}", **options})
        return self.long[log]

    def node_again(self, name: str) -> None:
        """Start a SuperNode that was killed until its SuperLink lets it in, as systemd does."""
        known = self.log(f"node-{name}").count("SuperNode ID")
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            node = self.node(name)
            until(
                lambda node=node: (
                    node.poll() is not None or self.log(f"node-{name}").count("SuperNode ID") > known
                )
            )
            if node.poll() is None:
                return
            time.sleep(2)
        raise AssertionError(self.log(f"node-{name}"))

    def start(self, log: str, *words: str, home: Path, **options: Any) -> Process:
        path = f"{options.pop('commands', BIN)}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "FLWR_HOME": str(home)}
        environment |= {"FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p.startswith(str(HERE.parents[1])))
        with open(self.folder / f"{log}.log", "ab") as file:
            return subprocess.Popen(words, stdout=file, stderr=file, env=environment, **options)

    def socket(self, name: str) -> Path:
        return self.folder / f"door-{name}" / "s"

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def flwr(self, *words: str) -> Any:
        """Call `flwr`, and return what it says in JSON; an error is raised."""
        environment = {**os.environ, "FLWR_HOME": str(self.folder / "home"), "FLWR_TELEMETRY_ENABLED": "0"}
        done = subprocess.run(
            [str(BIN / "flwr"), *words, "--format", "json"], capture_output=True, text=True, env=environment
        )
        begin = done.stdout.find("{")
        said = json.loads(done.stdout[begin : done.stdout.rfind("}") + 1]) if begin >= 0 else {}
        assert done.returncode == 0, done.stdout + done.stderr
        assert said.get("success"), done.stdout + done.stderr
        return said

    # ---- one test

    def begin(self, folder: Path) -> None:
        self.test, self.out, self.run = folder, folder / "run", ""

    def client(self, name: str, *more: str, fault: str = "none", number: int = 0, site: str = "") -> Process:
        """Start the process of a client, which may die."""
        path, folder, door = self.test / f"{name}.toml", self.test / f"state-{name}", self.socket(name)
        path.write_text(site or SITE.format(name=name, folder=folder, socket=door))
        words = [sys.executable, str(ACTOR), fault, str(number), str(self.held(name)), "--"]
        words += ["deploy", "client", str(EXPERIMENT), "--site", str(path), *more]
        self.clients[name] = self.start(f"client-{name}", *words, home=self.test)
        if not site:
            until(door.exists)
        return self.clients[name]

    def held(self, name: str) -> Path:
        return self.test / f"{name}.held"

    def train(self, superlink: str = "here", **config: Any) -> None:
        """Start a run of Partita."""
        roster = str(self.folder / "roster.toml")
        given = {"experiment": str(EXPERIMENT), "roster": roster, "out": str(self.out)}
        self.begin_run(APP, superlink, **{**given, **config})

    def begin_run(self, app: Path, superlink: str = "here", **config: Any) -> None:
        """Start a run of any app."""
        text = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        self.run = str(self.flwr("run", str(app), superlink, "--run-config", text)["run-id"])
        until(self.server_app, 60)

    def stop(self) -> None:
        """Stop the run if it goes on."""
        if self.run and not self.status().startswith("finished"):
            self.flwr("stop", self.run, "here")

    def status(self) -> str:
        said = self.flwr("list", "here", "--run-id", self.run)
        return str(said["runs"][0]["status"])

    def ends(self, status: str = "finished:completed") -> None:
        """Wait for the end of the run."""
        until(lambda: not self.server_app(), PATIENCE)
        until(lambda: self.status().startswith("finished"), 90)
        assert self.status() == status, self.log("superlink")[-6000:]

    def said(self) -> str:
        """Return the log of the run."""
        environment = {**os.environ, "FLWR_HOME": str(self.folder / "home"), "FLWR_TELEMETRY_ENABLED": "0"}
        words = [str(BIN / "flwr"), "log", self.run, "here", "--show"]
        return subprocess.run(words, capture_output=True, text=True, env=environment).stdout

    def rounds(self) -> int:
        """Return how many rounds the metrics of the run have."""
        file = self.out / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return int(json.loads(lines[-1])["round"]) if lines else 0

    def server_app(self) -> int:
        """Return the number of the process that serves the run."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and self._serves(entry):
                return int(entry.name)
        return 0

    def _serves(self, entry: Path) -> bool:
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace")
            environment = (entry / "environ").read_bytes().decode(errors="replace")
        except OSError:
            return False
        return "flwr-serverapp" in words and f"FLWR_HOME={self.folder / 'home'}\0" in environment

    def models(self) -> dict[str, Tensors]:
        """What each client's disk makes of its own model."""
        models = {}
        for name in NAMES:
            made = small_experiment.experiment("fedalt", 3)
            one = Client(made, name, small_experiment.data(name), self.test / f"state-{name}")
            models[name] = load_file(one.export(self.test / f"{name}.safetensors"))
        return models

    def end(self) -> None:
        """Stop the run, and end the client processes."""
        self.stop()
        for process in self.clients.values():
            process.terminate()
            process.wait(30)
        self.clients.clear()
        for name in NAMES:
            shutil.rmtree(self.socket(name).parent, ignore_errors=True)

    def close(self) -> None:
        for process in reversed(self.long.values()):  # SuperNodes sign off at their SuperLink
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if hasattr(self, "gate"):
            self.gate.close()
