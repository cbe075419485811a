"""Whom the transport refuses, and what a peer that says what it likes can do: nothing to anybody else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from cable import PATIENCE, Echo, Net, credentials, hello, lying, raw, replies, until

from partita.core.check import Refused
from partita.deploy import keys as deployed
from partita.deploy import roster
from partita.deploy.grpc import GrpcClient, GrpcTransport, frames, server, tls
from partita.deploy.grpc.tls import Credentials
from support import each

SOON = 10.0
"""Seconds in which a peer is refused."""


@pytest.fixture(scope="session")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of another federation, with clients of the same names."""
    folder = tmp_path_factory.mktemp("others") / "keys"
    deployed.make(folder, ["a", "b"])
    return folder


@pytest.fixture
def unlisted(keys: Path, tmp_path: Path) -> Credentials:
    """A key that the authority of the federation has signed, and that is on no roster."""
    own = tmp_path / "keys"
    for folder in ("authority", "server"):
        (own / folder).mkdir(parents=True)
        for file in (keys / folder).iterdir():
            if file.name != roster.FILE:
                (own / folder / file.name).write_bytes(file.read_bytes())
    deployed.make(own, ["a"])
    return credentials(own, "a")


def refused(net: Net, port: int, own: Credentials, what: str) -> str:
    """Return why a client ends by itself, in time."""
    begin = time.monotonic()
    error = net.client("a", port, Echo(), credentials=own).end()
    took = time.monotonic() - begin
    print(f"figure: a client with {what}: refused in {took:.2f} s")
    assert took < SOON
    assert isinstance(error, Refused)
    return str(error)


def test_who_is_refused(net: Net, others: Path, unlisted: Credentials) -> None:
    transport = net.server()
    ours, theirs = credentials(net.keys, "a"), credentials(others, "a")
    trusts_others = Credentials(theirs.authority, ours.certificate, ours.key)
    signed_by_others = Credentials(ours.authority, theirs.certificate, theirs.key)
    server = credentials(net.keys, "server")  # a server's certificate is none of a client
    assert "not to be trusted" in refused(
        net, transport.port, trusts_others, "another authority than the server's"
    )
    assert "does not accept" in refused(
        net, transport.port, signed_by_others, "a certificate of another authority"
    )
    assert "does not accept" in refused(net, transport.port, server, "the certificate of the server")
    assert "not on the roster" in refused(net, transport.port, unlisted, "a key that is not on the roster")
    assert "the key is that of 'b'" in refused(
        net, transport.port, credentials(net.keys, "b"), "the key of another client"
    )
    assert transport.present() == frozenset()
    assert any("refused a connection" in text and "sha256:" in text for text in net.said)
    net.client("a", transport.port, Echo())  # nobody else suffers
    transport.send("a", "one", b"one")
    assert replies(transport, 1) == [("a", "one", b"one")]


def test_who_was_welcome_is_not_ended_by_the_network(net: Net, others: Path) -> None:
    """Somebody on the way can spoil each handshake: a client that was welcome waits until it is over."""
    transport, impostor = net.server(), Net(others)
    wrong, cable = impostor.server(), net.cable(transport.port)
    site = net.client("a", cable.port, Echo())
    until(transport.present)
    cable.target = wrong.port
    cable.cut()
    cable.mend()
    until(lambda: any("not to be trusted" in text and "waiting for" in text for text in net.said))
    silent = socket.create_server(("127.0.0.1", 0))  # and one that breaks off each handshake
    threading.Thread(target=alert, args=(silent,), daemon=True).start()
    cable.target = silent.getsockname()[1]
    until(lambda: any("does not accept this client's certificate" in text for text in net.said))
    assert site.error is None
    cable.target = transport.port
    transport.send("a", "one", b"one")
    assert replies(transport, 1) == [("a", "one", b"one")]
    silent.close()
    impostor.close()


