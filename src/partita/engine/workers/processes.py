"""Workers that are spawned processes of this machine. They share memory with the driver, and end with it."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from partita.core import check
from partita.engine.workers.messages import Facts, Job, Reply
from partita.engine.workers.wire import Channel, Outbox, Packed, Placed, Region, pack, unpack

TRIES = 4  # of a share: the first one, and three more after workers have died
GRACE = 5.0  # seconds that a worker has to end by itself

PROGRAM = (
    "import json, signal, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "[signal.signal(getattr(signal, n), signal.SIG_IGN) for n in ('SIGINT', 'SIGTERM', 'SIGHUP')]; "
    "from partita.engine.workers.serve import serve; serve(*map(int, sys.argv[2:]))"
)
"""The script of the user is not run again: what workers need of it they are sent.

Before all else it ignores the signals that a terminal or a batch system sends to all processes of a job: the
driver decides what they mean, and needs its workers until the round is over. A worker ends with its driver.
"""

Take = Callable[[int, int, Reply, Any], bool]
"""(worker, share, reply, result) -> whether to go on: takes what a share came to, which it has read then."""


class Process:
    """One worker: the process, the socket to it, and what it has been sent."""

    def __init__(self, number: int, threads: int, device: str) -> None:
        self.number, self._threads, self._device = number, threads, device
        self.restarts, self.running = -1, False
        self.start()

    def start(self) -> None:
        """Spawn it, or spawn it again after its death."""
        ours, theirs = socket.socketpair()
        reading, self._lifeline = os.pipe()
        arguments = [theirs.fileno(), reading, self._threads]
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps([str(p) for p in sys.path]), *map(str, arguments)],
            pass_fds=(theirs.fileno(), reading),
            env={**os.environ, **_variables(self.number, self._threads, self._device)},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        os.close(reading)
        self.channel = Channel(ours)
        self.restarts += 1
        self.running, self.ready = True, False
        self.has: dict[str, int] = {}  # by kind, the key of what it has been sent
        self.outbox = Outbox()
        self._inbox: Region | None = None

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def send_call(self, job: Job, share: int, common: tuple[Outbox, Placed, int]) -> None:
        """Send a share, and before it all that the worker lacks; an OSError if it is gone."""
        box, placed, number = common
        if self.has.get("common") != number:
            region = box.region if box.number != self.has.get("common region") else None
            self.channel.send(("common", placed), _handles(region))
            self.has |= {"common": number, "common region": box.number}
        own = self.outbox.place(job.own[share]())
        self.channel.send(("call", job.call, own), self.outbox.new_handle())

    def send_once(self, kind: str, key: int, content: Sequence[Any], region: Region | None = None) -> None:
        """Send something that it keeps, unless it has it."""
        if self.has.get(kind) != key:
            self.channel.send((kind, *content), _handles(region))
            self.has[kind] = key
            if kind == "samples":
                self.has.pop("stage", None)  # which was bound to others

    def facts(self) -> Facts:
        """Ask an idle worker what it has to compute with."""
        if not self.ready:
            self.receive()
        self.channel.send(("facts",))
        found: Facts = self.channel.receive()[0]
        return found

    def receive(self) -> tuple[Reply, Any] | None:
        """Return a reply and the result; None where it only says that it is ready; EOFError if it is gone."""
        message, handles = self.channel.receive()
        if message == "ready":
            self.ready = True
            return None
        reply, placed = message
        self._inbox = Region.received(handles, self._inbox)
        return reply, unpack(placed.packed(self._inbox)) if reply.error is None else None

    def end(self, at_once: bool = False) -> None:
        """Tell it to end, which it does by itself; at once, whatever it is doing."""
        if not self.running:
            return
        self.running = self.ready = False
        if at_once:
            self._process.kill()
        self.channel.close()
        with contextlib.suppress(OSError):
            os.close(self._lifeline)
        self.outbox.close()

    def wait(self) -> None:
        """Wait until it has ended."""
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _handles(region: Region | None) -> list[int]:
    return [] if region is None else [region.handle]


def _variables(number: int, threads: int, device: str) -> dict[str, str]:
    """Return the environment of a worker: its threads, and with device='cuda' a GPU of its own."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    variables = dict.fromkeys(names, str(threads))
    if device == "cpu":
        return {**variables, "CUDA_VISIBLE_DEVICES": ""}
    if device == "cuda":
        named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        visible = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
        return {**variables, "CUDA_VISIBLE_DEVICES": visible[number % len(visible)]}
    return variables


