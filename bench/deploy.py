"""What a network costs a deployment: rounds of clients in processes of this machine, over gRPC with TLS.

core     rounds of three clients that train, in this process and in three others
echo     bytes to clients and back, without a message in them
whole    rounds of the server with clients that compute nothing: messages are written, read and screened
restart  from the start of a client's process until the server has its upload

python bench/deploy.py                   all figures, in some minutes
python bench/deploy.py --only restart
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from partita import models
from partita.cli.deploy.demo import _free_port
from partita.core.types import Tensors
from partita.deploy import Client, Handler, Local, example, keys, roster, serve
from partita.deploy.grpc import GrpcClient, GrpcTransport
from partita.deploy.grpc.tls import Credentials
from partita.deploy.wire import Body, pack, unpack
from partita.engine.callbacks import Callback, Event

PARTS = ("core", "echo", "whole", "restart")
LARGEST = 1 << 28
PATIENCE = 120.0
ECHOES = {
    "17 kB, 3 clients": (3, 17_000, 50),
    "26 MB, 3 clients": (3, 26_000_000, 8),
    "17 kB, 300 clients": (300, 17_000, 10),
}
WHOLE = {
    "17 kB, 3 clients": (3, (64, 64, 10)),
    "26 MB, 3 clients": (3, (64, 2048, 3072, 10)),
    "17 kB, 300 clients": (300, (64, 64, 10)),
}
"""Clients, and widths of a model whose last layer is personal."""
WHOLE_ROUNDS = 32
ROUNDS = 200
RESTARTS = (20, 60, 100, 140, 180)
"""Rounds after which a client is killed and started again."""


class Echo:
    """A client that computes nothing."""

    def handle(self, body: bytes) -> bytes:
        """Return what came."""
        return body


class Times(Callback):
    """When each round was over."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def round(self, event: Event) -> None:  # noqa: ARG002
        """Note the time."""
        self.at.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the seconds of each round, without the first ones."""
        later = self.at[len(self.at) // 4 :]
        return [b - a for a, b in itertools.pairwise(later)]


class Ready:
    """A client that computes its first reply of each kind, and then sends that one again.

    It reads all of a request, and writes all of a reply. It may be several clients of one process.
    """

    def __init__(self, own: Client) -> None:
        self.own, self.lock = own, threading.Lock()
        self.replies: dict[str, tuple[dict[str, Any], Tensors]] = {}

    def handle(self, body: bytes) -> bytes:
        """Return a reply."""
        head, _ = unpack(body, LARGEST)
        kind = head["kind"]
        with self.lock:
            if kind not in self.replies:
                self.replies[kind] = unpack(self.own.handle(body), LARGEST)
        said, tensors = self.replies[kind]
        return pack({**said, **{k: head.get(k) for k in ("id", "run", "event")}}, Body.of(tensors))


class Restarts(Callback):
    """Kills a client after some rounds and starts it again; says how long the next round took."""

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        self.start_one, self.process = start, start()
        self.begun, self.seconds = 0.0, list[float]()

    def round(self, event: Event) -> None:
        """Note the time, or begin to count it."""
        if self.begun:
            self.seconds.append(time.perf_counter() - self.begun)
            self.begun = 0.0
        if event.round in RESTARTS:
            self.process.kill()
            self.process.wait()
            self.begun = time.perf_counter()
            self.process = self.start_one()


def credentials(folder: Path, who: str) -> Credentials:
    """Return the keys of the server or of a client."""
    kind = "server" if who == "server" else "client"
    return Credentials(*[folder / who / name for name in ("ca.crt", f"{kind}.crt", f"{kind}.key")])


@contextlib.contextmanager
def clients(folder: Path, port: int, kind: str, names: list[str]) -> Iterator[None]:
    """Run clients in at most three processes."""
    count = min(3, len(names))
    shares = [",".join(names[i::count]) for i in range(count)]
    command = [sys.executable, __file__, "--be", kind, "--keys", str(folder), "--port", str(port), "--names"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [subprocess.Popen([*command, share], env=environment) for share in shares]
    try:
        yield
    finally:
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


def be(kind: str, folder: Path, port: int, names: list[str]) -> None:
    """Be some clients, each in a thread."""

    def handler_of(name: str) -> Handler:
        if kind == "echo":
            return Echo()
        return client(folder, name) if kind == "core" else ready(folder, kind)

    def one(name: str, handler: Handler) -> None:
        GrpcClient(f"127.0.0.1:{port}", credentials(folder, name), largest=LARGEST, give_up=60).run(handler)

    threads = [threading.Thread(target=one, args=(name, handler_of(name))) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def client(folder: Path, name: str) -> Client:
    """Return one of the three clients that train."""
    torch.set_num_threads(1)
    return Client(experiment(), name, example.data(name), folder / name / "state")


@functools.cache
def ready(folder: Path, widths: str) -> Ready:
    """Return the clients of this process that compute nothing, with a model of these widths."""
    torch.set_num_threads(1)
    made = shaped(widths)
    return Ready(Client(made, "anybody", made.data, folder / f"ready-{os.getpid()}"))


def shaped(widths: str) -> example.Experiment:
    """Return the experiment of the demonstration with another model, such as '64x64x10'."""
    model = models.mlp(*map(int, widths.split("x")), seed=0)
    changed: dict[str, Any] = {
        "rounds": WHOLE_ROUNDS,
        "evaluate_every": None,
        "checkpoint_every": WHOLE_ROUNDS,
    }
    return replace(example.experiment(), model=model, **changed)


def experiment() -> example.Experiment:
    """Return the experiment of the demonstration, without evaluations."""
    return replace(example.experiment(), rounds=ROUNDS, evaluate_every=None, checkpoint_every=ROUNDS)


def transport(folder: Path, port: int = 0) -> GrpcTransport:
    """Return a server, on any free port."""
    pinned = roster.read(folder / "server" / roster.FILE)
    return GrpcTransport(f"127.0.0.1:{port}", pinned, credentials(folder, "server"), largest=LARGEST)


def echo(folder: Path, count: int, size: int, rounds: int) -> list[float]:
    """Return the seconds in which all clients have received and returned so many bytes, for each round."""
    names = keys.make(folder, [f"c{i}" for i in range(count)])
    server, body, seconds = transport(folder), os.urandom(size), []
    with clients(folder, server.port, "echo", names):
        end = time.monotonic() + PATIENCE
        while len(server.present()) < count and time.monotonic() < end:
            time.sleep(0.05)
        for number in range(rounds):
            begin, missing = time.perf_counter(), set(names)
            for name in names:
                server.send(name, str(number), body)
            while missing and time.monotonic() < end:
                missing -= {arrival.name for arrival in server.receive(1.0)}
            seconds.append(time.perf_counter() - begin)
        server.close(over=True)
    return seconds


def core(folder: Path) -> tuple[list[float], list[float]]:
    """Return the seconds of a round of three clients: in this process, and in three others over gRPC."""
    torch.set_num_threads(1)
    names = keys.make(folder, example.OFFICES[:3])
    here, there = Times(), Times()
    serve(
        experiment(),
        names,
        Local({n: client(folder / "here", n) for n in names}),
        None,
        callbacks=[here],
        progress=False,
    )
    server = transport(folder)
    with clients(folder, server.port, "core", names):
        serve(experiment(), names, server, None, callbacks=[there], progress=False)
        server.close(over=True)
    return here.seconds(), there.seconds()


def whole(folder: Path, count: int, shape: tuple[int, ...]) -> tuple[list[float], list[float]]:
    """Return the seconds of a round whose clients compute nothing: in this process, and over gRPC."""
    torch.set_num_threads(1)
    names, widths = keys.make(folder, [f"c{i}" for i in range(count)]), "x".join(map(str, shape))
    here, there = Times(), Times()
    own = Local(dict.fromkeys(names, ready(folder / "here", widths)))
    options: dict[str, Any] = {"progress": False, "report": False}
    serve(shaped(widths), names, own, None, callbacks=[here], **options)
    server = transport(folder)
    with clients(folder, server.port, widths, names):
        serve(shaped(widths), names, server, None, callbacks=[there], **options)
        server.close(over=True)
    return here.seconds(), there.seconds()


def restart(folder: Path) -> list[float]:
    """Return the seconds from the start of a client, as a user starts it, until the round has its upload."""
    port, file = _free_port(), folder / "experiment.py"
    names = keys.make(folder, example.OFFICES[:3], port=port)
    file.write_text(inspect.getsource(example))
    command = [sys.executable, "-m", "partita.cli", "deploy", "client", str(file), "--quiet"]
    command += ["--set", f"rounds={ROUNDS}", "--site", str(folder / names[0] / "site.toml")]
    restarts = Restarts(lambda: subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}))
    server = transport(folder, port)
    try:
        with clients(folder, port, "core", names[1:]):
            serve(experiment(), names, server, None, callbacks=[restarts], progress=False, report=False)
            server.close(over=True)
    finally:
        restarts.process.kill()
    return restarts.seconds


def told(what: str, seconds: list[float]) -> None:
    """Print the median of some measurements, the fastest and the slowest."""
    times = [1e3 * s for s in seconds]
    spread = f"(from {min(times):.1f} to {max(times):.1f})"
    print(f"{what}: {statistics.median(times):.1f} ms {spread}", flush=True)


def compared(what: str, here: list[float], there: list[float]) -> None:
    """Print how long a round takes in this process and over gRPC, and what they make of each other."""
    told(f"{what}, in one process", here)
    told(f"{what}, over gRPC", there)
    one, other = statistics.median(here), statistics.median(there)
    print(f"  of the medians: ratio {other / one:.2f}, difference {1e3 * (other - one):.1f} ms", flush=True)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS)
    for hidden in ("--be", "--keys", "--port", "--names"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be:
        be(options.be, Path(options.keys), int(options.port), options.names.split(","))
        return
    with tempfile.TemporaryDirectory() as place:
        parts = [options.only] if options.only else PARTS
        if "core" in parts:
            compared("a round of 3 clients that train, 17 kB", *core(Path(place) / "core"))
        for number, (what, size) in enumerate(ECHOES.items()):
            if "echo" in parts:
                told(f"{what}, bytes to and from", echo(Path(place) / f"echo{number}", *size))
        for number, (what, shape) in enumerate(WHOLE.items()):
            if "whole" in parts:
                compared(f"{what}, a whole round", *whole(Path(place) / f"whole{number}", *shape))
        if "restart" in parts:
            told("a client, from its start to its upload", restart(Path(place) / "restart"))


if __name__ == "__main__":
    main()
