"""Workers that are actors of Ray, on this machine or on a cluster. Ray is imported here and nowhere else."""

from __future__ import annotations

import collections
import contextlib
import importlib
import logging
import os
import secrets
import shutil
import socket
import stat
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from partita.core import check
from partita.core.process import cores, keep_freed_memory
from partita.engine.workers.messages import Facts, Job, Reply, Samples
from partita.engine.workers.processes import TRIES, Take, died, lost
from partita.engine.workers.wire import Packed, pack, unpack
from partita.workers import RayCluster

TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
LOOPBACK = "127.0.0.1"
REACHED = 10.0  # seconds in which a cluster has to answer
RETURN = 120.0  # seconds in which one of its workers has to come back, when all have died


class Actor:
    """One worker, in a process of Ray's. What it lacks it fetches from the object store."""

    def __init__(self, threads: int, path: Sequence[str]) -> None:
        sys.path += [p for p in path if p not in sys.path]
        from partita.engine.workers.host import Host

        keep_freed_memory()
        self._host = Host(threads)
        self._common: tuple[int, Packed] | None = None

    def compute(
        self, keys: tuple[int, ...], refs: Sequence[Any], call: Any, head: bytes, *buffers: np.ndarray
    ) -> tuple[Reply, bytes, list[np.ndarray]]:
        """Compute a share. References in a list are not fetched before they are asked for."""
        import ray

        samples, stage, common = keys
        if call.function:
            samples = stage = 0
        if samples and self._host.lacks_samples(samples):
            x, y = unpack(Packed(*ray.get(refs[0])))
            self._host.take_samples(Samples(samples, x, y))
        if stage and self._host.lacks_stage(stage):
            self._host.take_stage(ray.get(refs[1]))
        if self._common is None or self._common[0] != common:
            self._common = common, Packed(*ray.get(refs[2]))
        reply, result = self._host.compute(call, self._common[1], Packed(head, buffers))
        return reply, result.head, list(result.buffers)

    def facts(self) -> Facts:
        """Return what it has to compute with."""
        return self._host.facts()

    def where(self) -> tuple[str, list[str]]:
        """Return the machine that it is on, and its GPUs."""
        import ray

        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_accelerator_ids().get("GPU", [])


class RayBackend:
    """The driver's side of Ray's actors. A free actor takes the next share."""

    def __init__(self, spec: RayCluster, device: str) -> None:
        self._ray = _imported()
        self._connection = contextlib.ExitStack()
        try:
            self._connection.enter_context(connected(spec, device))
            self._begin(spec, device)
        except BaseException:
            self._connection.close()
            raise
        self._samples: tuple[int, Any] | None = None
        self._stage: tuple[int, Any] | None = None
        self._common: tuple[Packed, Any] | None = None
        self._number = 0
        self._recovering: dict[Any, int] = {}  # those that have died, until they are there again

    def _begin(self, spec: RayCluster, device: str) -> None:
        ray, gpus = self._ray, gpus_of(spec, device)
        count = room_for(ray.cluster_resources(), spec, gpus)
        actor = ray.remote(num_cpus=spec.threads, num_gpus=gpus, max_restarts=-1, max_task_retries=0)(Actor)
        self.workers = [actor.remote(spec.threads, [str(p) for p in sys.path]) for _ in range(count)]
        self.restarts = [0] * count
        self.places = ray.get([worker.where.remote() for worker in self.workers])

    @property
    def most_together(self) -> int:
        """How many workers share a GPU, or where they have none a machine, at most."""
        shared = collections.Counter((node, tuple(gpus)) for node, gpus in self.places)
        return max(shared.values())

    def facts(self) -> list[Facts]:
        """Ask every worker what it has to compute with."""
        found: list[Facts] = self._ray.get([worker.facts.remote() for worker in self.workers])
        return found

    def compute(self, job: Job, take: Take) -> None:
        """Let the actors compute all shares; Ray replaces one that dies, and its share is run again."""
        ray = self._ray
        if job.samples is not None and (self._samples is None or self._samples[0] != job.samples.key):
            self._samples = job.samples.key, ray.put(_plain(pack((job.samples.x, job.samples.y))))
        if job.stage is not None and (self._stage is None or self._stage[0] != job.stage.key):
            self._stage = job.stage.key, ray.put(job.stage)
        if self._common is None or self._common[0] is not job.common:
            self._number += 1
            self._common = job.common, ray.put(_plain(job.common))
        none = (0, None)
        parts = (self._samples or none, self._stage or none, (self._number, self._common[1]))
        keys, refs = tuple(key for key, _ in parts), [ref for _, ref in parts]
        todo, busy = collections.deque(range(len(job.own))), dict[Any, tuple[int, int]]()
        away = set(self._recovering.values())
        idle = [number for number in range(len(self.workers)) if number not in away]
        tries = collections.Counter[int]()
        while todo or busy:
            while todo and idle:
                number, share = idle.pop(0), todo.popleft()
                own = job.own[share]()
                call = self.workers[number].compute.remote(keys, refs, job.call, own.head, *own.buffers)
                busy[call] = number, share
            if not busy and not self._recovering:
                raise RuntimeError("workers: all workers of the cluster are gone, and none comes back")
            done, _ = ray.wait([*busy, *self._recovering], num_returns=1, timeout=None if busy else RETURN)
            if not done:
                raise RuntimeError(
                    f"workers: all workers have died, and none has come back in {RETURN:.0f} s: has the "
                    "cluster no room for them any more?"
                )
            for call in done:
                if call in self._recovering:
                    number = self._recovering.pop(call)
                    with contextlib.suppress(ray.exceptions.RayActorError):  # it is gone for good
                        ray.get(call)
                        idle.append(number)
                    continue
                number, share = busy.pop(call)
                try:
                    reply, head, buffers = ray.get(call)
                except ray.exceptions.RayActorError:
                    self.restarts[number] += 1
                    tries[share] += 1
                    if tries[share] >= TRIES:
                        raise lost(job, share) from None
                    todo.appendleft(share)
                    died(number)
                    again = self.workers[number].where.options(max_task_retries=-1).remote()
                    self._recovering[again] = number
                    continue
                idle.append(number)
                result = unpack(Packed(head, buffers)) if reply.error is None else None
                if not take(number, share, reply, result):
                    todo.clear()

    def close(self) -> None:
        """End all actors, and a cluster that was started for them."""
        for worker in self.workers:
            with contextlib.suppress(Exception):
                self._ray.kill(worker)
        self._connection.close()


