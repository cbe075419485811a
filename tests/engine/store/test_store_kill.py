"""Whenever a run is killed, it goes on as if it had not been."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import killed
from engine.store import store_fake_run as fake
from partita.engine.store.files import read_jsonl

KILLED = -signal.SIGKILL


class Forks:
    """Starts fake runs in processes of their own."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, fake.__file__],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, folder: Path, **options: int) -> int:
        """The exit code."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"folder": str(folder), **options}) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    assert forks.process.stdin is not None
    forks.process.stdin.close()
    forks.process.wait()


def damage(folder: Path, round: int) -> bool:
    """Spoil the checkpoint of this round if there is an older one to fall back to."""
    found = sorted(p for p in (folder / "checkpoint").glob("*") if p.name.isdecimal())
    if not found or int(found[0].name) >= round:
        return False
    (folder / "checkpoint" / f"{round:08d}" / "tensors.safetensors").write_bytes(b"damaged")
    return True


def check_newest_and_previous(folder: Path) -> int:
    """Both checkpoints give the states of a straight run; returns the round of the newest."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the newest may have been damaged on purpose
        _, newest = fake.resume(folder)
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    if damage(copy, newest):
        with pytest.warns(UserWarning, match="checkpoint skipped"):
            _, previous = fake.resume(copy)
        assert previous < newest
    shutil.rmtree(copy)
    return newest


def test_killed_at_every_call_that_changes_the_disk(forks: Forks, tmp_path: Path) -> None:
    grown = tmp_path / "grown"
    assert forks.run(grown, rounds=6, every=2) == 0
    whole = tmp_path / "whole"
    shutil.copytree(grown, whole)
    assert forks.run(whole, rounds=12, every=2) == 0
    writes = read_jsonl(whole / "counts.jsonl")[-1]["writes"]
    assert writes > 30
    rounds = set()
    for n in range(writes):
        folder = tmp_path / "run"
        shutil.copytree(grown, folder)
        assert forks.run(folder, rounds=12, every=2, at_write=n) == KILLED
        rounds.add(check_newest_and_previous(folder))
        shutil.rmtree(folder)
    assert rounds == {6, 8, 10, 12}


def test_killed_at_every_call_from_the_start(forks: Forks, tmp_path: Path) -> None:
    """Before the first checkpoint, and before there are two of them."""
    whole = tmp_path / "whole"
    assert forks.run(whole, rounds=4, every=2) == 0
    for n in range(read_jsonl(whole / "counts.jsonl")[-1]["writes"]):
        folder = tmp_path / f"run{n}"
        assert forks.run(folder, rounds=4, every=2, at_write=n) == KILLED
        check_newest_and_previous(folder)


def test_killed_at_random_moments_with_damage_in_between(forks: Forks, tmp_path: Path) -> None:
    rng = killed.seeded()
    whole = tmp_path / "whole"
    assert forks.run(whole, rounds=12, every=2, at_call=killed.NEVER) == 0
    calls = read_jsonl(whole / "counts.jsonl")[-1]["calls"]
    folder = tmp_path / "run"
    reached = 0
    for attempt in range(20):
        n, every = rng.randrange(calls), rng.choice([1, 2, 3])
        assert forks.run(folder, rounds=fake.FOREVER, every=every, at_call=n) == KILLED
        reached = check_newest_and_previous(folder)
        if attempt % 3 == 2:
            damage(folder, reached)
    assert reached > 0
