"""The file: there whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from report_rows import example

from partita import report

OLD = "<!doctype html>\n<footer>Made by Partita. This page is complete: it loads nothing.</footer>"


def test_write_replaces_the_file_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text(OLD)
    assert report.write({"x": [example()]}, str(target)) == target
    assert target.read_text().startswith("<!doctype html>")
    assert os.listdir(tmp_path) == ["report.html"]
    assert stat.S_IMODE(target.stat().st_mode) & 0o400


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    target = tmp_path / "report.html"
    target.write_text(OLD)
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        report.write({"x": [example()]}, target)
    assert (os.listdir(tmp_path), target.read_text()) == (["report.html"], OLD)


def test_bad_places_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {"x": [example()]}
    with pytest.raises(ValueError, match="expected a file in a folder that exists"):
        report.write(runs, tmp_path / "none" / "report.html")
    with pytest.raises(ValueError, match="this is a folder"):
        report.write(runs, tmp_path)

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", refuse)  # tests may run as root, whom no folder refuses
    with pytest.raises(OSError, match=r"report.html: the folder cannot be written \(Permission denied\)"):
        report.write(runs, tmp_path / "report.html")


def test_bad_runs_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one label"):
        report.write({}, tmp_path / "report.html")
    assert os.listdir(tmp_path) == []