def _plain(packed: Packed) -> tuple[bytes, list[np.ndarray]]:
    return packed.head, list(packed.buffers)


def _imported() -> Any:
    try:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # without GPUs nothing is hidden
        import ray
    except ModuleNotFoundError:
        raise check.fail("workers", "ray", "Ray: pip install 'partita[ray]'", "it is not installed") from None
    return ray


def gpus_of(spec: RayCluster, device: str) -> float:
    """Return the GPUs of each worker: one, where GPUs compute and nothing else was asked for."""
    return spec.gpus or (1.0 if device.startswith("cuda") else 0.0)


def room_for(resources: dict[str, float], spec: RayCluster, gpus: float) -> int:
    """Return how many workers there are to be; refuse more than the cluster has room for."""
    most = int(resources.get("CPU", 0) // spec.threads)
    if gpus:
        most = min(most, int(resources.get("GPU", 0) / gpus))
    there = f"the cluster has {resources.get('CPU', 0):g} cores and {resources.get('GPU', 0):g} GPUs"
    needs = f"{spec.threads} cores{f' and {gpus:g} GPUs' if gpus else ''} for each worker"
    if most < 1 or (spec.count or 0) > most:
        allowed = f"up to {most} of them" if most else "a larger cluster, or fewer threads or gpus"
        raise check.fail("workers", spec, allowed, f"{there}, with {needs}")
    return spec.count or most


# ---- the cluster


@contextlib.contextmanager
def connected(spec: RayCluster, device: str) -> Iterator[None]:
    """Join the cluster that is asked for, or that this program has joined already, or start one here."""
    ray = _imported()
    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = cluster_address(spec)
    with contextlib.ExitStack() as stack:
        if address:
            _warn_about_token(default_token())
            try:
                _reach(address)
                with _without_warnings():
                    ray.init(address=address, **quiet)
            except (OSError, RuntimeError, ValueError) as error:
                allowed = "the address of a cluster that runs, or none to start one here"
                raise check.fail("workers: address", address, allowed, check.reason(error)) from error
        else:
            stack.enter_context(_token())
            count = spec.count or cores() // spec.threads or 1
            gpus = None if device.startswith("cuda") else 0
            with _on_loopback(), _without_warnings():
                ray.init(
                    address="local",
                    num_cpus=count * spec.threads,
                    num_gpus=gpus,
                    include_dashboard=spec.dashboard,
                    dashboard_host=LOOPBACK,
                    _node_ip_address=LOOPBACK,
                    **quiet,
                )
        try:
            yield
        finally:
            ray.shutdown()


def cluster_address(spec: RayCluster) -> str | None:
    """Return the address of the cluster to join; None where one starts here."""
    address = spec.address or os.environ.get("RAY_ADDRESS")
    return None if address in ("", "local") else address


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Let a cluster that starts here listen on loopback, as Ray does by itself on other systems than Linux.

    Ray takes 127.0.0.1 for a wish to be reached by others, unless it knows that there is one machine only.
    """
    constants: Any = importlib.import_module("ray._private.ray_constants")
    before = getattr(constants, "ENABLE_RAY_CLUSTER", None)
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def _reach(address: str) -> None:
    """Refuse an address at which nobody listens: Ray itself would try for ten minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), REACHED).close()


def default_token() -> Path:
    """Return the file that Ray reads its token from."""
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return Path(named) if named else Path.home() / ".ray" / "auth_token"


@contextlib.contextmanager
def _token() -> Iterator[None]:
    """Let a cluster that starts here ask for a token: the user's, or a new one that nobody else can read."""
    before = {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", *TOKEN_VARIABLES)}
    folder: Path | None = None
    try:
        if (before["RAY_AUTH_MODE"] or "token") == "token":  # else the user has decided
            os.environ["RAY_AUTH_MODE"] = "token"
            if not any(before[name] for name in TOKEN_VARIABLES):
                folder = Path(tempfile.mkdtemp(prefix="partita-ray-"))  # only its owner can enter
                path = folder / "auth_token"
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                    file.write(secrets.token_hex(32))
                os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)
            else:
                _warn_about_token(default_token())
        _reread_configuration()
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _reread_configuration() -> None:
    """Let Ray see the environment as it is now: it reads it when it is imported."""
    raylet: Any = importlib.import_module("ray._raylet")
    with contextlib.suppress(AttributeError):  # of other versions
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def _warn_about_token(path: Path) -> None:
    """Warn of a token file that others can read: who has the token runs code on the cluster."""
    if path.is_file() and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        check.warn(f"workers: others can read Ray's token in {path}; run chmod 600 {path}")
