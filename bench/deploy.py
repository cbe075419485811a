"""What a network costs a deployment: rounds of clients in processes of this machine, over gRPC with TLS.

python bench/deploy.py             all figures, in about a minute
python bench/deploy.py --only core
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from partita.deploy import Client, Local, example, keys, roster, serve
from partita.deploy.grpc import GrpcClient, GrpcTransport
from partita.deploy.grpc.tls import Credentials
from partita.engine.callbacks import Callback, Event

LARGEST = 1 << 28
PATIENCE = 120.0
ECHOES = {
    "17 kB, 3 clients": (3, 17_000, 50),
    "26 MB, 3 clients": (3, 26_000_000, 8),
    "17 kB, 300 clients": (300, 17_000, 10),
}
ROUNDS = 200


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

    def median(self) -> float:
        """Return the median of the seconds of a round, without the first ones."""
        return statistics.median(b - a for a, b in zip(self.at[10:], self.at[11:]))


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

    def one(name: str) -> None:
        handler = Echo() if kind == "echo" else client(folder, name)
        GrpcClient(f"127.0.0.1:{port}", credentials(folder, name), largest=LARGEST, give_up=60).run(handler)

    threads = [threading.Thread(target=one, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def client(folder: Path, name: str) -> Client:
    """Return one of the three clients that train."""
    torch.set_num_threads(1)
    return Client(experiment(), name, example.data(name), folder / name / "state")


def experiment() -> example.Experiment:
    """Return the experiment of the demonstration, without evaluations."""
    return replace(example.experiment(), rounds=ROUNDS, evaluate_every=None, checkpoint_every=ROUNDS)


def transport(folder: Path) -> GrpcTransport:
    """Return a server on any free port."""
    pinned = roster.read(folder / "server" / roster.FILE)
    return GrpcTransport("127.0.0.1:0", pinned, credentials(folder, "server"), largest=LARGEST)


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


def core(folder: Path) -> tuple[float, float]:
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
    return here.median(), there.median()


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("core", "echo"))
    for hidden in ("--be", "--keys", "--port", "--names"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be:
        be(options.be, Path(options.keys), int(options.port), options.names.split(","))
        return
    with tempfile.TemporaryDirectory() as place:
        if options.only != "echo":
            here, there = core(Path(place) / "core")
            print(f"a round of 3 clients: {1e3 * here:.1f} ms in one process, {1e3 * there:.1f} ms over gRPC")
        for number, (what, (count, size, rounds)) in enumerate(ECHOES.items()):
            if options.only != "core":
                times = [1e3 * seconds for seconds in echo(Path(place) / str(number), count, size, rounds)]
                median = statistics.median(times)
                print(f"{what}, to and from: {median:.1f} ms (from {min(times):.1f} to {max(times):.1f})")


if __name__ == "__main__":
    main()
