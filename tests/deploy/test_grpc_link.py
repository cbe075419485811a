"""The transport where links and machines fail: cut and frozen links, restarts, replies that come once."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from cable import Echo, Gate, Net, credentials, hello, raw, replies, until

from partita.core.check import Refused
from partita.deploy import keys as deployed
from partita.deploy import roster
from partita.deploy.grpc import frames, tls
from support import each

P = frames.PIECE


def body(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def test_bodies_of_all_sizes_arrive_as_they_were(net: Net) -> None:
    transport = net.server()
    echoes = {name: Echo() for name in "abc"}
    for name, echo in echoes.items():
        net.client(name, transport.port, echo)
    sizes = (0, 1, 17_000, P - 1, P, P + 1, 3 * P, 5_000_000)
    for name in "abc":  # nobody needs to be there yet
        for size in sizes:
            transport.send(name, f"{name}{size}", body(size))
    found = replies(transport, 3 * len(sizes))
    for name in "abc":
        own = [(a.request, a.body) for a in found if a.name == name]
        assert own == [(f"{name}{size}", body(size)) for size in sizes]
        assert echoes[name].seen == [body(size) for size in sizes]
    assert transport.present() == frozenset("abc")
    assert transport.receive(0) == []
    traffic = transport.traffic()["a"]
    assert traffic.sent >= sum(sizes)
    assert traffic.received >= sum(sizes)


def test_what_comes_later_displaces_nothing(net: Net) -> None:
    transport, gate = net.server(), Gate()
    net.client("a", transport.port, gate)
    for request in ("train", "score", "train-2", "score-2"):
        transport.send("a", request, request.encode())
    assert gate.entered.wait(30)
    transport.send("a", "last", b"last")
    gate.open.set()
    assert [a.request for a in replies(transport, 5)] == ["train", "score", "train-2", "score-2", "last"]


def test_what_is_given_up_is_not_worked_and_does_not_arrive(net: Net) -> None:
    transport, gate = net.server(), Gate()
    net.client("a", transport.port, gate)
    for request in ("working", "waiting", "far", "wanted"):
        transport.send("a", request, request.encode())
    assert gate.entered.wait(30)
    for request in ("working", "waiting", "far", "unknown"):
        transport.cancel("a", request)
    transport.send("b", "nobody", b"is there")
    transport.cancel("b", "nobody")
    until(lambda: net.sites[0].client.waiting() == ["wanted"])
    gate.open.set()
    assert [a.request for a in replies(transport, 1)] == ["wanted"]
    assert gate.seen == [b"working", b"wanted"]
    assert transport.receive(0) == []


def test_a_link_that_is_down_while_a_client_works(net: Net) -> None:
    """The request is not sent again, nor worked again: its reply comes when the link is there again."""
    transport, gate = net.server(), Gate()
    cable = net.cable(transport.port)
    net.client("a", cable.port, gate)
    transport.send("a", "one", body(17_000))
    transport.send("a", "two", body(17_001))
    assert gate.entered.wait(30)
    cable.cut()
    until(lambda: not transport.present())
    gate.open.set()
    transport.send("a", "three", body(17_002))
    assert transport.receive(0.5) == []
    cable.mend()
    assert [a.body for a in replies(transport, 3)] == [body(17_000 + i) for i in range(3)]
    assert gate.seen == [body(17_000 + i) for i in range(3)]


@each("after", [0, 2000, 20_000, 3_000_000, 5_500_000, 9_000_000])
def test_a_link_that_breaks_within_a_message(net: Net, after: int) -> None:
    transport, echo = net.server(), Echo()
    cable = net.cable(transport.port)
    cable.breaks_after = after
    site = net.client("a", cable.port, echo)
    transport.send("a", "one", body(5_000_000))
    until(lambda: cable.breaks_after < 0)
    cable.breaks_after = -1
    (reply,) = replies(transport, 1)
    assert reply == ("a", "one", body(5_000_000))
    assert len(echo.seen) == 1
    site.client.stop()
    site.end()
    until(lambda: not transport.present())
    transport.close()


def test_a_frozen_link_is_noticed(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither end hears that the link is dead; pings are not answered."""
    monkeypatch.setattr(tls, "PING", 500)
    monkeypatch.setattr(tls, "PONG", 500)
    transport, echo = net.server(), Echo()
    cable = net.cable(transport.port)
    net.client("a", cable.port, echo)
    until(transport.present)
    cable.freeze()
    transport.send("a", "one", b"one")
    until(lambda: not transport.present())
    cable.cut()
    cable.mend()
    assert [a.request for a in replies(transport, 1)] == ["one"]


