"""A checkpoint is whole or not used, and writing one never harms another."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from partita.engine.store import durable
from partita.engine.store.durable import (
    MANIFEST,
    STATE,
    TENSORS,
    drop,
    read,
    write,
)
from support import each

X = {"x": torch.arange(100.0)}


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def three(folder: Path) -> None:
    for round in (4, 8, 12):
        write(folder, round, {"x": torch.full((100,), float(round))}, {"round": round})


def test_all_kinds_of_tensors_come_back(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    tensors = {
        "0-d": torch.tensor(3),
        "bool": torch.tensor([True, False]),
        "uint8": torch.arange(3, dtype=torch.uint8),
        "bfloat16": torch.tensor([1.5], dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "empty too": torch.zeros(0, 4),
        "whole": base,
        "slice": base[2:5],
        "transposed": base.view(3, 4).T,
        "expanded": base[:1].expand(5),
        "grad": torch.ones(2, requires_grad=True),
        "a/odd name.ü": base,
        "channels last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
    }
    write(tmp_path, 0, tensors, {})
    found = read(tmp_path)
    assert found is not None
    assert set(found.tensors) == set(tensors)
    for name, x in tensors.items():
        y = found.tensors[name]
        assert y.dtype == x.dtype
        assert y.shape == x.shape
        assert torch.equal(y, x), name


def test_state_comes_back_and_files_follow_the_umask(tmp_path: Path) -> None:
    state = {"loss": [0.1, math.inf, 1e-300], "time": 2**70, "text": "ü", "none": None, "deep": {"a": [[]]}}
    state["far"] = {"near": [-math.inf]}
    path = write(tmp_path, 7, {}, {**state, "nan": math.nan})
    assert not {"Infinity", "NaN"} & set(re.findall(r"\w+", (path / STATE).read_text()))  # no JSON
    found = read(tmp_path)
    assert found is not None
    assert math.isnan(found.state.pop("nan"))
    assert (found.round, found.state, found.path) == (7, state, path)
    assert len({(path / name).stat().st_mode for name in (TENSORS, STATE, MANIFEST)}) == 1


def test_no_checkpoint(tmp_path: Path) -> None:
    assert read(tmp_path / "missing") is None
    assert read(tmp_path) is None
    drop(tmp_path / "missing", after=0)


def test_the_newest_are_kept_in_the_order_of_rounds(tmp_path: Path) -> None:
    for round in (99_999_998, 99_999_999, 100_000_000):
        write(tmp_path, round, X, {})
    assert names(tmp_path) == ["100000000", "99999999"]
    found = read(tmp_path)
    assert found is not None
    assert found.round == 100_000_000
    write(tmp_path, 100_000_001, X, {}, keep=1)
    assert names(tmp_path) == ["100000001"]


def test_a_run_that_went_back_replaces_what_came_later(tmp_path: Path) -> None:
    three(tmp_path)
    write(tmp_path, 10, X, {})
    assert names(tmp_path) == ["00000008", "00000010"]
    write(tmp_path, 10, {}, {"again": True})
    found = read(tmp_path)
    assert found is not None
    assert (found.round, found.state) == (10, {"again": True})
    drop(tmp_path, after=8)
    assert names(tmp_path) == ["00000008"]


def test_some_tensors_by_name(tmp_path: Path) -> None:
    write(tmp_path, 1, {"a": torch.ones(1), "b": torch.ones(2)}, {})
    found = read(tmp_path, names=["b"])
    assert found is not None
    assert list(found.tensors) == ["b"]
    with pytest.raises(ValueError, match=r"has no tensor 'c'"):
        read(tmp_path, names=["b", "c"])


def test_what_was_read_outlives_its_file(tmp_path: Path) -> None:
    write(tmp_path, 1, X, {})
    found = read(tmp_path)
    assert found is not None
    with open(found.path / TENSORS, "r+b") as f:
        f.truncate(10)
    assert torch.equal(found.tensors["x"], X["x"])


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def change_round(path: Path) -> None:
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "round": 11}))


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    *[(name, lambda p, at=at: flip(p, at), "") for name in (TENSORS, STATE, MANIFEST) for at in (0, 0.5, 1)],
    *[(name, lambda p: p.unlink(), "No such file") for name in (TENSORS, STATE, MANIFEST)],
    *[(name, lambda p: p.write_bytes(b""), "") for name in (TENSORS, STATE, MANIFEST)],
    *[(name, lambda p: p.write_bytes(p.read_bytes()[:-1]), "bytes, expected") for name in (TENSORS, STATE)],
    (MANIFEST, lambda p: p.write_text('{"version": 3}'), "not a manifest"),
    (MANIFEST, lambda p: p.write_text("[1, 2]"), "not a manifest"),
    (MANIFEST, lambda p: p.write_text("null"), "not a manifest"),
    (MANIFEST, change_round, "altered"),
]


@each(("name", "harm", "message"), DAMAGE)
def test_a_damaged_checkpoint_is_skipped(
    tmp_path: Path, name: str, harm: Callable[[Path], object], message: str
) -> None:
    three(tmp_path)
    harm(tmp_path / "00000012" / name)
    with pytest.warns(
        UserWarning, match=rf"checkpoint skipped: .*00000012.{name}.*{message}|{message}.*{name}"
    ):
        found = read(tmp_path)
    assert found is not None
    assert found.round == 8
    assert found.tensors["x"].unique().tolist() == [8.0]


def test_a_checkpoint_under_another_name_is_skipped(tmp_path: Path) -> None:
    three(tmp_path)
    (tmp_path / "00000012").rename(tmp_path / "00000013")
    with pytest.warns(UserWarning, match="is of round 12"):
        found = read(tmp_path)
    assert found is not None
    assert found.round == 8


def test_no_valid_one_is_an_error(tmp_path: Path) -> None:
    three(tmp_path)
    for path in tmp_path.iterdir():
        (path / STATE).unlink()
    with (
        pytest.warns(UserWarning, match="skipped"),
        pytest.raises(ValueError, match=r"no valid checkpoint.*00000012.*00000008"),
    ):
        read(tmp_path)


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "FORMAT", 9)
    write(tmp_path, 1, X, {})
    monkeypatch.undo()
    with pytest.raises(ValueError, match="format 9, this version of Partita reads 3"):
        read(tmp_path)


def test_leftovers_are_ignored_and_removed(tmp_path: Path) -> None:
    three(tmp_path)
    for name in (".00000016.tmp", ".00000004.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / STATE).write_text("{}")
    found = read(tmp_path)
    assert found is not None
    assert found.round == 12
    write(tmp_path, 16, X, {})
    assert names(tmp_path) == ["00000012", "00000016"]


@each("call", range(6))
def test_a_full_disk_leaves_the_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    three(tmp_path)
    fsync, calls = os.fsync, iter(range(100))

    def full(fd: int) -> None:
        if next(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=f"round 16 to {tmp_path}: .*No space left.*intact") as e:
            write(tmp_path, 16, X, {})
    assert e.value.errno == errno.ENOSPC
    found = read(tmp_path)
    assert found is not None
    assert {"00000008", "00000012"} <= set(names(tmp_path))
    assert not any(name.startswith(".") for name in names(tmp_path))


def test_a_real_limit_of_the_system(tmp_path: Path) -> None:
    """Not a simulated one: safetensors reports errors of the disk in its own way."""
    write(tmp_path, 1, X, {})
    script = (
        "import resource, sys, torch\n"
        "from partita.engine.store.durable import write\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        "try:\n"
        "    write(sys.argv[1], 2, {'x': torch.zeros(100_000)}, {})\n"
        "except OSError as e:\n"
        "    print(e)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True
    )
    assert "cannot write the checkpoint of round 2" in done.stdout
    assert "File too large" in done.stdout
    assert names(tmp_path) == ["00000001"]


def test_what_is_no_json_is_refused_without_a_trace(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        write(tmp_path, 1, X, {"x": object()})
    assert names(tmp_path) == []
