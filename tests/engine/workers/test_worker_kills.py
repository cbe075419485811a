"""A killed worker costs the time of its share, a killed driver leaves nothing running; bits stay the same."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import partita as pt
from engine.workers import dying
from engine.workers.dying import Dying, federate
from partita.engine.workers import crew as crews
from partita.engine.workers.wire import Outbox, Packed, Placed
from support import tensors

PATIENCE = 60.0  # seconds that a process has to end in, on a machine that is busy


def same_bits(a: pt.Run, b: pt.Run) -> bool:
    ours, theirs = tensors(a), tensors(b)
    return list(ours) == list(theirs) and all(ours[k].equal(theirs[k]) for k in ours)


def restarts(run: pt.Run) -> int:
    return sum(worker["restarts"] for worker in run.config["executor"]["workers"]["each"])


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def wait_until_gone(pids: list[int]) -> list[int]:
    """Return those that are still there after a long time."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and not all(map(gone, pids)):
        time.sleep(0.05)
    return [pid for pid in pids if not gone(pid)]


def check_killed_worker(tmp_path: Path, workers: Any) -> None:
    folders = [tmp_path / "none", tmp_path / "one"]
    for folder in folders:
        folder.mkdir()
    straight = federate(workers=workers, executor=Dying(folders[0], times=0))
    killed = federate(workers=workers, executor=Dying(folders[1], times=1))
    assert len(list(folders[1].iterdir())) == 1
    assert restarts(killed) == 1
    assert same_bits(straight, killed)


def check_share_that_kills(tmp_path: Path, workers: Any) -> None:
    with pytest.raises(RuntimeError, match=r"died 4 times.*training.*'1'"):
        federate(workers=workers, executor=Dying(tmp_path, times=100))
    assert len(list(tmp_path.iterdir())) == 4


def check_killed_driver(tmp_path: Path, workers: str, resumed: Any) -> None:
    straight = federate(workers=2, out=tmp_path / "straight")
    out = tmp_path / "run"
    command = [sys.executable, dying.__file__, str(out), workers, "3"]
    path = os.pathsep.join(str(p) for p in (Path(dying.__file__).parents[2], *sys.path) if p)
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert ended.returncode == -9, ended.stderr
    pids = json.loads(out.with_suffix(".pids").read_text())
    assert len(pids) == 2
    assert wait_until_gone(pids) == []
    again = federate(workers=resumed, out=out, resume=True)
    assert same_bits(straight, again)


def test_a_killed_worker_changes_nothing(tmp_path: Path) -> None:
    check_killed_worker(tmp_path, 2)


@pytest.mark.slow
def test_a_share_that_kills_its_workers_is_named(tmp_path: Path) -> None:
    check_share_that_kills(tmp_path, 2)


@pytest.mark.slow
def test_a_killed_driver_leaves_nothing_and_is_resumed(tmp_path: Path) -> None:
    check_killed_driver(tmp_path, "2", 3)


def test_nobody_is_left_after_a_run() -> None:
    run = federate(workers=2, rounds=2)
    assert wait_until_gone([w["pid"] for w in run.config["executor"]["workers"]["each"]]) == []


@pytest.mark.slow
def test_workers_killed_at_any_moment() -> None:
    """Somebody kills workers again and again, whether they are idle or at work."""
    straight = federate(workers=2, rounds=40)
    over = threading.Event()
    with crews.staying():

        def kill() -> None:
            turn = 0
            while not over.wait(0.7):
                for crew in list(crews._open.values()):
                    worker: Any = crew.backend.workers[turn % 2]
                    turn += 1
                    if worker.ready:
                        os.kill(worker.pid, 9)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            killed = federate(workers=2, rounds=40)
        finally:
            over.set()
            killer.join()
    assert restarts(killed) > 0
    assert same_bits(straight, killed)


@pytest.mark.slow
def test_killed_workers_of_ray(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with crews.staying():
        check_killed_worker(tmp_path / "a", "ray:2")
        check_share_that_kills(tmp_path / "b", "ray:2")


@pytest.mark.slow
def test_a_killed_driver_of_ray(tmp_path: Path) -> None:
    check_killed_driver(tmp_path, "ray:2", 1)


def test_a_full_disk_is_an_error_and_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for what travels is reserved before anything is sent."""
    place = Outbox.place

    def full(self: Outbox, packed: Packed) -> Placed:
        if any(buffer.nbytes for buffer in packed.buffers):
            placed.append(self)
            if len(placed) > 2:  # both workers have their stage
                raise OSError(errno.ENOSPC, "No space left on device")
        return place(self, packed)

    placed: list[Outbox] = []
    monkeypatch.setattr(Outbox, "place", full)
    with pytest.raises(OSError, match="No space left"):
        federate(workers=2)
