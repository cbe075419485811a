"""The transport over a grid: who is asked, in which order, and what is asked again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fake_flower
import pytest
from deployed import (
    assert_same,
    bits_of_deployment,
    bits_of_simulation,
    clients_of,
    deployed,
    experiment,
    simulated,
)
from fake_flower import Error, Grid, Node

from partita.core.check import Refused
from partita.deploy import Arrival, Client
from partita.deploy.flower import FlowerTransport, transport
from support import each

LARGEST = 1 << 20


class Hall:
    """A transport over a grid of two clients and a stranger, whose time passes by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_flower.install(monkeypatch)
        self.now = 0.0
        monkeypatch.setattr(transport.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(transport.time, "sleep", self.pass_)
        keys = {name: fake_flower.key() for name in ("ann", "bob", "eve")}
        self.grid = Grid({name: Node(i + 1, pem) for i, (name, (pem, _)) in enumerate(keys.items())})
        self.said: list[str] = []
        self.roster = {name: keys[name][1] for name in ("ann", "bob")}
        self.transport = FlowerTransport(
            self.grid,
            self.roster,
            largest=LARGEST,
            notice=lambda name, text: self.said.append(f"{name}: {text}"),
        )

    def pass_(self, seconds: float) -> None:
        self.now += seconds

    def pushed(self) -> list[tuple[int, bytes]]:
        """Return the requests that were handed to Flower, in order."""
        return [(m.node, m.content["request"]["body"].data) for m in self.grid.pushed]


@pytest.fixture
def hall(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hall]:
    there = Hall(monkeypatch)
    yield there
    monkeypatch.undo()


def echo(name: str, body: bytes) -> bytes:
    return f"{name}:".encode() + body


def test_one_request_at_a_time_in_order(hall: Hall) -> None:
    for number in ("1", "2"):
        hall.transport.send("ann", number, number.encode())
    hall.transport.send("bob", "3", b"3")
    assert hall.transport.receive(0) == []
    assert hall.pushed() == [(1, b"1"), (2, b"3")]
    hall.grid.answer(echo)
    assert hall.transport.receive(0) == [Arrival("ann", "1", b"ann:1"), Arrival("bob", "3", b"bob:3")]
    hall.transport.receive(0)
    hall.grid.answer(echo)
    assert hall.transport.receive(0) == [Arrival("ann", "2", b"ann:2")]
    assert len(hall.pushed()) == 3
    began = hall.now
    assert hall.transport.receive(5.0) == []
    assert hall.now - began == pytest.approx(5.0)


def test_a_name_is_a_key(hall: Hall) -> None:
    """A SuperNode with another key is nobody, and is told of once; one without a readable key too."""
    hall.grid.nodes["odd"] = Node(9, b"no key")
    assert hall.transport.present() == {"ann", "bob"}
    assert [line for line in hall.said if "not on the roster" in line] == hall.said[:2]
    hall.now += transport.LOOK
    hall.grid.nodes["ann"].public_key = hall.grid.nodes["eve"].public_key
    assert hall.transport.present() == {"bob"}
    hall.transport.send("ann", "1", b"1")
    hall.transport.receive(0)
    assert hall.pushed() == []
    hall.transport.revise({"ann": hall.roster["bob"]})
    assert hall.transport.present() == {"ann"}


def test_a_roster_changes_between_two_looks(hall: Hall) -> None:
    """It is followed from another thread: what a receiver iterates over is changed by itself alone."""
    for name in ("ann", "bob"):
        hall.transport.send(name, name, name.encode())
    hall.transport.receive(0)
    pull = hall.grid.pull_messages

    def pulled(ids: list[str]) -> list[Any]:
        hall.transport.revise({"bob": hall.roster["bob"]})
        assert len(hall.transport._lines) == 2
        return pull(ids)

    hall.grid.answer(echo)
    hall.grid.pull_messages = pulled  # type: ignore[method-assign]
    assert len(hall.transport.receive(0)) == 2
    assert hall.transport.present() == {"bob"}
    assert hall.transport._lines.keys() == {"bob"}


def test_a_request_that_is_given_up(hall: Hall) -> None:
    """One that waits is never sent; the reply to one that was sent is nobody's."""
    for number in ("1", "2", "3"):
        hall.transport.send("ann", number, number.encode())
    hall.transport.receive(0)
    hall.transport.cancel("ann", "2")
    hall.transport.cancel("ann", "1")
    hall.grid.answer(echo)
    hall.transport.receive(0)
    hall.grid.answer(echo)
    assert hall.transport.receive(0) == [Arrival("ann", "3", b"ann:3")]
    assert [body for _, body in hall.pushed()] == [b"1", b"3"]


def test_an_error_of_flower_is_no_reply(hall: Hall) -> None:
    """The client counts as away, and is asked again after a while."""
    hall.transport.send("ann", "1", b"1")
    hall.transport.receive(0)
    hall.grid.answer(lambda name, body: Error(0, "no process"))  # noqa: ARG005
    assert hall.transport.receive(0) == []
    assert hall.transport.present() == {"bob"}
    assert any("no process" in line for line in hall.said)
    hall.transport.receive(0)
    assert len(hall.pushed()) == 1
    hall.now += transport.AGAIN
    hall.transport.receive(0)
    hall.grid.answer(echo)
    assert hall.transport.receive(0) == [Arrival("ann", "1", b"ann:1")]
    assert hall.transport.present() == {"ann", "bob"}


def test_who_is_away_is_present_again_when_nothing_is_asked(hall: Hall) -> None:
    hall.transport.send("ann", "1", b"1")
    hall.transport.receive(0)
    hall.grid.answer(lambda name, body: Error(0, "no process"))  # noqa: ARG005
    hall.transport.receive(0)
    hall.transport.cancel("ann", "1")
    assert hall.transport.present() == {"bob"}
    hall.now += transport.AGAIN
    assert hall.transport.present() == {"ann", "bob"}


def test_a_supernode_that_starts_again_is_asked_again(hall: Hall) -> None:
    """What it had in its memory is lost. Whichever reply comes first arrives, the other is ignored."""
    hall.transport.send("ann", "1", b"1")
    hall.transport.receive(0)
    lost = hall.grid.waiting.pop()
    hall.grid.nodes["ann"].last_activated_at = "second"
    hall.now += transport.LOOK
    hall.transport.receive(0)
    assert [body for _, body in hall.pushed()] == [b"1", b"1"]
    hall.grid.reply(lost, Error(5, "node unavailable"))
    assert hall.transport.receive(0) == []
    hall.grid.answer(echo)
    assert hall.transport.receive(0) == [Arrival("ann", "1", b"ann:1")]
    assert hall.transport.receive(0) == []


def test_a_supernode_that_has_gone_is_not_asked(hall: Hall) -> None:
    gone = hall.grid.nodes.pop("ann")
    hall.transport.send("ann", "1", b"1")
    assert hall.transport.present() == {"bob"}
    hall.transport.receive(0)
    assert hall.pushed() == []
    hall.grid.nodes["ann"] = Node(7, gone.public_key)  # it has registered anew
    hall.now += transport.LOOK
    hall.transport.receive(0)
    assert hall.pushed() == [(7, b"1")]


def test_what_flower_does_not_take_is_sent_later(hall: Hall) -> None:
    hall.grid.takes = False
    hall.transport.send("ann", "1", b"1")
    hall.transport.receive(0)
    hall.grid.takes = True
    hall.now += transport.AGAIN
    hall.transport.receive(0)
    assert hall.pushed() == [(1, b"1")]


def array(data: Any) -> Any:
    return {"reply": {"body": fake_flower.Array("uint8", (1,), "numpy.ndarray", data)}}


@each(
    "content",
    [
        {},
        {"reply": {}},
        {"reply": 3},
        {"other": {"body": 1}},
        array("text"),
        array(None),
        array(bytes(LARGEST + 1)),
    ],
)
def test_what_is_no_reply_arrives_empty(content: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        hall = Hall(patch)
        hall.transport.send("ann", "1", b"1")
        hall.transport.receive(0)
        hall.grid.reply(hall.grid.waiting.pop(), content)
        assert hall.transport.receive(0) == [Arrival("ann", "1", b"")]


def test_nothing_is_left_after_the_end(hall: Hall) -> None:
    hall.transport.send("ann", "1", b"1")
    hall.transport.close()
    hall.transport.receive(0)
    assert hall.pushed() == []


def test_flower_that_is_missing_is_named() -> None:
    with pytest.raises(Refused, match="partita\\[flower\\]"):
        transport.messages.library("flwr.no_such_module")


# ---- whole runs


def over_grid(
    monkeypatch: pytest.MonkeyPatch, lose: Callable[[int], bool]
) -> Callable[[Mapping[str, Client]], Any]:
    """Return a transport over a grid whose SuperNodes lose some of what they are asked."""
    monkeypatch.setattr(transport, "AGAIN", 0.0)
    monkeypatch.setattr(transport, "LOOK", 0.0)
    fake_flower.install(monkeypatch)

    def made(clients: Mapping[str, Client]) -> Any:
        keys = {name: fake_flower.key() for name in clients}
        asked = iter(range(1 << 30))

        def work(name: str, body: bytes) -> bytes | Error:
            reply = clients[name].handle(body)
            return Error(5, "node unavailable") if lose(next(asked)) else reply

        class Answering(Grid):
            def pull_messages(self, ids: list[str]) -> list[Any]:
                self.answer(work)
                return super().pull_messages(ids)

        grid = Answering({name: Node(i + 1, pem) for i, (name, (pem, _)) in enumerate(keys.items())})
        return FlowerTransport(grid, {name: pinned for name, (_, pinned) in keys.items()}, largest=LARGEST)

    return made


@pytest.mark.parametrize("lose", [lambda number: False, lambda number: number % 3 == 1], ids=["none", "some"])  # noqa: ARG005
def test_a_run_over_a_grid_is_the_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lose: Callable[[int], bool]
) -> None:
    """Also if replies are lost when clients have trained and saved their states."""
    made = experiment()
    run, clients = deployed(made, tmp_path, over_grid(monkeypatch, lose), out=None, enrolment=60.0)
    assert_same(bits_of_deployment(run, clients), bits_of_simulation(simulated(made)))
    assert run.facts["excluded"] == []
    assert set(clients) == set(clients_of(made, tmp_path / "other"))
