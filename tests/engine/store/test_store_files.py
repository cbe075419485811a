"""Small files: whole or not there, and readable by anything that reads JSON."""

from __future__ import annotations

import csv
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from partita.engine.store.files import (
    append_jsonl,
    copy_folder,
    plain,
    read_jsonl,
    write_csv,
    write_json,
    write_jsonl,
    write_text,
)

ODD = {
    "nan": math.nan,
    "inf": [-math.inf, np.float32("inf"), torch.tensor(math.nan)],
    "tensor": torch.tensor(2.5, requires_grad=True),
    "vector": torch.tensor([1, 2]),
    "numpy": np.int64(3),
    "array": np.array([[True]]),
    "path": Path("a") / "b",
    "tuple": (1, None, "ü"),
}
PLAIN = {
    "nan": None,
    "inf": [None, None, None],
    "tensor": 2.5,
    "vector": [1, 2],
    "numpy": 3,
    "array": [[True]],
    "path": os.path.join("a", "b"),
    "tuple": [1, None, "ü"],
}


def test_plain() -> None:
    assert plain(ODD) == PLAIN


def test_json(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, ODD)
    assert json.loads(path.read_text()) == PLAIN
    write_json(path, [1])
    assert json.loads(path.read_text()) == [1]
    assert list(tmp_path.iterdir()) == [path]


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    write_csv(path, [(0.1 + 0.2, 'x,"y"'), (2, None), (None, "")], ["a", "b"])
    with open(path, newline="") as f:
        found = list(csv.DictReader(f))
    assert found == [{"a": repr(0.1 + 0.2), "b": 'x,"y"'}, {"a": "2", "b": ""}, {"a": "", "b": ""}]
    assert path.read_text().startswith("a,b\n")


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    for i in range(3):
        append_jsonl(path, {"i": i, "loss": math.nan})
    assert read_jsonl(path) == [{"i": i, "loss": None} for i in range(3)]
    write_jsonl(path, [{"i": 7}])
    append_jsonl(path, ODD)
    assert read_jsonl(path) == [{"i": 7}, PLAIN]
    write_jsonl(path, [])
    assert read_jsonl(path) == []


def test_a_torn_last_line_is_ignored_then_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    write_jsonl(path, [{"i": 0}, {"text": "ü"}])
    whole = path.read_bytes()
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        before = read_jsonl(path)
        assert len(before) == whole[:end].count(b"\n")
        assert path.read_bytes() == whole[:end]
        append_jsonl(path, {"new": 1})
        assert read_jsonl(path) == [*before, {"new": 1}]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl.*line 2 is not JSON"):
        read_jsonl(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.txt"
    write_text(path, "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_copy_folder_keeps_holes(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    (source / "deep").mkdir(parents=True)
    with (source / "deep" / "rows.bin").open("wb") as f:
        f.truncate(64 << 20)
        f.seek(32 << 20)
        f.write(b"row")
    (source / "text").write_text("hello")
    copy_folder(source, target)
    assert (target / "text").read_text() == "hello"
    copied = target / "deep" / "rows.bin"
    assert copied.read_bytes() == (source / "deep" / "rows.bin").read_bytes()
    assert copied.stat().st_blocks * 512 < 1 << 20
