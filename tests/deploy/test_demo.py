"""`partita deploy demo`: a server and five clients in processes of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from partita.deploy import example
from support import Command


@pytest.mark.slow
def test_the_demo_leaves_a_whole_deployment(tmp_path: Path, partita: Command) -> None:
    out = tmp_path / "demo"
    done = partita("deploy", "demo", "--out", str(out), "--quiet")
    assert done.returncode == 0, done.stderr
    assert "test accuracy of the personal models 0.9" in done.stdout
    assert json.loads((out / "run" / "summary.json").read_text())["test"]["personal"] > 0.9
    assert (out / "run" / "report.html").stat().st_size > 10_000
    for name in example.OFFICES:
        assert "the run is over" in (out / "keys" / name / "log.txt").read_text()
        site = str(out / "keys" / name / "site.toml")
        to = str(tmp_path / f"{name}.safetensors")
        made = partita("deploy", "export", str(out / "experiment.py"), "--site", site, "--to", to)
        assert made.returncode == 0, made.stderr
        assert "own test samples" in made.stdout
    again = partita("deploy", "demo", "--out", str(out))
    assert again.returncode == 2
    assert "empty folder" in again.stderr
