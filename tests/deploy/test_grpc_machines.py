"""Whole runs where a network drops packets without a word, and where a disk is really full."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import small_experiment
from cable import until
from machines import NAMES, ROUNDS, Machines, equal_models, figure, models_of, same
from namespaces import NEAR, Wires, full_disk

import partita as pt
from partita.deploy.grpc import tls

pytestmark = pytest.mark.slow

NOTICED = (tls.PING + tls.PONG) / 1000
"""Seconds in which a link that is dead without a word is noticed."""
BUSY = 15.0
"""Seconds that a machine with other work may take longer."""


@pytest.fixture
def wires() -> Iterator[Wires]:
    there = Wires()
    yield there
    there.close()


@pytest.mark.parametrize("seconds", [8, 60])
def test_packets_that_are_dropped(wires: Wires, tmp_path: Path, seconds: int) -> None:
    """No end of the link hears that it is down. The round waits for it, and nothing is computed twice."""
    machines = Machines(tmp_path, NEAR)
    try:
        clients = [machines.client(name, within=wires.near) for name in ("a", "c")]
        clients.append(machines.client("b", fault="hold", number=2, within=wires.far))
        server = machines.server("--patience", "5min", within=wires.near)
        until(machines.held("b").exists)
        wires.cut()
        machines.held("b").unlink()
        begin, gone = time.monotonic(), 0.0
        while (passed := time.monotonic() - begin) < seconds:
            if not gone and "client b: disconnected" in machines.text("server"):
                gone = passed
                print(f"figure: packets are dropped: noticed after {gone:.1f} s")
            time.sleep(0.1)
        assert server.poll() is None
        with figure(f"packets are dropped for {seconds} s: from their return to the end of the run"):
            wires.mend()
            machines.ends(server, "server")
        for process in clients:
            assert process.wait(60) == 0
        equal_models(machines)
        assert machines.text("b").count("trained from version") == ROUNDS
        if seconds > NOTICED + BUSY:
            assert 0 < gone < NOTICED + BUSY
    finally:
        machines.close()


@functools.cache
def without_b() -> pt.Run:
    """The simulation in which nothing that b sends can be used."""
    made = replace(small_experiment.experiment("fedalt", ROUNDS), data=small_experiment.everyone())
    made = replace(made, attack=pt.attack.nonfinite(), byzantine=["1"])
    return made.run(executor="loop", device="cpu", baselines=False, progress=False)


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """Its client says so and is set aside, each time; the others do not notice."""
    machines = Machines(tmp_path)
    try:
        clients = [machines.client(name) for name in ("a", "c")]
        clients.append(machines.client("b", within=full_disk(machines.state("b"))))
        server = machines.server("--patience", "5s")
        with figure("a disk that is full: from the start of all processes to the end of the run"):
            machines.ends(server, "server")
        assert [process.wait(60) for process in clients] == [0, 0, 0]
        told = machines.text("server")
        assert "client b: error there: OSError: No space left on device" in told
        assert not any(f"client {name}: error" in told for name in NAMES if name != "b")
        same(machines.models(names=("a", "c")), models_of(without_b()))
        assert list(machines.state("b").iterdir()) == []  # outside of its namespace nothing was written
    finally:
        machines.close()