def test_a_server_that_ends_is_waited_for(net: Net) -> None:
    """The next server has other requests by the same names; what it gets is its own."""
    first, gate = net.server(), Gate()
    net.client("a", first.port, gate)
    first.send("a", "1", b"of the first server")
    assert gate.entered.wait(30)
    first.close()
    second = net.server(port=first.port)
    second.send("a", "1", b"of the second server")
    until(second.present)
    gate.open.set()
    assert replies(second, 1) == [("a", "1", b"of the second server")]
    assert second.receive(0) == []
    assert gate.seen == [b"of the first server", b"of the second server"]


def test_when_the_run_is_over_clients_end(net: Net) -> None:
    transport = net.server()
    sites = [net.client(name, transport.port, Echo()) for name in "abc"]
    until(lambda: len(transport.present()) == 3)
    transport.close(over=True)
    assert [site.end() for site in sites] == [None] * 3
    transport.close()


def test_of_two_processes_with_one_key_the_newer_goes_on(net: Net) -> None:
    transport = net.server()
    older = net.client("a", transport.port, Echo())
    until(transport.present)
    net.client("a", transport.port, Echo())
    error = older.end()
    assert isinstance(error, Refused)
    assert "another process with the key of 'a'" in str(error)
    transport.send("a", "one", b"one")
    assert len(replies(transport, 1)) == 1


def test_a_client_that_was_killed_begins_again(net: Net) -> None:
    """A new process knows nothing, so the request is sent to it again."""
    transport = net.server()
    transport.send("a", "one", b"one")
    with raw(transport.port, credentials(net.keys, "a"), [hello()]) as (_, read):
        assert frames.unpacked(read()).kind == frames.WELCOME
        assert frames.unpacked(read()).head["id"] == "one"
    until(lambda: not transport.present())
    net.client("a", transport.port, Echo())
    assert replies(transport, 1) == [("a", "one", b"one")]


def test_a_handler_that_fails_answers_all_the_same(net: Net) -> None:
    class Full(Echo):
        def handle(self, body: bytes) -> bytes:
            if not self.seen:
                self.seen.append(body)
                raise OSError(28, "No space left on device")
            return body

    transport = net.server()
    net.client("a", transport.port, Full())
    transport.send("a", "one", b"one")
    transport.send("a", "two", b"two")
    assert replies(transport, 2) == [("a", "one", b""), ("a", "two", b"two")]
    assert any("No space left" in text for text in net.said)


def test_a_roster_that_changes(net: Net, tmp_path: Path) -> None:
    """Who is added is admitted at once, who is removed is dismissed; the others do not notice."""
    own = tmp_path / "keys"
    shutil.copytree(net.keys, own)
    transport = net.server()
    stays, goes = (net.client(name, transport.port, Echo()) for name in "ab")
    until(lambda: transport.present() == {"a", "b"})
    deployed.make(own, ["d"])
    pinned = roster.read(own / "server" / roster.FILE)
    transport.revise({name: key for name, key in pinned.items() if name != "b"})
    error = goes.end()
    assert isinstance(error, Refused)
    assert "not on its roster any more" in str(error)
    net.client("d", transport.port, Echo(), credentials=credentials(own, "d"))
    until(lambda: transport.present() == {"a", "d"})
    for name in "ad":
        transport.send(name, "one", name.encode())
    assert sorted(replies(transport, 2)) == [("a", "one", b"a"), ("d", "one", b"d")]
    assert stays.error is None
    assert isinstance(net.client("b", transport.port, Echo()).end(), Refused)
