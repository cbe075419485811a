"""The workers of a run: when they start and end, what they have agreed on, and what each of them did."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from partita.core import check
from partita.engine.execute import budget
from partita.engine.record import read_json
from partita.engine.workers.messages import (
    Call,
    Facts,
    Job,
    Place,
    Reply,
    Samples,
    function_call,
    raised,
    result_of,
)
from partita.engine.workers.processes import ProcessBackend, Take
from partita.engine.workers.wire import Packed
from partita.workers import Processes, RayCluster, Workers

if TYPE_CHECKING:
    from partita.engine.setup import Setup

KEYS = itertools.count(1)


class Backend(Protocol):
    """Where shares are computed: one of the ways in which there are other processes."""

    @property
    def workers(self) -> list[Any]: ...

    @property
    def restarts(self) -> list[int]:
        """How often each worker had to be started again."""
        ...

    def facts(self) -> list[Facts]:
        """Ask every worker what it has to compute with."""
        ...

    def compute(self, job: Job, take: Take) -> None:
        """Let workers compute all shares of a job, each share again if its worker dies."""
        ...

    def close(self) -> None:
        """End all workers."""
        ...


class Terms(NamedTuple):
    """What a run's results depend on, and so stays as it is when the run is resumed with other workers.

    shares   into how many shares a cohort is cut
    threads  with which each share is computed
    memory   bytes for the stacked clients of each share
    """

    shares: int
    threads: int
    memory: int


class Did(NamedTuple):
    """What a worker did."""

    place: Place | None = None
    shares: int = 0
    seconds: float = 0.0


class Crew:
    """Workers that are there: for a run with its baselines, or for all runs of a study."""

    def __init__(self, spec: Workers, threads: int, device: str) -> None:
        self.spec, self.threads = spec, threads
        self.backend: Backend
        if isinstance(spec, RayCluster):
            from partita.engine.workers.ray_actors import RayBackend

            self.backend = RayBackend(spec, device)
            self.most_together = self.backend.most_together
        else:
            self.backend = ProcessBackend(spec.count, threads, device)
            gpus = torch.cuda.device_count() if device == "cuda" else 1
            self.most_together = -(-spec.count // gpus)
        self.count = len(self.backend.workers)
        self.did = [Did()] * self.count
        self.closed = False
        self.critical = 0.0  # seconds of the worker that was longest at work, in all jobs
        self._samples: Samples | None = None
        self._loads = time.perf_counter(), [0.0] * self.count

    def samples(self, setup: Setup) -> Samples:
        """Return the samples of a run as they are sent: once for all runs on the same ones."""
        poisoned = setup.settings.attack is not None and setup.settings.attack.poison is not None
        x, y = (setup.data.x, setup.data.y) if poisoned else (setup.clean_data.x, setup.clean_data.y)
        if self._samples is None or self._samples.x is not x or self._samples.y is not y:
            self._samples = Samples(next(KEYS), x, y)
        return self._samples

    def compute(self, job: Job, take: Take) -> None:
        """Let workers compute a job; raise the error of the first share that has one."""
        errors: dict[int, Exception] = {}
        seconds = [0.0] * self.count

        def taken(worker: int, share: int, reply: Reply, result: Any) -> bool:
            before = self.did[worker]
            self.did[worker] = Did(reply.place, before.shares + 1, before.seconds + reply.seconds)
            seconds[worker] += reply.seconds
            for text in reply.warned:
                check.warn(text)
            if reply.error is not None:
                where = f"worker {worker} on {reply.place.machine}, for {job.clients[share]}"
                errors[share] = raised(reply.error, where)
                return False
            return take(worker, share, reply, result)

        self.backend.compute(job, taken)
        self.critical += max(seconds)
        if errors:
            raise errors[min(errors)]

    def call(
        self, functions: Sequence[Callable[[], Any]], names: Sequence[str], done: Callable[[int, Any], None]
    ) -> None:
        """Let workers call functions side by side; `done` gets the number of each, and what it returns."""

        def take(worker: int, number: int, reply: Reply, result: Any) -> bool:  # noqa: ARG001
            done(number, result_of(result))
            return True

        own = [functools.partial(function_call, function) for function in functions]
        call = Call("a function", function=True, together=self.most_together)
        self.compute(Job(None, None, call, Packed(b"", []), own, names), take)

    def loads(self) -> tuple[float, ...]:
        """Return the share of time that each worker was at work since it was asked last."""
        now, seconds = time.perf_counter(), [did.seconds for did in self.did]
        (then, before), self._loads = self._loads, (now, seconds)
        passed = max(now - then, 1e-9)
        return tuple(min(1.0, (s - b) / passed) for s, b in zip(seconds, before))

    def close(self) -> None:
        """End all workers; what is computed from now on is computed in this process."""
        if not self.closed:
            self.closed = True
            self.backend.close()
            self._samples = None


class Team:
    """The workers of one run, and its terms; without a crew this process computes the shares itself."""

    def __init__(self, crew: Crew | None, terms: Terms) -> None:
        self.crew, self.terms = crew, terms
        self._before = [] if crew is None else [*zip(crew.did, crew.backend.restarts)]  # of other runs

    @property
    def present(self) -> Crew | None:
        """The crew, while it is there."""
        return None if self.crew is None or self.crew.closed else self.crew

    def loads(self) -> tuple[float, ...]:
        """Return the share of time that each worker was at work since it was asked last."""
        return () if self.present is None else self.present.loads()

    def description(self) -> dict[str, Any]:
        """Return what config.json holds of the workers: the terms, and what each did so far."""
        terms: dict[str, Any] = self.terms._asdict()
        if self.crew is None:
            return {"kind": None, "count": 0, **terms, "each": []}
        each, now = [], zip(self.crew.did, self.crew.backend.restarts)
        for number, ((before, restarted), (did, restarts)) in enumerate(zip(self._before, now)):
            pid = getattr(self.crew.backend.workers[number], "pid", None)  # of one that has only begun
            place = (
                {"machine": None, "pid": pid, "device": None} if did.place is None else did.place._asdict()
            )
            seconds = round(did.seconds - before.seconds, 3)
            work = {
                "shares": did.shares - before.shares,
                "seconds": seconds,
                "restarts": restarts - restarted,
            }
            each.append({"worker": number, **place, **work})
        return {"kind": self.crew.spec.kind, "count": self.crew.count, **terms, "each": each}


# ---- when workers start and end

_open: dict[tuple[Workers, int, str], Crew] = {}
"""Crews that stay for the next run: see `staying`."""


@contextlib.contextmanager
def staying() -> Iterator[None]:
    """Let workers stay from one run to the next, and end them afterwards: for studies and tuning."""
    if _STAYING:
        yield
        return
    _STAYING.append(True)
    try:
        yield
    finally:
        _STAYING.clear()
        crews = list(_open.values())
        _open.clear()
        for crew in crews:
            crew.close()


_STAYING: list[bool] = []


@contextlib.contextmanager
def employed(setup: Setup) -> Iterator[Setup]:
    """Return the run with its workers, who are there until the end; as it is where nobody asked for any."""
    settings = setup.settings
    known = recorded_terms(settings.folder) if settings.resume else None
    spec: Workers | None = settings.workers  # type: ignore[assignment]
    if spec is None and settings.shares is None and known is None:
        yield setup
        return
    threads = known.threads if known else _threads(spec)
    crew = None if spec is None else _crew(spec, threads, settings.device)
    shares = settings.shares or (known.shares if known else crew.count if crew else 1)
    whole = budget(settings.memory_bytes, setup.data.device)
    memory = known.memory if known else whole // (crew.most_together if crew else 1)
    team = Team(crew, Terms(shares, threads, memory))
    try:
        yield replace(setup, settings=replace(settings, shares=shares), crew=team)
    finally:
        if crew is not None and not _STAYING:
            crew.close()


def crew_of(spec: Workers, device: str) -> Crew:
    """Return workers for whole runs, who stay until the end of the study that they are of."""
    return _crew(spec, _threads(spec), device)


def _crew(spec: Workers, threads: int, device: str) -> Crew:
    """Start workers, or take those that have stayed; refuse where the system cannot."""
    if os.name != "posix" and isinstance(spec, Processes):
        raise check.fail("workers", spec.count, "partita.workers.ray(...)", "processes share memory by POSIX")
    if isinstance(spec, RayCluster) and ":" in device:
        raise check.fail("device", device, "'cuda' or 'cpu'", "Ray gives each worker GPUs of its own")
    key = spec, threads, device
    if key in _open and not _open[key].closed:
        return _open[key]
    crew = Crew(replace(spec, threads=threads), threads, device)
    if _STAYING:
        _open[key] = crew
    return crew


def _threads(spec: Workers | None) -> int:
    """Return the threads of each share: as asked, or those of this process divided among its workers."""
    if spec is None:
        return torch.get_num_threads()
    return spec.threads or max(1, torch.get_num_threads() // (spec.count or 1))


def recorded_terms(folder: Path | None) -> Terms | None:
    """Return the terms of the run in a folder; None where it has none."""
    if folder is None or not (folder / "config.json").is_file():
        return None
    executor = read_json(folder / "config.json").get("executor")
    found = executor.get("workers") if isinstance(executor, Mapping) else None
    if not isinstance(found, Mapping):
        return None
    values = [v for v in map(found.get, Terms._fields) if isinstance(v, int) and v > 0]
    return Terms(*values) if len(values) == len(Terms._fields) else None
