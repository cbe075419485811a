"""What tests of the transport share: a cable that can be cut, handlers, a peer that says what it likes."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from partita.deploy import roster
from partita.deploy.grpc import GrpcClient, GrpcTransport, frames
from partita.deploy.grpc.tls import Credentials
from partita.deploy.transport import Arrival, Handler

PATIENCE = 180.0  # of machines with other work, on which processes start slowly
"""Seconds after which a test gives up what has to happen."""


def credentials(keys: Path, who: str) -> Credentials:
    """The keys of the server, or of a client."""
    kind = "server" if who == "server" else "client"
    return Credentials(*(keys / who / name for name in ("ca.crt", f"{kind}.crt", f"{kind}.key")))


def until(happened: Callable[[], Any]) -> Any:
    """Wait for something; fail if it does not happen."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if result := happened():
            return result
        time.sleep(0.01)
    raise AssertionError("it has not happened")


class Cable:
    """A TCP connection to a port through one that can be cut, frozen, or break after so many bytes."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.ends: list[socket.socket] = []
        self.up, self.flows, self.breaks_after = True, threading.Event(), -1
        self.flows.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End the connections; new ones end at once."""
        self.up = False
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self.ends.clear()

    def mend(self) -> None:
        self.up = True
        self.flows.set()

    def freeze(self) -> None:
        """Let nothing through, without a word to either end."""
        self.flows.clear()

    def close(self) -> None:
        self.mend()
        self.cut()
        self.listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                try:
                    if not self.up:
                        raise OSError
                    far = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    near.close()
                    continue
                self.ends += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                self.flows.wait()
                if self.breaks_after >= 0:
                    self.breaks_after -= len(data)
                    if self.breaks_after < 0:
                        break
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Echo:
    """A handler that returns what it is sent, and remembers it."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def handle(self, body: bytes) -> bytes:
        self.seen.append(body)
        return body


class Gate(Echo):
    """A handler that answers when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.entered = threading.Event(), threading.Event()

    def handle(self, body: bytes) -> bytes:
        self.seen.append(body)
        self.entered.set()
        assert self.open.wait(PATIENCE)
        return body


class Site:
    """A client in a thread, and what came of it."""

    def __init__(self, client: GrpcClient, handler: Handler) -> None:
        self.client, self.error = client, None
        self.thread = threading.Thread(target=self._run, args=(handler,), daemon=True)
        self.thread.start()

    def _run(self, handler: Handler) -> None:
        try:
            self.client.run(handler)
        except BaseException as error:
            self.error = error

    def end(self) -> BaseException | None:
        """Wait for it to end by itself."""
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive(), "the client has not ended"
        return self.error


class Net:
    """A server and clients on this machine, and all that they have said."""

    def __init__(self, keys: Path) -> None:
        self.keys, self.said, self.closing = keys, [], contextlib.ExitStack()
        self.sites: list[Site] = []

    def server(self, port: int = 0, largest: int = 1 << 26) -> GrpcTransport:
        clients = roster.read(self.keys / "server" / roster.FILE)
        transport = GrpcTransport(
            f"127.0.0.1:{port}",
            clients,
            credentials(self.keys, "server"),
            largest=largest,
            notice=lambda name, text: self.said.append(f"{name}: {text}"),
        )
        self.closing.callback(transport.close)
        return transport

    def client(self, name: str, port: int, handler: Handler, largest: int = 1 << 26, **keys: Any) -> Site:
        own = keys.get("credentials") or credentials(self.keys, name)
        client = GrpcClient(
            f"127.0.0.1:{port}", own, largest=largest, name=name, notice=lambda text: self.said.append(text)
        )
        site = Site(client, handler)
        self.sites.append(site)
        return site

    def cable(self, port: int) -> Cable:
        cable = Cable(port)
        self.closing.callback(cable.close)
        return cable

    def close(self) -> None:
        for site in self.sites:
            site.client.stop()
        self.closing.close()


def replies(transport: GrpcTransport, count: int) -> list[Arrival]:
    """Receive so many replies."""
    found: list[Arrival] = []
    until(lambda: found.extend(transport.receive(0.1)) or len(found) >= count)
    return found


@contextlib.contextmanager
def raw(port: int, own: Credentials | None, said: list[bytes]) -> Iterator[tuple[Any, Callable[[], bytes]]]:
    """A peer without manners: it sends `said`, to which may be added, and reads frames as they come."""
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    if own is None:
        channel = grpc.insecure_channel(f"127.0.0.1:{port}", options)
    else:
        authority, certificate, key = own.read()
        secure = grpc.ssl_channel_credentials(authority, key, certificate)
        channel = grpc.secure_channel(f"127.0.0.1:{port}", secure, options)
    ended = threading.Event()

    def speech() -> Iterator[bytes]:
        while not ended.is_set():
            while said:
                yield said.pop(0)
            time.sleep(0.005)

    call = channel.stream_stream(frames.METHOD)(speech(), timeout=PATIENCE)
    try:
        yield call, lambda: next(call)
    finally:
        ended.set()
        call.cancel()
        channel.close()


@contextlib.contextmanager
def lying(keys: Path, said: list[bytes]) -> Iterator[int]:
    """A server with the keys of the federation that says what it likes to whoever connects; its port."""

    def speech(hears: Iterator[bytes], _: Any) -> Iterator[bytes]:
        next(hears)
        yield from said
        ended.wait(PATIENCE)

    ended = threading.Event()
    server = grpc.server(futures.ThreadPoolExecutor(8))
    service, method = frames.METHOD[1:].split("/")
    handlers = {method: grpc.stream_stream_rpc_method_handler(speech)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    authority, certificate, key = credentials(keys, "server").read()
    secure = grpc.ssl_server_credentials([(key, certificate)], authority, True)
    port = server.add_secure_port("127.0.0.1:0", secure)
    server.start()
    try:
        yield port
    finally:
        ended.set()
        server.stop(0)


def hello(**more: Any) -> bytes:
    return frames.packed(frames.HELLO, {"version": frames.VERSION, "instance": "raw", **more})