def alert(listener: socket.socket) -> None:
    """Answer each connection with an alert of TLS that refuses a certificate."""
    with contextlib.suppress(OSError):
        while True:
            link, _ = listener.accept()
            with link:
                link.recv(1 << 12)
                link.sendall(b"\x15\x03\x03\x00\x02\x02\x2a")


@each("certificate", [False, None])
def test_without_a_certificate_nothing_is_said(net: Net, certificate: bool | None) -> None:
    """Neither over TLS without a certificate nor without TLS: the server answers no hello."""
    transport = net.server()
    if certificate is None:
        channel = grpc.insecure_channel(f"127.0.0.1:{transport.port}")
    else:
        authority = credentials(net.keys, "a").authority.read_bytes()
        channel = grpc.secure_channel(f"127.0.0.1:{transport.port}", grpc.ssl_channel_credentials(authority))
    start = time.monotonic()
    call = channel.stream_stream(frames.METHOD)(iter([hello(name="a")]), timeout=SOON)
    with pytest.raises(grpc.RpcError) as error:
        next(call)
    what = "no TLS" if certificate is None else "no certificate"
    print(f"figure: a peer with {what}: refused in {time.monotonic() - start:.2f} s")
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    assert transport.present() == frozenset()
    channel.close()


def test_a_server_without_tls_is_refused(net: Net) -> None:
    clients = roster.read(net.keys / "server" / roster.FILE)
    transport = GrpcTransport("127.0.0.1:0", clients, None, largest=1 << 20)
    assert "does not speak TLS" in refused(
        net, transport.port, credentials(net.keys, "a"), "TLS, at a server without it"
    )
    transport.close()


def test_a_client_without_tls_is_told_of_it(net: Net) -> None:
    client = GrpcClient(f"127.0.0.1:{net.server().port}", None, largest=1 << 20, name="a")
    with pytest.raises(Refused, match="leave out --insecure-loopback"):
        client.run(Echo())


def test_without_tls_only_this_machine(net: Net) -> None:
    for listen in ("0.0.0.0:0", "[::]:0", "192.0.2.1:8443", "example.org:8443"):
        with pytest.raises(Refused, match="without TLS"):
            GrpcTransport(listen, {"a": "sha256:"}, None, largest=1)
        with pytest.raises(Refused, match="without TLS"):
            GrpcClient(listen.replace(":0", ":1"), None, largest=1)
    transport = GrpcTransport("localhost:0", {"a": "", "b": " "}, None, largest=1 << 20)
    client = GrpcClient(f"localhost:{transport.port}", None, largest=1 << 20, name="b")
    site = net.client("a", transport.port, Echo())
    assert isinstance(site.end(), Refused)
    thread = threading.Thread(target=client.run, args=(Echo(),), daemon=True)
    thread.start()
    transport.send("b", "one", b"one")
    assert replies(transport, 1) == [("b", "one", b"one")]
    transport.close(over=True)
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_an_address_that_is_taken(net: Net) -> None:
    transport = net.server()
    with pytest.raises(Refused, match="--listen"):
        net.server(port=transport.port)
    for wrong in ("8443", "host:", ":8443", "host:port", "host:70000", "::1:8443", ""):
        with pytest.raises(Refused, match="HOST:PORT"):
            tls.address("--listen", wrong)
    assert tls.address("x", "[::1]:1") == ("::1", 1)
    assert tls.address("x", "h-1.example:65535") == ("h-1.example", 65535)


def ended(read: Callable[[], bytes]) -> grpc.StatusCode:
    """Return how a stream ends, whatever is said before."""
    try:
        while True:
            read()
    except grpc.RpcError as error:
        return error.code()


def begin(name: str, size: int, piece: bytes = b"") -> bytes:
    return frames.packed(frames.BEGIN, {"id": name, "size": size}, piece)


