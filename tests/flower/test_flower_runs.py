"""Whole runs over a SuperLink and SuperNodes: what dies comes back, and models have a simulation's bits."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from dataclasses import replace
from typing import Any

import pytest
import small_experiment
import torch
from federation import NAMES, Federation, until

from partita.core.types import Tensors

pytestmark = pytest.mark.slow

SET = {"set": "rounds=3"}
WORDS = ("--set", "rounds=3")


@functools.cache
def simulated() -> dict[str, Tensors]:
    """Each client's own model as a simulation ends with it."""
    experiment = replace(small_experiment.experiment("fedalt", 3), data=small_experiment.everyone())
    run = experiment.run(executor="loop", device="cpu", baselines=False, progress=False)
    return {name: run.client(i).model("personal").state_dict() for i, name in enumerate(NAMES)}


def equal_models(federation: Federation) -> None:
    models = federation.models()
    for name in NAMES:
        assert set(models[name]) == set(simulated()[name])
        for key, value in simulated()[name].items():
            assert torch.equal(models[name][key], value), (name, key)


def clients(federation: Federation, **faults: dict[str, Any]) -> None:
    for name in NAMES:
        federation.client(name, *WORDS, **faults.get(name, {}))


def test_a_federation_is_the_simulation(federation: Federation) -> None:
    clients(federation)
    federation.train(**SET)
    federation.ends()
    equal_models(federation)
    rows = [json.loads(line) for line in (federation.out / "metrics.jsonl").read_text().splitlines()]
    print("seconds of rounds", [row["seconds"] for row in rows])


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_client_process_that_is_killed(federation: Federation, when: str) -> None:
    """Before it has trained, and when its state is saved and its reply is not sent: it is asked again."""
    clients(federation, b={"fault": when, "number": 2})
    federation.train(**SET)
    assert federation.clients["b"].wait(120) == -signal.SIGKILL
    began = time.monotonic()
    federation.client("b", *WORDS)
    federation.ends()
    print(f"killed {when}: the run ended {time.monotonic() - began:.1f} s after the client was there again")
    equal_models(federation)


def test_a_client_process_that_is_away_for_long(federation: Federation) -> None:
    """Longer than its ClientApp waits: the server sees an error, and asks again."""
    clients(federation, b={"fault": "before", "number": 1})
    federation.train(**SET, patience="5min")
    assert federation.clients["b"].wait(120) == -signal.SIGKILL
    until(lambda: "client b: Flower reports error" in federation.said())
    federation.client("b", *WORDS)
    federation.ends()
    equal_models(federation)


def test_a_supernode_that_is_killed(federation: Federation) -> None:
    """In a round, with a request in its memory: when it has started again its client is asked again."""
    clients(federation, b={"fault": "hold", "number": 2})
    federation.train(**SET, patience="5min")
    until(federation.held("b").exists)
    federation.long["node-b"].kill()
    federation.long["node-b"].wait()
    federation.held("b").unlink()
    began = time.monotonic()
    federation.node_again("b")
    print(f"the SuperLink let the SuperNode in after {time.monotonic() - began:.1f} s")
    federation.ends()
    print(f"the run ended {time.monotonic() - began:.1f} s after the SuperNode was killed")
    assert "it is asked again" in federation.said()
    equal_models(federation)


def test_a_server_that_is_killed(federation: Federation) -> None:
    """While clients train: another run of Flower goes on with it, from the last checkpoint."""
    clients(federation, b={"fault": "hold", "number": 2})
    federation.train(**SET)
    until(federation.held("b").exists)
    os.kill(federation.server_app(), signal.SIGKILL)
    federation.held("b").unlink()
    federation.stop()
    federation.train(**SET, resume=True)
    federation.ends()
    equal_models(federation)


def test_all_are_killed(federation: Federation) -> None:
    clients(federation, b={"fault": "hold", "number": 2})
    federation.train(**SET)
    until(federation.held("b").exists)
    os.kill(federation.server_app(), signal.SIGKILL)
    for process in federation.clients.values():
        process.kill()
        process.wait()
    federation.held("b").unlink()
    federation.stop()
    clients(federation)
    federation.train(**SET, resume=True)
    federation.ends()
    equal_models(federation)


def test_a_round_that_does_not_wait(federation: Federation) -> None:
    """With a deadline, a round ends without the client that does not answer in time."""
    clients(federation, b={"fault": "hold", "number": 1})
    federation.train(**SET, deadline="30s", quorum="2")
    until(federation.held("b").exists)
    until(lambda: federation.rounds() >= 2)
    federation.held("b").unlink()
    federation.ends()
    assert "client b: no answer in time" in federation.said()
