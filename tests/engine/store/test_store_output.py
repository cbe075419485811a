"""Files of others are never written over: by runs, studies, copies and pages, from Python and the shell."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import partita as pt
from partita.engine.store.output import MARK
from partita.recipes import Experiment
from partita.recipes.study import run_study
from partita.recipes.versus import versus
from support import Command, each


def quiet(text: str) -> None:
    del text


def experiment() -> Experiment:
    g = np.random.default_rng(0)
    x, y = g.normal(size=(24, 4)).astype("float32"), g.integers(0, 2, 24)
    data = pt.data.from_arrays(x, y, np.arange(24) % 3)
    rule = pt.fedalt("output", lr=0.1)
    return Experiment(pt.models.mlp(4, 3, 2), data, rule, rounds=1, steps=1, batch=4, baselines=False)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run in it, and a study."""
    folder = tmp_path_factory.mktemp("places")
    experiment().run(out=folder / "run")
    run_study(lambda _: versus(experiment()), [0], out=folder / "study", announce=quiet, executor="loop")
    return folder


@pytest.fixture(scope="module")
def run(home: Path) -> pt.Run:
    return experiment().run(out=home / "run", resume=True)


def everything(folder: Path) -> dict[Path, bytes | None]:
    return {p: p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def filled(name: str) -> Callable[[Path], None]:
    def fill(place: Path) -> None:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("mine")

    return fill


def link_to(fill: Callable[[Path], None]) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        fill(place.with_name("elsewhere"))
        place.symlink_to(place.with_name("elsewhere"))

    return make


THEIRS: dict[str, Callable[[Path], None]] = {
    "a report": filled("report.html"),
    "a table": filled("clients.csv"),
    "notes": filled("notes.txt"),
    "a hidden file": filled(".DS_Store"),
    "a repository": filled(".git/HEAD"),
    "a folder": filled("more/notes.txt"),
    "a link to a folder": link_to(filled("notes.txt")),
    "what looks like a leaving": filled(".config.json.tmp.txt"),
}
WRITERS: dict[str, Callable[[Path, pt.Run], Any]] = {
    "run": lambda out, run: experiment().run(out=out),  # noqa: ARG005
    "resume": lambda out, run: experiment().run(out=out, resume=True),  # noqa: ARG005
    "study": lambda out, run: run_study(lambda _: versus(experiment()), [0], out=out, announce=quiet),  # noqa: ARG005
    "resumed study": lambda out, run: run_study(  # noqa: ARG005
        lambda _: versus(experiment()), [0], out=out, resume=True, announce=quiet
    ),
    "save": lambda out, run: run.save(out),
}


@each("who", WRITERS)
@each("what", THEIRS)
def test_a_folder_of_somebody_else_stays_as_it_is(what: str, who: str, run: pt.Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    THEIRS[what](out)
    before = everything(tmp_path)
    with pytest.raises(
        ValueError, match=r"^(out|folder)=.*: expected a new or an empty folder: this one holds "
    ):
        WRITERS[who](out, run)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("command", ["run", "compare", "split", "demo"])
def test_from_the_command_line(command: str, home: Path, tmp_path: Path, partita: Command) -> None:
    filled("notes.txt")(tmp_path / "mine")
    recipe = [] if command == "demo" else ["digits", "--set", "clients=4", "--set", "rounds=1"]
    for out, held in ((tmp_path / "mine", "'notes.txt'"), (home / "study", "study"), (home / "run", "")):
        before = everything(out)
        status, _, told = partita(command, *recipe, "--quiet", "--out", str(out))
        assert (status, told.count("\n")) == (2, 1), told
        assert f"out={str(out)!r}: expected a new" in told
        assert held in told
        assert everything(out) == before


def test_a_study_is_no_place_for_a_run_even_to_resume(home: Path, run: pt.Run) -> None:
    before = everything(home)
    for resume in (False, True):
        with pytest.raises(ValueError, match="this one holds a study already"):
            experiment().run(out=home / "study", resume=resume)
    with pytest.raises(ValueError, match="this one holds a study already"):
        run.save(home / "study")
    assert everything(home) == before


def test_a_folder_that_is_empty_or_behind_a_link_is_written(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    experiment().run(out=tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "summary.json").is_file()


def test_what_a_killed_run_left_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoint" / "clients-0").mkdir(parents=True)
    (tmp_path / "run" / ".config.json.tmp").write_text("{")
    experiment().run(out=tmp_path / "run")
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / ".study.json.tmp").write_text("{")
    run_study(lambda _: versus(experiment()), [0], out=tmp_path / "study", announce=quiet)


@pytest.mark.parametrize("who", WRITERS)
def test_what_cannot_be_a_folder(
    who: str, run: pt.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "locked").mkdir()
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, *more, **also: Path(path).name != "locked" and access(path, *more, **also)
    )
    before = everything(tmp_path)
    for out in ("file", "file/below", "nowhere", "null\0", "locked"):
        with pytest.raises(ValueError, match=r"^(out|folder)=.*expected a folder that can be"):
            WRITERS[who](tmp_path / out, run)
    assert everything(tmp_path) == before


def test_a_copy_is_not_made_inside_of_what_is_copied(home: Path, run: pt.Run) -> None:
    (home / "link").symlink_to(home / "run")
    for some in (run, pt.load(home / "run")):
        for place in ("run", "link"):
            with pytest.raises(ValueError, match="expected a folder outside of"):
                some.save(home / place / "copy")
    assert not (home / "run" / "copy").exists()


@each(
    "words",
    [
        ("run", "digits", "--out", ""),
        ("compare", "digits", "--out", ""),
        ("split", "digits", "--out", ""),
        ("demo", "--out", ""),
        ("report", ".", "--out", ""),
        ("report", ""),
        ("run", "digits", "--data-dir", ""),
    ],
    ids=" ".join,
)
def test_an_empty_path_is_not_the_current_folder(
    words: tuple[str, ...], partita: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, told = partita(*words)
    assert (status, out, told.count("\n")) == (2, "", 1)
    assert "expected a path" in told
    assert not list(tmp_path.iterdir())


def test_an_empty_path_in_python(run: pt.Run) -> None:
    with pytest.raises(ValueError, match="out=''"):
        experiment().run(out="")
    with pytest.raises(ValueError, match="folder=''"):
        run.save("")
    with pytest.raises(ValueError, match="this is a folder"):
        run.report("")


# ---- pages


def test_a_page_replaces_a_page_of_ours_alone(run: pt.Run, tmp_path: Path) -> None:
    page = run.report(tmp_path / "report.html")
    first = page.read_bytes()
    run.report(page)
    assert page.read_bytes() == first
    for name, content in {
        "summary.json": f'{{"a": "{MARK}"}}',
        "other.html": "<!doctype html>\n<p>somebody's own page",
        "empty.html": "",
        "notes.md": MARK,
    }.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=r"^path=.*expected a new file, or a page that Partita wrote"):
            run.report(tmp_path / name)
        assert (tmp_path / name).read_text() == content


def test_a_page_does_not_follow_a_link(run: pt.Run, tmp_path: Path) -> None:
    (tmp_path / "theirs.html").write_text("theirs")
    (tmp_path / "link.html").symlink_to(tmp_path / "theirs.html")
    (tmp_path / "nowhere.html").symlink_to(tmp_path / "gone.html")
    for name in ("link.html", "nowhere.html"):
        with pytest.raises(ValueError, match="something else is there"):
            run.report(tmp_path / name)
    assert (tmp_path / "theirs.html").read_text() == "theirs"
    assert not (tmp_path / "gone.html").exists()


def test_reports_of_the_command_line(
    home: Path, tmp_path: Path, partita: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = home / "run"
    before = everything(home)
    for name in ("summary.json", "config.json", "metrics.jsonl", "clients.csv"):
        status, _, told = partita("report", str(folder), "--out", str(folder / name))
        assert (status, told.count("\n")) == (2, 1)
        assert "a page that Partita wrote" in told
    assert everything(home) == before
    assert partita("report", str(folder))[0] == 0  # its own page, again
    (tmp_path / "report.html").write_text("mine")
    assert partita("report", str(folder), str(home / "study"))[0] == 2
    (tmp_path / "partita-demo.html").write_text("mine")
    status, _, told = partita("demo", "--quiet")
    assert (status, told.count("\n")) == (2, 1)
    assert "partita-demo.html" in told


def test_a_page_of_somebody_else_in_ones_own_folder_is_found_before_training(tmp_path: Path) -> None:
    experiment().run(out=tmp_path / "run", report=False)
    (tmp_path / "run" / "report.html").write_text("mine")
    with pytest.raises(ValueError, match="page that Partita wrote"):
        experiment().run(out=tmp_path / "run", resume=True)
    experiment().run(out=tmp_path / "run", resume=True, report=False)
    assert (tmp_path / "run" / "report.html").read_text() == "mine"


@pytest.mark.parametrize("name", ["x[/bold]y", "a\nb", "[red]", "ü 試", "a b'c\"d", ":smile:"])
def test_odd_names(name: str, tmp_path: Path, partita: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for recipe in ("digits", "offices"):
        monkeypatch.setitem(sys.modules["partita.recipes"].RECIPES, recipe, lambda seed=0: experiment())  # noqa: ARG005
    for command in (["demo"], ["run", "digits"], ["compare", "digits"]):
        out = tmp_path / command[0] / name
        out.parent.mkdir(parents=True)
        status, printed, told = partita(*command, "--quiet", "--out", str(out))
        assert status == 0, told
        assert f"{out}/report.html" in printed
        status, printed, told = partita("report", str(out), "--out", str(out) + ".html")
        assert status == 0, told
        assert f"{out}.html" in printed