BROKEN: dict[str, list[bytes]] = {
    "no frame": [b""],
    "short": [b"\x00" * 4],
    "a long header": [struct.pack("<BI", frames.BEGIN, 1 << 30) + b"{}"],
    "no JSON": [struct.pack("<BI", frames.BEGIN, 2) + b"{["],
    "nested": [struct.pack("<BI", frames.BEGIN, 4000) + b"[" * 4000],
    "no fields": [struct.pack("<BI", frames.BEGIN, 2) + b"[]"],
    "no name": [frames.packed(frames.BEGIN, {"size": 3}, b"abc")],
    "no size": [frames.packed(frames.BEGIN, {"id": "one"}, b"abc")],
    "a size that is true": [frames.packed(frames.BEGIN, {"id": "one", "size": True}, b"a")],
    "a negative size": [begin("one", -1)],
    "more than announced": [begin("one", 3, b"abcd")],
    "more later": [begin("one", 3, b"ab"), frames.packed(frames.MORE, None, b"cd")],
    "pieces of nothing": [begin("one", 3), frames.packed(frames.MORE)],
    "a short piece": [begin("one", 3, b"ab"), frames.packed(frames.MORE, None, b"c")],
    "a short piece later": [
        begin("one", frames.PIECE + 3, bytes(frames.PIECE)),
        frames.packed(frames.MORE, None, b"ab"),
    ],
    "a further piece with a header": [
        begin("one", frames.PIECE + 3, bytes(frames.PIECE)),
        frames.packed(frames.MORE, {"x": "y" * 4000}, b"abc"),
    ],
    "more of nothing": [frames.packed(frames.MORE, None, b"cd")],
    "two at once": [begin("one", 3, b"ab"), begin("two", 3, b"ab")],
    "an unknown kind": [frames.packed(99)],
    "a second hello": [hello()],
    "a frame of the server": [frames.packed(frames.WELCOME, {"session": ""})],
    "a large frame": [frames.packed(frames.BEGIN, {"id": "one", "size": 3}, bytes(frames.LARGEST))],
}


@each("said", BROKEN.values(), ids=BROKEN.keys())
def test_a_peer_that_breaks_the_protocol_is_cut_off(net: Net, said: list[bytes]) -> None:
    """Its connection ends. Its request is there for its next one, or has failed at once; others go on."""
    transport = net.server()
    site = net.client("b", transport.port, Echo())
    transport.send("a", "one", b"one")
    with raw(transport.port, credentials(net.keys, "a"), [hello(), *said]) as (_, read):
        code = ended(read)
    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
    until(lambda: transport.present() == {"b"})
    transport.send("b", "two", b"two")
    found = replies(transport, 1)
    if found[0].name == "a":
        assert found.pop(0) == ("a", "one", b"")
        found += replies(transport, 1) if not found else []
    assert found == [("b", "two", b"two")]
    site.client.stop()
    transport.close()


def test_random_frames(net: Net) -> None:
    draws = random.Random(0)
    transport = net.server()
    transport.send("a", "one", b"one")
    for _ in range(60):
        said = [draws.randbytes(draws.choice((3, 5, 30, 5000))) for _ in range(3)]
        if draws.random() < 0.5:
            said.insert(0, hello())
        with raw(transport.port, credentials(net.keys, "a"), said) as (_, read):
            assert ended(read) != grpc.StatusCode.OK
    net.client("a", transport.port, Echo())
    assert replies(transport, 1) == [("a", "one", b"one")]


@each("first", [b"", b"GET / HTTP/1.1\r\n\r\n", frames.packed(frames.HELLO, {"version": 99}), b"\x80\x04N."])
def test_a_hello_that_is_none(net: Net, first: bytes) -> None:
    transport = net.server()
    with raw(transport.port, credentials(net.keys, "a"), [first]) as (_, read):
        with pytest.raises(grpc.RpcError) as error:
            read()
        assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert transport.present() == frozenset()
    transport.close()


def test_replays_and_replies_to_nothing_are_ignored(net: Net) -> None:
    transport = net.server()
    transport.send("a", "one", b"request")
    transport.send("b", "two", b"request")
    said = [hello(), begin("none", 3, b"abc"), begin("two", 3, b"abc"), begin("one", 2, b"ok")]
    said += [begin("one", 2, b"no"), begin("two", 0)]
    with raw(transport.port, credentials(net.keys, "a"), said):
        assert replies(transport, 1) == [("a", "one", b"ok")]
        until(lambda: not said)
        assert transport.receive(0.2) == []


