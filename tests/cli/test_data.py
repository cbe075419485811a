"""`partita data`: what there is, getting it from files at hand, and refusals of one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from partita.cli.catalogue import facts
from partita.data.sources import SOURCES, File
from partita.recipes import NEEDS, RECIPES
from support import Command, each

FOLDER = Path(__file__).parents[1] / "data"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of the heart patients as they are published; the folder of archives is empty."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import published

    folder = tmp_path / "files"
    folder.mkdir()
    published.heart_disease(folder)
    monkeypatch.setenv("PARTITA_DATA", str(tmp_path / "archives"))
    return folder


def test_list_says_what_there_is_and_what_is_here(files: Path, partita: Command) -> None:
    rows = {row["name"]: row for row in json.loads(partita("data", "list", "--json").stdout)}
    assert list(rows) == list(SOURCES)
    assert not any(row["here"] for row in rows.values())
    assert rows["mnist"]["recipes"] == ["persafl-mnist", "fedplus-mnist", "fedplus-stragglers"]
    assert partita("data", "get", "heart_disease", "--from", str(files)).returncode == 0
    (row,) = json.loads(partita("data", "list", "heart_disease", "--json").stdout)
    assert row["here"]
    assert Path(row["file"]).is_file()
    text = partita("data", "list").stdout
    assert all(name in text for name in (*SOURCES, *NEEDS))
    for file in SOURCES["imdb"].files:
        assert file.url in partita("data", "list", "imdb").stdout


def test_get_writes_where_it_is_told_and_not_twice(files: Path, tmp_path: Path, partita: Command) -> None:
    command = ("data", "get", "heart_disease", "--to", str(tmp_path / "other"), "--from", str(files))
    assert str(tmp_path / "other" / "heart_disease.npz") in partita(*command).stdout
    before = (tmp_path / "other" / "heart_disease.npz").stat().st_mtime_ns
    assert "--force" in partita(*command).stdout
    assert (tmp_path / "other" / "heart_disease.npz").stat().st_mtime_ns == before
    assert partita(*command, "--force").returncode == 0
    assert (tmp_path / "other" / "heart_disease.npz").stat().st_mtime_ns > before


@each("words, said", [
    (("get", "heart"), "did you mean 'heart_disease'"),
    (("list", "mnits"), "did you mean 'mnist'"),
    (("get", "mnist", "--from", "nowhere"), "a folder that exists"),
    (("get", "mnist", "--from", "."), "train-images-idx3-ubyte.gz"),
])  # fmt: skip
@pytest.mark.usefixtures("home")
def test_refusals(words: tuple[str, ...], said: str, partita: Command) -> None:
    assert said in partita("data", *words).refusal


@pytest.mark.usefixtures("files")
def test_without_network_it_is_one_line(
    tmp_path: Path, partita: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = SOURCES["heart_disease"]._replace(files=(File((tmp_path / "gone.zip").as_uri()),))
    monkeypatch.setitem(SOURCES, "heart_disease", nowhere)
    line = partita("data", "get", "heart_disease").refusal
    assert "could not read" in line
    assert "--from FOLDER" in line


@each("recipe", RECIPES)
def test_recipes_say_which_data_they_need(recipe: str) -> None:
    (page,) = (entry for entry in facts(recipe) if entry["kind"] == "recipes")
    argument, names = NEEDS.get(recipe, ("", ()))
    assert page["data"] == list(names)
    lines = (page["get"] or "").splitlines()
    assert [line.split()[:4] for line in lines] == [["partita", "data", "get", name] for name in names]
    assert not argument or all(f"for {argument}=" in line for line in lines)


@pytest.mark.usefixtures("files")
def test_the_lists_name_the_data(partita: Command) -> None:
    assert "Data: mnist." in " ".join(partita("list", "recipes").stdout.split())
    assert "partita data get mnist" in partita("show", "mnist").stdout
    assert "partita data get" not in partita("show", "fedavg").stdout