class ProcessBackend:
    """The driver's side of spawned processes. A free worker takes the next share."""

    def __init__(self, count: int, threads: int, device: str) -> None:
        self.workers = [Process(i, threads, device) for i in range(count)]
        self._samples: tuple[int, Outbox, Placed] | None = None
        self._common, self._number = Outbox(), 0
        self._placed: tuple[Packed, Placed] | None = None
        self._selector = selectors.DefaultSelector()
        self._watched: set[int] = set()

    @property
    def restarts(self) -> list[int]:
        """How often each worker had to be started again."""
        return [worker.restarts for worker in self.workers]

    def facts(self) -> list[Facts]:
        """Ask every worker what it has to compute with."""
        return [worker.facts() for worker in self.workers]

    def compute(self, job: Job, take: Take) -> None:
        """Let the workers compute all shares; a worker that dies is replaced and its share run again."""
        if job.samples is not None and (self._samples is None or self._samples[0] != job.samples.key):
            if self._samples is not None:
                self._samples[1].close()
            box = Outbox()
            self._samples = job.samples.key, box, box.place(pack((job.samples.x, job.samples.y)))
        if self._placed is None or self._placed[0] is not job.common:
            self._number += 1
            self._placed = job.common, self._common.place(job.common)
        common = self._common, self._placed[1], self._number
        todo, busy = collections.deque(range(len(job.own))), dict[int, int]()
        tries: collections.Counter[int] = collections.Counter()
        try:
            self._until_done(job, take, common, todo, busy, tries)
        except BaseException:  # nobody waits for those who are still at work
            for number in busy:
                self._end(self.workers[number])
            raise

    def _until_done(
        self,
        job: Job,
        take: Take,
        common: tuple[Outbox, Placed, int],
        todo: collections.deque[int],
        busy: dict[int, int],
        tries: collections.Counter[int],
    ) -> None:
        starts: collections.Counter[int] = collections.Counter()
        for worker in self.workers:
            if not worker.running:
                worker.start()
        while todo or busy:
            for worker in self.workers:
                if todo and worker.ready and worker.number not in busy:
                    busy[worker.number] = todo.popleft()
                    with contextlib.suppress(ConnectionError):  # its death is noticed below
                        self._send(worker, job, busy[worker.number], common)
            for worker in self._with_news():
                try:
                    found = worker.receive()
                except (EOFError, OSError):
                    self._died(worker, job, todo, busy, tries, starts)
                    continue
                if found is not None and not take(worker.number, busy.pop(worker.number), *found):
                    todo.clear()

    def _send(self, worker: Process, job: Job, share: int, common: tuple[Outbox, Placed, int]) -> None:
        if job.samples is not None and self._samples is not None:
            key, box, placed = self._samples
            worker.send_once("samples", key, (key, placed), box.region)
        if job.stage is not None:
            worker.send_once("stage", job.stage.key, (job.stage,))
        worker.send_call(job, share, common)

    def _with_news(self) -> list[Process]:
        """Wait until a worker has something to say: a result, that it has started, or that it has died."""
        for worker in self.workers:
            if worker.running and worker.number not in self._watched:
                self._selector.register(worker.channel, selectors.EVENT_READ, worker)
                self._watched.add(worker.number)
        return [key.data for key, _ in self._selector.select()]

    def _end(self, worker: Process) -> None:
        """End a worker at once, whatever it is doing."""
        if worker.number in self._watched:
            self._selector.unregister(worker.channel)
            self._watched.remove(worker.number)
        worker.end(at_once=True)
        worker.wait()

    def _died(
        self,
        worker: Process,
        job: Job,
        todo: collections.deque[int],
        busy: dict[int, int],
        tries: collections.Counter[int],
        starts: collections.Counter[int],
    ) -> None:
        """Start a worker that has died again; its share is run again, but not for ever."""
        share = busy.pop(worker.number, None)
        if share is None and not worker.ready:
            starts[worker.number] += 1
            if starts[worker.number] >= TRIES:
                raise RuntimeError("workers: processes could not be started; what they said is above")
        elif share is not None:
            tries[share] += 1
            if tries[share] >= TRIES:
                raise lost(job, share)
            todo.appendleft(share)
            died(worker.number)
        self._end(worker)
        worker.start()

    def close(self) -> None:
        """End all workers."""
        for worker in self.workers:
            worker.end()
        for worker in self.workers:
            worker.wait()
        self._selector.close()
        self._common.close()
        if self._samples is not None:
            self._samples[1].close()


def died(worker: int) -> None:
    """Warn that a worker has died."""
    check.warn(f"workers: worker {worker} has died; it is started again, and its share is run again")


def lost(job: Job, share: int) -> RuntimeError:
    """Return the error of a share whose worker died each time."""
    whose = job.clients[share]
    work = f"ran {whose}" if job.call.function else f"computed {job.call.program} for these clients: {whose}"
    return RuntimeError(
        f"workers: a worker died {TRIES} times, each time while it {work}. Was it killed for want of memory? "
        "Then give less with memory="
    )
