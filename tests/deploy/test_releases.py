"""A private server that dies at any point: no round is released twice, whoever answers later."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from deployed import Recorded, clients_of, deployed, experiment
from torch import Tensor

import partita as pt
from partita.core.check import Refused
from partita.deploy import Arrival, Client, serve
from partita.deploy.wire import part_of, unpack
from partita.engine.store import durable
from support import each

SYSTEM = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir")


class Killed(BaseException):
    """Ends a server of these tests."""


class Reaper:
    """Ends a server at the n-th thing that it does to a disk or to a client; from then on it does nothing."""

    def __init__(self, last: float) -> None:
        self.last, self.count = last, 0

    def step(self) -> None:
        self.count += 1
        if self.count > self.last:
            raise Killed

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        for of, name in [(os, name) for name in SYSTEM] + [(durable, "save_file")]:
            patch.setattr(of, name, self._counted(getattr(of, name)))

    def _counted(self, fn: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.step()
            return fn(*args, **options)

        return call


class Watched(Recorded):
    """Notes every model that leaves the server, and lets it die; one client's training may be lost."""

    def __init__(self, clients: Mapping[str, Client], reaper: Reaper, deaf: str = "") -> None:
        super().__init__(clients)
        self.reaper, self.deaf = reaper, deaf
        self.seen: list[tuple[int, dict[str, Tensor]]] = []
        self._lost: set[str] = set()

    def send(self, name: str, request: str, *body: bytes) -> None:
        self.reaper.step()
        head, tensors = unpack(b"".join(body), 1 << 30)
        if model := part_of(tensors, "shared"):
            self.seen.append((head["version"], model))
        if head["kind"] == "train" and name == self.deaf:
            self._lost.add(request)
        super().send(name, request, *body)

    def receive(self, timeout: float) -> list[Arrival]:
        return [a._replace(body=b"") if a.request in self._lost else a for a in super().receive(timeout)]


def life(made: Any, folder: Path, last: float, deaf: str = "", resume: bool = True) -> Watched:
    """Let a server live until its n-th step; what clients do is no step."""
    clients, reaper = clients_of(made, folder), Reaper(last)
    handle = Client.handle

    def alive(self: Client, body: bytes) -> bytes:
        before, reaper.last = (reaper.count, reaper.last), float("inf")
        try:
            return handle(self, body)
        finally:
            reaper.count, reaper.last = before

    transport = Watched(clients, reaper, deaf)
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(Client, "handle", alive)
        reaper.watch(patch)
        serve(made, list(clients), transport, folder / "out", resume=resume, report=False, progress=False)
    return transport


PRIVATE = [pt.privacy.gaussian(noise=5.0, clip=0.1)]
MADE = {
    "fedalt": {},
    "asynchronous": {"schedule": pt.schedule.asynchronous(concurrency=2, buffer=1), "rounds": 4},
    "often": {"checkpoint_every": 1},
}


def assert_released_once(*lives: Watched) -> None:
    """Compare all models of a version that clients were sent, in whatever life of the server."""
    first: dict[int, dict[str, Tensor]] = {}
    for version, model in [sent for life in lives for sent in life.seen]:
        known = first.setdefault(version, model)
        assert all(torch.equal(known[k], v) for k, v in model.items()), version


@each("name, every", [("fedalt", 5), *((name, 2) for name in MADE)], slow=lambda _, every: every == 2)
def test_a_server_that_dies_releases_nothing_twice(name: str, every: int, tmp_path: Path) -> None:
    """At writes and messages of each kind; in its next life a client is not there any more."""
    made = experiment(uploads=PRIVATE, **MADE[name])
    whole = life(made, tmp_path / "whole", float("inf"), resume=False)
    steps = whole.reaper.count
    assert len({version for version, _ in whole.seen}) == made.rounds + 1
    for last in range(steps // 4, steps, every):
        folder = tmp_path / str(last)
        before = life(made, folder, last, resume=False)
        after = life(made, folder, float("inf"), deaf="ann")
        assert_released_once(before, after)
        assert len(pt.load(folder / "out").metrics) == made.rounds  # no row is missing, none is there twice


def test_a_release_whose_record_is_damaged_is_not_made_again(tmp_path: Path) -> None:
    """To go on from a checkpoint before it would be to release it twice."""
    made = experiment(uploads=PRIVATE)

    class Kill(pt.callbacks.Callback):
        def round(self, event: Any) -> None:
            if event.round == 2:
                raise Killed

    with pytest.raises(Killed):
        deployed(made, tmp_path, callbacks=[Kill()])
    assert durable.rounds(tmp_path / "out" / "checkpoint") == [0]
    (state,) = (tmp_path / "out" / "released").glob("*/state.json")
    state.write_text(state.read_text()[:-9])
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(Refused):
        deployed(made, tmp_path, resume=True)


def test_what_is_not_private_is_written_as_it_was(tmp_path: Path) -> None:
    deployed(experiment(), tmp_path)
    assert not (tmp_path / "out" / "released").exists()


@each("quorum, allowed", [(1, True), (1.0, False), (0.5, False), (0.0, False), (2, False)])
def test_a_quorum_that_depends_on_one_client_is_refused(quorum: Any, allowed: bool, tmp_path: Path) -> None:
    made = experiment(uploads=PRIVATE, rounds=1)
    if allowed:
        deployed(made, tmp_path, out=None, quorum=quorum)
        return
    with pytest.raises(Refused) as refused:
        deployed(made, tmp_path, out=None, quorum=quorum)
    assert refused.value.field == "quorum"
