"""What tests of real clients share: one experiment, simulated and deployed in this process, and its bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import partita as pt
import small
from partita.core.types import ClientState
from partita.data import FederatedData
from partita.deploy import Arrival, Client, Local, serve
from partita.deploy.states import States
from partita.deploy.turn import begun
from partita.engine.store.addresses import Addresses
from partita.recipes.experiment import Experiment

Bits = dict[str, Tensor]


def experiment(**changed: Any) -> Experiment:
    """Return the experiment of `small`, with one thing changed."""
    given: dict[str, Any] = {"model": small.model(), "data": small.data(), "algorithm": small.method()}
    given |= {"rounds": 3, "batch": 4, "evaluate_every": 1, **changed}
    return Experiment(**given)


def clients_of(made: Experiment, folder: Path, **options: Any) -> dict[str, Client]:
    """Return the clients of an experiment, each with its own samples and its own folder."""
    data: FederatedData = made.data
    return {
        name: Client(made, name, data.subset([i]), folder / "clients" / str(i), **options)
        for i, name in enumerate(data.names)
    }


def deployed(
    made: Experiment,
    folder: Path,
    transport: Callable[[Mapping[str, Client]], Local] = Local,
    out: str | None = "out",
    **options: Any,
) -> tuple[pt.Run, dict[str, Client]]:
    """Run an experiment among clients in this process."""
    clients = clients_of(made, folder)
    where = None if out is None else folder / out
    options = {"report": False, "progress": False, "enrolment": 0.1, **options}
    return serve(made, list(made.data.names), transport(clients), where, **options), clients


def simulated(made: Experiment, **options: Any) -> pt.Run:
    """Simulate it, one client after another."""
    return made.run(executor="loop", baselines=False, progress=False, **options)


def bits_of_simulation(run: pt.Run) -> Bits:
    """Return the server's tensors, and what each client keeps."""
    found = {f"shared {k}": v for k, v in run.shared.items()}
    assert run.outcome is not None
    if run.outcome.stage.keeps_state or len(run.outcome.stage.setup.plans) > 1:
        for i in range(len(run.clients)):
            state = run.client(i)._state
            found |= _named(i, state)
    return found


def bits_of_deployment(run: pt.Run, clients: Mapping[str, Client]) -> Bits:
    """Return the server's tensors, and what each client has on its disk."""
    found = {f"shared {k}": v for k, v in run.shared.items()}
    assert run.outcome is not None
    stage, store = run.outcome.stage, run.store
    assert isinstance(store, Addresses)
    if not stage.keeps_state and len(stage.setup.plans) == 1:
        return found
    for i, client in enumerate(clients.values()):
        found |= _named(i, state_of(client, run, i))
    return found


def state_of(client: Client, run: pt.Run, number: int) -> ClientState:
    """Return what a client begins its next turn with, from its own disk."""
    assert run.outcome is not None
    assert isinstance(run.store, Addresses)
    states = States(client.folder, client.runs(ended=False)[-1])
    stage = run.outcome.stage
    return begun(stage.setup, stage, states, run.store.of(number))


def _named(number: int, state: ClientState) -> Bits:
    parts = state._asdict().items()
    return {f"{part} {number} {k}": v for part, tensors in parts for k, v in tensors.items()}


def assert_same(a: Bits, b: Bits) -> None:
    """Compare bit for bit."""
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())[:4]
    wrong = [k for k in a if a[k].dtype != b[k].dtype or not torch.equal(a[k], b[k])]
    assert not wrong, wrong[:6]


def without_times(run: pt.Run) -> list[dict[str, Any]]:
    """Return the rows of metrics, but for what is of virtual or of real time."""
    timed = ("seconds", "time", "active")
    return [{k: v for k, v in row.items() if k not in timed} for row in run.metrics]


class Recorded(Local):
    """A transport that remembers all messages, and may change what arrives."""

    def __init__(self, clients: Mapping[str, Client]) -> None:
        super().__init__(clients)
        self.messages: list[bytes] = []
        self.arrived: list[bytes] = []
        self.change: Callable[[Arrival], list[Arrival]] = lambda arrival: [arrival]

    def send(self, name: str, request: str, *body: bytes) -> None:
        self.messages.append(b"".join(body))
        super().send(name, request, *body)

    def receive(self, timeout: float) -> list[Arrival]:
        arrivals = super().receive(timeout)
        self.arrived += [arrival.body for arrival in arrivals]
        self.messages += [arrival.body for arrival in arrivals]
        return [changed for arrival in arrivals for changed in self.change(arrival)]


def linear() -> nn.Module:
    return pt.models.logistic(4, 2)
