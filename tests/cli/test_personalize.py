"""`partita personalize`, and a run that goes on from the shell."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

import partita as pt
from partita.recipes import find
from partita.recipes.experiment import build
from support import Command, each

SHORT = ["--set", "rounds=3", "--set", "baselines=False", "--executor", "vmap", "--quiet"]


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return files of two new clients, 30 samples of three digits each: 12 of them for testing."""
    x, y = load_digits(return_X_y=True)
    rows = np.flatnonzero(np.isin(y, [1, 4, 7]))[:60]
    arrays = {"x": x[rows].reshape(-1, 8, 8) / 16, "y": y[rows], "client": np.repeat(["p", "q"], 30)}
    folder = tmp_path_factory.mktemp("new")
    np.savez(folder / "marked.npz", **arrays, test=np.arange(60) % 5 < 2)
    np.savez(folder / "plain.npz", **arrays)
    np.savez(folder / "words.npz", **{**arrays, "y": np.char.add("digit ", y[rows].astype(str))})
    script = (
        f"import partita as pt\ndef data():\n    return pt.data.from_npz({str(folder / 'plain.npz')!r})\n"
    )
    (folder / "made.py").write_text(script)
    return folder


def test_new_clients_get_their_models(partita: Command, tmp_path: Path, new: Path) -> None:
    out = tmp_path / "run"
    assert (
        partita("run", "digits", *SHORT, "--set", "algorithm.lr=linear(0.2)", "--out", str(out)).returncode
        == 0
    )
    files = ["--data", str(new / "marked.npz"), "--out", str(tmp_path / "new"), "--rounds", "2"]
    done = partita("personalize", str(out), *files, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    settings = {"rounds": 3, "baselines": False, "algorithm.lr": pt.optim.linear(0.2), "seed": 0}
    run = build(find("digits"), settings).run(executor="vmap")
    wanted = run.personalize(pt.data.from_npz(new / "marked.npz", test="test"), rounds=2)
    assert told["test"] == wanted.summary()["test"]
    assert [row["n_test"] for row in told["rows"]] == [12, 12]
    assert sorted(p.name for p in (tmp_path / "new" / "models").iterdir()) == [
        "0.safetensors",
        "1.safetensors",
    ]
    for name in ("plain.npz", "made.py"):
        done = partita("personalize", str(out), "--data", str(new / name))
        assert done.returncode == 0, done.stderr
        assert "2 clients that came after training" in done.stdout
    assert "data: classes=" in partita("personalize", str(out), "--data", str(new / "words.npz")).refusal


def test_a_run_goes_on_from_the_shell(partita: Command, tmp_path: Path, new: Path) -> None:
    out, long = str(tmp_path / "run"), str(tmp_path / "long")
    more = ["--set", "rounds=5", "--set", "baselines=False", "--executor", "vmap", "--quiet"]
    assert partita("run", "digits", *SHORT, "--out", out).returncode == 0
    done = partita("run", "digits", *more, "--out", out, "--resume", "--json")
    straight = partita("run", "digits", *more, "--out", long, "--json")
    ours, theirs = json.loads(done.stdout), json.loads(straight.stdout)
    assert ours["rounds"] == 5
    assert ours["test"] == theirs["test"]
    assert partita("personalize", out, "--data", str(new / "plain.npz")).returncode == 0


@each("file, field", [("nothing.npz", "path="), ("data.csv", "--data="), ("nothing.py", "--data=")])
def test_files_that_are_none_are_refused(partita: Command, tmp_path: Path, file: str, field: str) -> None:
    assert field in partita("personalize", str(tmp_path), "--data", str(tmp_path / file)).refusal


def test_a_run_without_its_recipe_is_refused(partita: Command, tmp_path: Path, new: Path) -> None:
    build(find("digits"), {"rounds": 1, "baselines": False}).run(out=tmp_path / "run")
    done = partita("personalize", str(tmp_path / "run"), "--data", str(new / "plain.npz"))
    assert "recipe.json" in done.refusal