def test_a_reply_that_is_too_large_fails_at_once(net: Net) -> None:
    """It is refused by the size that it announces; what follows is not kept."""
    transport = net.server(largest=1000)
    transport.send("a", "one", b"request")
    transport.send("a", "two", b"request")
    piece = frames.packed(frames.MORE, None, bytes(frames.PIECE))
    said = [hello(), begin("one", 600_000_000, bytes(frames.PIECE)), *[piece] * 5]
    with raw(transport.port, credentials(net.keys, "a"), said):
        assert replies(transport, 1) == [("a", "one", b"")]
        until(lambda: not said)
    assert any("600000000 bytes" in text for text in net.said)
    net.client("a", transport.port, Echo())
    assert replies(transport, 1) == [("a", "two", b"request")]


def test_limits_that_are_kept(net: Net) -> None:
    """A client does not send what the server does not take, and takes no request that is too large."""
    transport = net.server(largest=10)
    site = net.client("a", transport.port, Echo(), largest=100)
    transport.send("a", "one", bytes(50))
    transport.send("a", "two", bytes(10))
    assert replies(transport, 2) == [("a", "one", b""), ("a", "two", bytes(10))]
    transport.send("a", "three", bytes(101))
    error = site.end()
    assert isinstance(error, Refused)
    assert "a request of 101 bytes" in str(error)


def test_a_peer_that_says_nothing_does_not_keep_the_server(net: Net) -> None:
    """A TCP connection without TLS, and one whose stream has no hello: the server still ends at once."""
    transport = net.server()
    silent = socket.create_connection(("127.0.0.1", transport.port))
    with raw(transport.port, credentials(net.keys, "a"), []):
        net.client("b", transport.port, Echo())
        until(transport.present)
        transport.close()
    silent.close()
    assert transport.present() == frozenset()


@pytest.mark.slow
def test_600_megabytes_cost_the_server_nothing(net: Net) -> None:
    transport = net.server(largest=1 << 20)
    transport.send("a", "one", b"request")
    transport.send("a", "two", b"request")
    piece: Any = frames.packed(frames.MORE, None, bytes(frames.PIECE))
    said = [hello(), begin("one", 600 << 20, bytes(frames.PIECE))]
    with raw(transport.port, credentials(net.keys, "a"), said) as (_, read):
        assert replies(transport, 1) == [("a", "one", b"")]
        before = resident()
        most = 0
        for _ in range(599):
            said.append(piece)
            until(lambda: len(said) < 3)
            most = max(most, resident() - before)
        until(lambda: not said)
        while frames.unpacked(read()).head.get("id") != "two":
            pass
        said.append(begin("two", 0))
        assert replies(transport, 1) == [("a", "two", b"")]
    assert most < 64 << 20
    print(f"figure: a reply of 600 MB where 1 MB may come: {most / 1e6:.1f} MB more memory")


def test_what_is_kept_of_a_reply_is_what_was_announced(net: Net) -> None:
    """A reply cannot be a million pieces of a byte, each of which costs its frame."""
    transport = net.server(largest=170_000)
    transport.send("a", "one", b"request")
    piece = frames.packed(frames.MORE, {"x": "y" * 4000}, b"1")
    said = [hello(), begin("one", 170_000, b"1"), *[piece] * 1000]
    with raw(transport.port, credentials(net.keys, "a"), said) as (_, read):
        assert ended(read) == grpc.StatusCode.INVALID_ARGUMENT
    assert replies(transport, 1) == [("a", "one", b"")]
    assert any("a piece of 1 bytes where 170000 are due" in text for text in net.said)


