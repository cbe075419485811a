"""The server's side: one stream for each client, and a queue of requests for it that outlives the stream."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from partita.core import check
from partita.deploy.grpc import background, frames, tls
from partita.deploy.grpc.frames import Broken
from partita.deploy.transport import Arrival

HELLO = 10.0  # seconds in which a client has to say hello
STREAMS = 4  # of one client that may be there at a time, while older ones end
MOST_ANSWERS = 256  # that wait for one client to read them; far fewer come of one that keeps the protocol
FAREWELL = 3.0  # seconds in which clients have to hang up, when the server is done
STARTED = 30.0

Notice = Callable[[str, str], None]
"""What is called with the name of a client ('' for none) and what has happened to it."""


@dataclass
class Traffic:
    """What has passed between the server and one client."""

    sent: int = 0
    received: int = 0
    connections: int = 0
    heard: float | None = None
    """When it was heard last, as `time.time()` counts."""


@dataclass
class Link:
    """One stream of a client."""

    context: Any
    key: str
    instance: str
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    begun: set[str] = field(default_factory=set)
    """Requests that the client has, or is being sent."""
    answers: deque[bytes] = field(default_factory=deque)
    """Small frames to send before anything else."""
    last_word: bytes = b""
    """A frame after which the stream ends."""

    def done(self, request: str) -> None:
        """Tell the client that its reply to a request has arrived, or is not wanted any more."""
        self.answers.append(frames.packed(frames.DONE, {"id": request}))
        self.wake.set()


@dataclass
class Desk:
    """What the server has for one client: requests that wait for a reply, and the stream that it has now."""

    name: str
    requests: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    link: Link | None = None
    streams: int = 0
    traffic: Traffic = field(default_factory=Traffic)

    def drop(self, request: str) -> None:
        """Forget a request, here and at the client."""
        self.requests.pop(request, None)
        if self.link is not None and request in self.link.begun:
            self.link.begun.discard(request)
            self.link.done(request)

    def next(self, link: Link) -> tuple[str, tuple[bytes, ...]] | None:
        """Return the request to send next, if the client has not too many already."""
        if len(link.begun) >= frames.AHEAD:
            return None
        return next(((n, body) for n, body in self.requests.items() if n not in link.begun), None)


class Away(Exception):
    """Raised for a stream that is ended before it is anybody's, with the code of gRPC for that."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class GrpcTransport:
    """Carries requests over streams that clients open. It is a `Transport`.

    `roster` has the fingerprint of each client's key. A reply larger than `largest` bytes is refused by the
    length that it announces. Without credentials nothing is encrypted and a client is who it says it is:
    then only this machine can connect.
    """

    def __init__(
        self,
        listen: str,
        roster: Mapping[str, str],
        credentials: tls.Credentials | None,
        *,
        largest: int,
        notice: Notice = lambda name, text: None,  # noqa: ARG005
    ) -> None:
        host, port = tls.address("--listen", listen)
        if credentials is None and not tls.is_loopback(host):
            allowed = "an address of this machine, such as 127.0.0.1:8443, or TLS"
            raise check.fail("--listen", listen, allowed, "without TLS nobody else may connect")
        self.port = port
        self.largest, self.notice = largest, notice
        self.session = secrets.token_hex(8)
        self._grpc = tls.library("grpc.aio") and tls.library("grpc")
        self._credentials = credentials
        self._names = {key: name for name, key in roster.items()}
        self._desks = {name: Desk(name) for name in roster}
        self._unheard: dict[str, asyncio.Future[Any]] = {}
        """By key, the read of a stream that has said nothing yet."""
        self._arrived: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._stop = asyncio.Event()
        started: Future[None] = Future()
        self._served = background.start(self._serve(host, started))
        try:
            started.result(STARTED)
        except (RuntimeError, OSError, ValueError) as error:
            allowed = "an address of this machine that is free, and the keys of its server"
            raise check.fail("--listen", listen, allowed, check.reason(error)) from error

    # ---- Transport

    def present(self) -> frozenset[str]:
        """Return the names of the clients that are connected now."""
        return frozenset(name for name, desk in list(self._desks.items()) if desk.link is not None)

    def send(self, name: str, request: str, *body: bytes) -> None:
        """Queue a request for a client, which works its requests in order."""
        self._call(self._send, name, request, body)

    def cancel(self, name: str, request: str) -> None:
        """Give up a request: nobody waits for its reply any more."""
        self._call(self._desks[name].drop, request)

    def receive(self, timeout: float) -> list[Arrival]:
        """Return what has come; wait up to `timeout` seconds for the first."""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._arrived.get(timeout=max(0.0, timeout)))
            while True:
                found.append(self._arrived.get_nowait())
        return found

    def close(self, over: bool = False) -> None:
        """End all links. When the run is `over`, clients end too; otherwise they wait for the server."""
        self._call(self._end, over)
        with contextlib.suppress(TimeoutError):
            self._served.result(2 * FAREWELL)

    # ---- beside it

    def revise(self, roster: Mapping[str, str]) -> None:
        """Follow a roster that has changed: admit new clients, and part from those that it has no more."""
        self._call(self._revise, dict(roster))

    def traffic(self) -> dict[str, Traffic]:
        """Return what has passed between the server and each client."""
        return {name: desk.traffic for name, desk in list(self._desks.items())}

    # ---- in the thread of the loop

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        background.loop().call_soon_threadsafe(function, *arguments)

    def _send(self, name: str, request: str, body: tuple[bytes, ...]) -> None:
        desk = self._desks.setdefault(name, Desk(name))
        desk.requests[request] = body
        if desk.link is not None:
            desk.link.wake.set()

    def _revise(self, roster: dict[str, str]) -> None:
        for name in roster:
            self._desks.setdefault(name, Desk(name))
        self._names = {key: name for name, key in roster.items()}
        for name, desk in self._desks.items():
            if desk.link is not None and self._credentials and desk.link.key != roster.get(name):
                self.notice(name, "is not on the roster any more with this key: its connection is closed")
                _part(desk.link, "revoked")

    def _end(self, over: bool) -> None:
        if over:
            for desk in self._desks.values():
                _part(desk.link, "over")
        self._stop.set()

    async def _serve(self, host: str, started: Future[None]) -> None:
        """Listen until the end; `started` tells whether that could begin."""
        try:
            server = self._listening(host)
            await server.start()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        await self._stop.wait()
        until = time.monotonic() + FAREWELL
        while any(d.link and d.link.last_word for d in self._desks.values()) and time.monotonic() < until:
            await asyncio.sleep(0.01)
        await server.stop(0.1)

    def _listening(self, host: str) -> Any:
        """Return gRPC's server, bound to its address."""
        options = tls.settings(
            so_reuseport=0,
            max_concurrent_streams=4,
            **{
                "http2.min_ping_interval_without_data_ms": tls.PING // 2,
                "server_handshake_timeout_ms": 10_000,
            },
        )
        most = (STREAMS + 1) * len(self._desks) + 64
        server = self._grpc.aio.server(options=options, maximum_concurrent_rpcs=most)
        work = self._grpc.stream_stream_rpc_method_handler(self._work)
        service, method = frames.METHOD[1:].split("/")
        server.add_generic_rpc_handlers(
            (self._grpc.method_handlers_generic_handler(service, {method: work}),)
        )
        where = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        if self._credentials is None:
            self.port = server.add_insecure_port(where)
        else:
            authority, certificate, key = self._credentials.read()
            secure = self._grpc.ssl_server_credentials([(key, certificate)], authority, True)
            self.port = server.add_secure_port(where, secure)
        return server

    async def _work(self, _: AsyncIterator[bytes], context: Any) -> None:
        """Serve one stream, until the client or the server ends it."""
        try:
            key = self._key(context)
            hello = await self._hello(context, key)
            desk = self._desk(key, hello)
            if desk.streams >= STREAMS:
                raise Away("RESOURCE_EXHAUSTED", "too many streams with this key")
        except Away as error:
            if error.code == "PERMISSION_DENIED":
                self.notice("", f"refused a connection from {context.peer()}: {error}")
            await context.abort(self._grpc.StatusCode[error.code], str(error))
        desk.streams += 1
        try:
            link = Link(context, key, str(hello.get("instance")))
            await self._converse(desk, self._joined(desk, link, hello))
        except Broken as error:
            self.notice(desk.name, f"broke the protocol ({error}); its connection was closed")
            await context.abort(self._grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            desk.streams -= 1

    async def _converse(self, desk: Desk, link: Link) -> None:
        """Read and write on a stream until one side ends it."""
        writer, reader = (asyncio.create_task(way(desk, link)) for way in (self._write, self._read))
        try:
            await asyncio.wait((writer, reader), return_when=asyncio.FIRST_COMPLETED)
            self._left(desk, link)
            _part(link, "again")
            await asyncio.wait((writer,), timeout=FAREWELL)  # gRPC cannot end a stream within a frame
        finally:
            self._left(desk, link)
            for task in (writer, reader):
                task.cancel()
        if reader.done() and not reader.cancelled() and isinstance(error := reader.exception(), Broken):
            raise error

    def _key(self, context: Any) -> str:
        """Return the key of a stream, before anything is read of it; '' without TLS."""
        if self._credentials is None:
            return ""
        shown = context.auth_context().get("x509_pem_cert") or [b""]
        try:
            key = tls.fingerprint(shown[0])
        except ValueError:
            raise Away("PERMISSION_DENIED", "it showed no certificate") from None
        if key not in self._names:
            raise Away("PERMISSION_DENIED", f"the key {key} is not on the roster")
        return key

    async def _hello(self, context: Any, key: str) -> dict[str, Any]:
        """Return what a stream says first. Of those with one key that say nothing, the newest goes on."""
        reading: asyncio.Future[Any] = asyncio.ensure_future(context.read())
        older = self._unheard.get(key)
        if older is not None and key:
            older.cancel()
        self._unheard[key] = reading
        try:
            done, _ = await asyncio.wait((reading,), timeout=HELLO)
        finally:
            reading.cancel()
            if self._unheard.get(key) is reading:
                del self._unheard[key]
        if not done:
            raise Away("DEADLINE_EXCEEDED", f"no hello within {HELLO:g} s")
        if reading.cancelled():
            raise Away("RESOURCE_EXHAUSTED", "a newer stream with this key was opened before its hello")
        data = reading.result()
        try:
            frame = frames.unpacked(data if isinstance(data, bytes) else b"")
        except Broken as error:
            raise Away("FAILED_PRECONDITION", str(error)) from None
        if frame.kind != frames.HELLO or frame.head.get("version") != frames.VERSION:
            text = f"a client of another version: this server speaks version {frames.VERSION}"
            raise Away("FAILED_PRECONDITION", text)
        return frame.head

    def _desk(self, key: str, hello: dict[str, Any]) -> Desk:
        """Return the desk of the client that has this key, or without TLS this name."""
        says = str(hello.get("name") or "")[:100]
        name = self._names.get(key, "") if key else says
        if name not in self._desks:  # also where its line was removed since
            who = f"the key {key}" if key else repr(name)
            raise Away("PERMISSION_DENIED", f"{who} is not on the roster")
        if says not in ("", name):
            raise Away("PERMISSION_DENIED", f"the key is that of {name!r}, and it says that it is {says!r}")
        return self._desks[name]

    def _joined(self, desk: Desk, link: Link, hello: dict[str, Any]) -> Link:
        """Make a stream the client's. An older one ends; with it its process, if that is another one."""
        old = desk.link
        if old is not None:
            other = old.instance != link.instance
            _part(old, "replaced" if other else "again")
            if other:
                self.notice(desk.name, "connected again from another process; the older one was dismissed")
        has = hello.get("has") if hello.get("session") == self.session else []
        names = {str(n) for n in has[:64]} if isinstance(has, list) else set[str]()
        link.begun = names & set(desk.requests)
        for name in names - link.begun:
            link.done(name)
        head = {"session": self.session, "largest": self.largest}
        link.answers.appendleft(frames.packed(frames.WELCOME, head))
        desk.link = link
        desk.traffic.connections += 1
        desk.traffic.heard = time.time()
        self.notice(desk.name, f"connected from {link.context.peer()}")
        return link

    def _left(self, desk: Desk, link: Link) -> None:
        if desk.link is link:
            desk.link = None
            self.notice(desk.name, "disconnected")

    async def _write(self, desk: Desk, link: Link) -> None:
        """Send what there is for a client, short answers first, until the last word."""

        async def answer() -> None:
            while link.answers:
                await link.context.write(link.answers.popleft())

        while True:
            link.wake.clear()
            await answer()
            if link.last_word:
                await link.context.write(link.last_word)
                return
            request = desk.next(link)
            if request is None:
                await link.wake.wait()
                continue
            name, body = request
            link.begun.add(name)
            for frame in frames.message(name, *body):
                if link.last_word:
                    break
                await link.context.write(frame)
                desk.traffic.sent += len(frame)
                await answer()

    async def _read(self, desk: Desk, link: Link) -> None:
        """Take the replies of a client, until it hangs up."""
        current: frames.Assembly | None = None
        try:
            while isinstance(data := await link.context.read(), bytes):
                desk.traffic.received += len(data)
                desk.traffic.heard = time.time()
                frame = frames.unpacked(data)
                if frame.kind == frames.BEGIN and current is None:
                    current = self._announced(desk, link, frames.Assembly(frame.head))
                elif frame.kind != frames.MORE or current is None:
                    raise Broken(f"a frame of kind {frame.kind} that may not come now")
                if current.name not in desk.requests:
                    current.forget()
                current.add(frame.piece)
                if current.complete:
                    body = current.body
                    if body is not None:
                        self._arrive(desk, current.name, body)
                    current = None
        except Broken:
            if current is not None:
                self._arrive(desk, current.name, b"")
            raise

    def _announced(self, desk: Desk, link: Link, reply: frames.Assembly) -> frames.Assembly:
        """Refuse a reply that is too large, or that nobody waits for, before any of it is kept."""
        if reply.name not in desk.requests:
            if len(link.answers) >= MOST_ANSWERS:
                raise Broken(f"{MOST_ANSWERS} replies to nothing, without reading what is said to them")
            link.done(reply.name[:200])
        elif reply.size > self.largest:
            text = f"announced a reply of {reply.size} bytes, where at most {self.largest} may come: refused"
            self.notice(desk.name, text)
            self._arrive(desk, reply.name, b"")
        return reply

    def _arrive(self, desk: Desk, request: str, body: bytes) -> None:
        if request in desk.requests:
            desk.drop(request)
            self._arrived.put(Arrival(desk.name, request, body))


def _part(link: Link | None, why: str) -> None:
    """End a stream with a last word."""
    if link is not None and not link.last_word:
        link.last_word = frames.packed(frames.BYE, {"why": why})
        link.wake.set()
