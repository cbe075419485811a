"""Whole runs over gRPC, clients in threads: cut links, rosters and liars leave the bits of a simulation."""

from __future__ import annotations

import functools
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import small_experiment
import torch
from cable import Net, credentials, until
from machines import figure
from safetensors.torch import load_file
from test_faults import FAULTS, Change

import partita as pt
from partita import Run
from partita.deploy import Arrival, Client, Handler, roster, serve
from partita.deploy import keys as deployed
from partita.deploy.wire import unpack
from partita.engine.callbacks import Callback, Event
from partita.recipes import Experiment
from support import each

NAMES = small_experiment.NAMES


def experiment() -> Experiment:
    return small_experiment.experiment("fedalt", rounds=4)


@functools.cache
def simulated() -> Run:
    made = replace(experiment(), data=small_experiment.everyone())
    return made.run(executor="loop", device="cpu", baselines=False, progress=False)


def assert_simulated(run: Run, clients: dict[str, Client]) -> None:
    for key, value in simulated().shared.items():
        assert torch.equal(run.shared[key], value), key
    for i, name in enumerate(NAMES):
        own = simulated().client(i).model("personal").state_dict()
        for key, value in clients[name].model().items():
            assert torch.equal(value, own[key]), (name, key)
        score = simulated().scores("personal")[i]
        assert clients[name].scores() == {"accuracy": pytest.approx(score, abs=1e-12)}


def people(folder: Path) -> dict[str, Client]:
    return {n: Client(experiment(), n, small_experiment.data(n), folder / n) for n in NAMES}


class At(Callback):
    """Does something once, after a round."""

    def __init__(self, number: int, action: functools.partial[None]) -> None:
        self.number, self.action = number, action

    def round(self, event: Event) -> None:
        if event.round == self.number:
            self.action()


class Cut:
    """A handler during whose work the link is cut, once."""

    def __init__(self, handler: Handler, net: Net, port: int) -> None:
        self.handler, self.cable, self.asked, self.event = handler, net.cable(port), 0, 4

    def handle(self, body: bytes) -> bytes:
        self.asked += 1
        if self.asked == self.event:
            self.cable.cut()
        reply = self.handler.handle(body)
        self.cable.mend()
        return reply


def test_a_link_that_is_cut_in_a_round(net: Net, tmp_path: Path) -> None:
    transport, clients = net.server(), people(tmp_path / "states")
    cut = Cut(clients["b"], net, transport.port)
    for name in "ac":
        net.client(name, transport.port, clients[name])
    net.client("b", cut.cable.port, cut)
    run = serve(experiment(), NAMES, transport, tmp_path / "run", progress=False, report=False)
    transport.close(over=True)
    assert [site.end() for site in net.sites] == [None] * 3
    assert transport.traffic()["b"].connections == 2
    assert_simulated(run, clients)


def test_a_client_that_joins_while_a_run_goes_on(net: Net, tmp_path: Path) -> None:
    """It is admitted by the roster, gets a model of its own, and changes nothing for the others."""
    own = tmp_path / "keys"
    shutil.copytree(net.keys, own)
    transport, clients = net.server(), people(tmp_path / "states")
    for name in NAMES:
        net.client(name, transport.port, clients[name])
    late = Client(experiment(), "d", small_experiment.data("a"), tmp_path / "states" / "d")

    def join() -> None:
        deployed.make(own, ["d"])
        transport.revise(roster.read(own / "server" / roster.FILE))
        net.client("d", transport.port, late, credentials=credentials(own, "d"))
        until(lambda: "d" in transport.present())

    callbacks = [At(2, functools.partial(join))]
    run = serve(
        experiment(), NAMES, transport, tmp_path / "run", callbacks=callbacks, progress=False, report=False
    )
    transport.close(over=True)
    assert [site.end() for site in net.sites] == [None] * 4
    assert_simulated(run, clients)
    found = load_file(late.export(tmp_path / "d.safetensors"))
    assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in clients["a"].model().items()}
    for key, value in run.shared.items():
        assert torch.equal(found[key], value)
    assert 0.5 < late.scores()["accuracy"] <= 1


def test_clients_that_are_there_before_their_server(net: Net, tmp_path: Path) -> None:
    """Who comes back to a server that goes on with a run goes on, too."""
    first, clients = net.server(), people(tmp_path / "states")
    for name in NAMES:
        net.client(name, first.port, clients[name])

    class Enough(Exception):
        pass

    def end() -> None:
        raise Enough

    try:
        serve(
            experiment(),
            NAMES,
            first,
            tmp_path / "run",
            callbacks=[At(2, functools.partial(end))],
            progress=False,
            report=False,
        )
    except Enough:
        first.close()
    second = net.server(port=first.port)
    run = serve(experiment(), NAMES, second, tmp_path / "run", resume=True, progress=False, report=False)
    second.close(over=True)
    assert [site.end() for site in net.sites] == [None] * 3
    assert_simulated(run, clients)


# ---- a client that lies


LIES = (
    "NaN",
    "1e30",
    "another shape",
    "another type",
    "another name",
    "one more part",
    "an old reply",
    "pickle",
)


class Liar:
    """A handler whose answers to training are changed, as by a client that lies."""

    def __init__(self, handler: Handler, change: Change) -> None:
        self.handler, self.change = handler, change
        self.replies: list[Arrival] = []

    def handle(self, body: bytes) -> bytes:
        reply = Arrival("b", "", self.handler.handle(body))
        self.replies.append(reply)
        if unpack(body, 1 << 30)[0]["kind"] != "train":
            return reply.body
        (changed,) = self.change(reply, self)  # type: ignore[arg-type]
        return changed.body


@functools.cache
def without_b() -> Run:
    """What the server has where the uploads of b are never used."""
    everyone = small_experiment.everyone()
    attacked = {"attack": pt.attack.nonfinite(), "byzantine": [everyone.names[1]]}
    made = replace(experiment(), data=everyone, **attacked)  # type: ignore[arg-type]
    return made.run(executor="loop", device="cpu", baselines=False, progress=False)


@pytest.mark.slow  # test_faults has all of them within one process
@each("lie", [*LIES, "random bytes"])
def test_a_lie_is_named_and_has_no_effect(net: Net, tmp_path: Path, lie: str) -> None:
    """The others go on as without the liar, whose connection stays."""
    draws = np.random.default_rng(0)
    random = (lambda arrival, _: [arrival._replace(body=draws.bytes(5_000))]), "header"
    change, reason = {**FAULTS, "random bytes": random}[lie]
    transport, clients = net.server(), people(tmp_path / "states")
    for name in NAMES:
        handler = Liar(clients[name], change) if name == "b" else clients[name]
        net.client(name, transport.port, handler)
    with figure(f"{lie} in each upload of a client: a run of {experiment().rounds} rounds"):
        run = serve(experiment(), NAMES, transport, None, progress=False, report=False)
    transport.close(over=True)
    assert [site.end() for site in net.sites[-3:]] == [None] * 3
    assert list(run.facts["excluded_why"]) == ["b"]
    assert reason in run.facts["excluded_why"]["b"]
    assert transport.traffic()["b"].connections == 1
    for key, value in without_b().shared.items():
        assert torch.equal(run.shared[key], value), key