def test_a_peer_that_does_not_read_is_cut_off(net: Net) -> None:
    """What the server says to replies to nothing waits for its reader, but not without end."""
    transport = net.server()
    said = [hello()]
    with raw(transport.port, credentials(net.keys, "a"), said) as (_, _read):
        until(transport.present)
        flood = [begin("u" * 200, 0)] * 500
        until(lambda: said.extend(flood) or not transport.present())
        said.clear()
        until(lambda: any("replies to nothing" in text for text in net.said))


@each(
    "said, told",
    [
        ([begin(str(i), 1, b"x") for i in range(3)], "a further request before 2 were answered"),
        ([begin("one", 3, b"x")], "a piece of 1 bytes where 3 are due"),
        ([frames.packed(frames.MORE, None, b"x")], "may not come now"),
    ],
)
def test_a_server_that_breaks_the_protocol_is_left(net: Net, said: list[bytes], told: str) -> None:
    """A client keeps two requests at most, and of each what was announced."""
    welcome = frames.packed(frames.WELCOME, {"session": "s", "largest": 100})
    with lying(net.keys, [welcome, *said]) as port:
        error = net.client("a", port, Echo()).end()
    assert isinstance(error, Refused)
    assert told in str(error)


def test_a_hello_that_does_not_come_holds_up_nobody(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of streams with one key that say nothing, one is there at a time, however many are opened."""
    monkeypatch.setattr(server, "STREAMS", 0)  # as many calls at once as 64, for all keys together
    monkeypatch.setattr(server, "HELLO", PATIENCE)
    transport = net.server()
    monkeypatch.setattr(server, "STREAMS", 4)
    with contextlib.ExitStack() as silent:
        codes = [silent.enter_context(raw(transport.port, credentials(net.keys, "a"), [])) for _ in range(80)]
        net.client("b", transport.port, Echo())
        until(lambda: transport.present() == {"b"})
        transport.send("b", "one", b"one")
        assert replies(transport, 1) == [("b", "one", b"one")]
        assert ended(codes[0][1]) == grpc.StatusCode.RESOURCE_EXHAUSTED
        net.client("a", transport.port, Echo())  # nor the client whose key it is
        until(lambda: transport.present() == {"a", "b"})


def test_a_hello_that_is_late_is_said_again(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client has said may be under way for long: it connects again, and ends for nothing like that."""
    wait = GrpcTransport._hello
    monkeypatch.setattr(server, "HELLO", 0.05)

    class Held:
        """A stream on which nothing arrives."""

        async def read(self) -> bytes:
            return await asyncio.get_running_loop().create_future()

    async def late(self: GrpcTransport, context: Any, key: str) -> dict[str, Any]:  # noqa: ARG001
        monkeypatch.setattr(GrpcTransport, "_hello", wait)
        try:
            return await wait(self, Held(), key)
        finally:
            monkeypatch.setattr(server, "HELLO", PATIENCE)

    monkeypatch.setattr(GrpcTransport, "_hello", late)
    transport = net.server()
    site = net.client("a", transport.port, Echo())
    until(lambda: transport.present() == {"a"})
    assert site.error is None
    assert any("no hello within" in text and "waiting for" in text for text in net.said)


@each("why", ["replaced", "revoked"])
def test_what_a_server_says_is_no_mistake_of_the_client(net: Net, why: str) -> None:
    """Whatever ends a client from outside is about the server, for which a service starts it again."""
    welcome = frames.packed(frames.WELCOME, {"session": "s", "largest": 100})
    with lying(net.keys, [welcome, frames.packed(frames.BYE, {"why": why})]) as port:
        error = net.client("a", port, Echo()).end()
    assert isinstance(error, Refused)
    assert error.field == "server"


def resident() -> int:
    """Bytes of memory that this process has."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def test_a_frame_is_what_it_says() -> None:
    frame = frames.unpacked(frames.packed(7, {"a": "ö"}, b"piece"))
    assert (frame.kind, frame.head, bytes(frame.piece)) == (7, {"a": "ö"}, b"piece")
    data = frames.packed(7, {"a": 1})
    (length,) = struct.unpack_from("<I", data, 1)
    assert json.loads(data[5 : 5 + length]) == {"a": 1}
