"""The client's side: a stream to the server, opened again when it breaks, and one request at a time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import queue
import random
import secrets
import time
from collections.abc import Callable
from typing import Any

from partita.core import check
from partita.deploy.grpc import background, frames, tls
from partita.deploy.grpc.frames import Broken
from partita.deploy.transport import Handler

WELCOME = 20.0  # seconds in which a server has to say welcome
SHORTEST, LONGEST = 0.2, 5.0  # seconds between two attempts to connect
FATAL = ("PERMISSION_DENIED", "UNAUTHENTICATED", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "UNIMPLEMENTED")
PASSING = ("DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
"""What a server says that may be otherwise when it is asked again."""


class GrpcClient:
    """A client's connection to its server: `run(handler)` answers requests until the run is over.

    A request that is here stays here when the link breaks: it is not sent again, and neither is its reply
    computed again.

    largest  bytes of the largest request that is taken
    give_up  seconds without a server after which it ends
    """

    def __init__(
        self,
        address: str,
        credentials: tls.Credentials | None,
        *,
        largest: int,
        name: str = "",
        give_up: float = math.inf,
        notice: Callable[[str], None] = lambda text: None,  # noqa: ARG005
    ) -> None:
        self.host, self.port = tls.address("server", address)
        if credentials is None and not tls.is_loopback(self.host):
            allowed = "an address of this machine, such as 127.0.0.1:8443, or TLS"
            raise check.fail("server", address, allowed, "without TLS no other machine is called")
        self.largest, self.name, self.notice = largest, name, notice
        self._grpc = tls.library("grpc.aio") and tls.library("grpc")
        self._credentials = credentials
        self._give_up = give_up
        self._instance = secrets.token_hex(8)
        self._session, self._welcome, self._known = "", False, False
        self._most = 0
        self._work: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._bodies: dict[tuple[str, str], bytes] = {}
        """Requests that nobody works yet, by session and name."""
        self._has: dict[str, bytes | None] = {}
        """Requests that are here, in order, with the reply where there is one."""
        self._sent: set[str] = set()
        self._wake = asyncio.Event()
        self._stop = asyncio.Event()

    def run(self, handler: Handler) -> None:
        """Answer requests, one after another in this thread, until the server says that the run is over.

        A refusal by the server, of this client's key for example, is raised; what may pass is waited for.
        """
        linked = background.start(self._ended())
        try:
            while (request := self._work.get()) is not None:
                body = self._bodies.pop(request, None)
                if body is not None:
                    self._call(self._answered, *request, self._reply(handler, body))
        finally:
            self._call(self._stop.set)
            concurrent.futures.wait((linked,), 5.0)
        linked.result(0)

    def stop(self) -> None:
        """End `run` after the request that is worked now; for another thread."""
        self._work.put(None)

    def waiting(self) -> list[str]:
        """Return the requests that are here and have no reply yet, in order."""
        return [name for name, reply in list(self._has.items()) if reply is None]

    def _reply(self, handler: Handler, body: bytes) -> bytes:
        """Return the reply to a request; an empty one where the handler fails, which ends nothing here."""
        try:
            reply = handler.handle(body)
        except Exception as error:
            self.notice(f"a request failed: {check.named_reason(error)}")
            return b""
        if len(reply) > self._most:
            self.notice(f"a reply of {len(reply)} bytes, where the server takes {self._most}: not sent")
            return b""
        return reply

    # ---- in the thread of the loop

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        background.loop().call_soon_threadsafe(function, *arguments)

    def _answered(self, session: str, name: str, reply: bytes) -> None:
        if session == self._session and name in self._has:
            self._has[name] = reply
            self._wake.set()

    async def _ended(self) -> None:
        """Return when the run is over, or when `run` does not go on."""
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await self._linked(stopped)
        finally:
            stopped.cancel()
            self._work.put(None)

    async def _linked(self, stopped: asyncio.Task[Any]) -> None:
        """Keep a stream to the server, until the run is over or one side refuses the other."""
        wait, told, heard = SHORTEST, "", time.monotonic()
        while not self._stop.is_set():
            stream = asyncio.create_task(self._stream())
            await asyncio.wait((stream, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not stream.done():
                stream.cancel()
                await asyncio.wait((stream,))
                return
            error = stream.exception()
            if error is None:
                if stream.result():
                    return
                wait, told, heard = SHORTEST, "", time.monotonic()
                self.notice("the server has ended the connection; waiting for it")
            else:
                if self._welcome:
                    wait, heard, self._welcome = SHORTEST, time.monotonic(), False
                told = await self._failed(error, told)
                if time.monotonic() - heard > self._give_up:
                    reason = f"it could not be reached for {self._give_up:g} s"
                    raise check.fail("server", f"{self.host}:{self.port}", "a server that is there", reason)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(stopped), wait * random.uniform(0.7, 1.0))
            wait = min(LONGEST, 2 * wait)

    async def _failed(self, error: BaseException, told: str) -> str:
        """Say once what is waited for; raise what does not pass by waiting.

        Anybody on the way can spoil a handshake. So after a first welcome, which nobody can pretend, that is
        waited for, too; what the server says within TLS is final.
        """
        if isinstance(error, asyncio.CancelledError | TimeoutError):
            text = "the server does not answer"
        elif isinstance(error, self._grpc.RpcError):
            code, detail = error.code().name, str(error.details() or "")
            if code in FATAL:
                raise self._refused(detail or code)
            text = "the server cannot be reached"
            if code in PASSING:
                text = f"the server says: {detail or code}"
            elif reason := await asyncio.get_running_loop().run_in_executor(None, self._refusal):
                if not self._known:
                    raise self._refused(reason)
                text = reason
        else:
            raise error
        text = f"{text}; waiting for {self.host}:{self.port}"
        if text != told:
            self.notice(text)
        return text

    def _refusal(self) -> str:
        """Return why a server that is there and this client do not come together; '' if unknown."""
        if self._credentials is not None:
            return tls.refusal(self.host, self.port, self._credentials)
        there = tls.speaks_tls(self.host, self.port)
        return "it speaks TLS, and this client does not: leave out --insecure-loopback" if there else ""

    def _refused(self, reason: str) -> check.Refused:
        allowed = "a server, an authority and a key that belong together (partita deploy keys)"
        return check.fail("server", f"{self.host}:{self.port}", allowed, reason)

    def _channel(self) -> Any:
        options = tls.settings(
            use_local_subchannel_pool=1,
            enable_retries=0,
            enable_http_proxy=0 if tls.is_loopback(self.host) else 1,
        )
        where = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        if self._credentials is None:
            return self._grpc.aio.insecure_channel(where, options=options)
        authority, certificate, key = self._credentials.read()
        secure = self._grpc.ssl_channel_credentials(authority, key, certificate)
        return self._grpc.aio.secure_channel(where, secure, options=options)

    async def _stream(self) -> bool:
        """Open a stream and use it until it ends; tell whether the run is over."""
        async with self._channel() as channel:
            stream = channel.stream_stream(frames.METHOD)()
            hello = {"version": frames.VERSION, "instance": self._instance, "name": self.name}
            has = {"session": self._session, "has": list(self._has)}
            await stream.write(frames.packed(frames.HELLO, {**hello, **has}))
            data = await asyncio.wait_for(stream.read(), WELCOME)
            frame = self._unpacked(data) if isinstance(data, bytes) else None
            if frame is None or frame.kind != frames.WELCOME:
                await stream.code()  # raises nothing; the read below has the error
                raise self._refused("it does not say welcome")
            self._welcomed(frame)
            self.notice(f"connected to {self.host}:{self.port}")
            writer = asyncio.create_task(self._write(stream))
            reader = asyncio.create_task(self._read(stream))
            try:
                done, _ = await asyncio.wait((writer, reader), return_when=asyncio.FIRST_COMPLETED)
                if reader not in done:
                    done, _ = await asyncio.wait((reader,), timeout=WELCOME)
                return reader.result() if reader in done else False
            finally:
                for task in (writer, reader):
                    task.cancel()
                await asyncio.gather(writer, reader, return_exceptions=True)

    def _unpacked(self, data: bytes) -> frames.Frame:
        try:
            return frames.unpacked(data)
        except Broken as error:
            raise self._refused(f"it has sent {error}") from None

    def _welcomed(self, frame: frames.Frame) -> None:
        session, most = frame.head.get("session"), frame.head.get("largest")
        if not isinstance(session, str) or type(most) is not int:
            raise self._refused("its welcome is not one")
        if session != self._session:
            self._has.clear()  # requests of a server that has ended
            self._bodies.clear()
        self._session, self._most = session, most
        self._welcome = self._known = True
        self._sent.clear()
        self._wake.set()

    async def _write(self, stream: Any) -> None:
        """Send each reply, in the order of the requests."""
        while True:
            self._wake.clear()
            ready = [(n, r) for n, r in self._has.items() if r is not None and n not in self._sent]
            for name, reply in ready:
                self._sent.add(name)
                for frame in frames.message(name, reply):
                    await stream.write(frame)
            if not ready:
                await self._wake.wait()

    async def _read(self, stream: Any) -> bool:
        """Take requests until the stream ends; tell whether the run is over."""
        current: frames.Assembly | None = None
        while isinstance(data := await stream.read(), bytes):
            frame = self._unpacked(data)
            if frame.kind == frames.DONE:
                name = str(frame.head.get("id"))
                self._forget(name)
                if current is not None and current.name == name:
                    current.forget()
            elif frame.kind == frames.BYE:
                return self._parted(str(frame.head.get("why")))
            else:
                current = self._assembled(current, frame)
                if current.complete:
                    if (body := current.body) is not None:
                        self._has[current.name] = None
                        self._bodies[self._session, current.name] = body
                        self._work.put((self._session, current.name))
                    current = None
        return False

    def _forget(self, name: str) -> None:
        """Drop a request that the server has the reply to, or does not want any more."""
        self._has.pop(name, None)
        self._bodies.pop((self._session, name), None)
        self._sent.discard(name)

    def _parted(self, why: str) -> bool:
        if why == "replaced":
            reason = f"another process with the key of {self.name!r} has connected"
            raise check.fail("server", f"{self.host}:{self.port}", "one process for each client", reason)
        if why == "revoked":
            raise self._refused("this key is not on its roster any more")
        return why == "over"

    def _assembled(self, current: frames.Assembly | None, frame: frames.Frame) -> frames.Assembly:
        """Return the request that a frame belongs to, with its piece."""
        try:
            if frame.kind == frames.BEGIN and current is None:
                current = frames.Assembly(frame.head)
                if current.size > self.largest:
                    raise Broken(f"a request of {current.size} bytes, where at most {self.largest} may come")
                if len(self._has) >= frames.AHEAD:
                    raise Broken(f"a further request before {frames.AHEAD} were answered")
            elif frame.kind != frames.MORE or current is None:
                raise Broken(f"a frame of kind {frame.kind} that may not come now")
            current.add(frame.piece)
        except Broken as error:
            raise self._refused(f"it has sent {error}") from None
        return current
