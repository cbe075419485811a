"""Getting a dataset: from an address, from files at hand, and what goes wrong on the way."""

from __future__ import annotations

import hashlib
from pathlib import Path

import published
import pytest

import partita as pt
from partita.core import check
from partita.data import sources
from partita.data.real import READERS, data_folder
from partita.data.sources import SOURCES, File, get
from partita.recipes import NEEDS, RECIPES

NAME = "heart_disease"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Publish the tables of four hospitals in a folder, with their checksum."""
    folder = tmp_path / "server"
    folder.mkdir()
    published.heart_disease(folder)
    file = folder / "heart+disease.zip"
    md5 = hashlib.md5(file.read_bytes()).hexdigest()
    known = SOURCES[NAME]._replace(files=(File(file.as_uri().replace("%2B", "+"), md5),))
    monkeypatch.setitem(SOURCES, NAME, known)
    return file


def test_every_reader_has_a_source_and_every_recipe_its_data() -> None:
    assert set(SOURCES) == set(READERS)
    assert set(NEEDS) <= set(RECIPES)
    assert {name for _, names in NEEDS.values() for name in names} <= set(SOURCES)
    assert all(bool(source.files) != bool(source.hub) for source in SOURCES.values())


def test_recipes_need_what_is_said_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_DATA", str(tmp_path))
    for recipe, (argument, names) in NEEDS.items():
        for name in names:
            with pytest.raises(check.Refused, match=rf"partita data get {name}\b") as refused:
                RECIPES[recipe](**({argument: name} if argument else {}))
            assert refused.value.field == "folder"


def test_a_download_is_checked_converted_and_cleared_away(server: Path, tmp_path: Path) -> None:
    heard: list[tuple[str, int, int | None]] = []
    path = get(NAME, tmp_path / "out", progress=lambda *now: heard.append(now))
    size = server.stat().st_size
    assert heard[-1] == (server.name, size, size)
    assert [p.name for p in path.parent.iterdir()] == ["heart_disease.npz"]
    assert pt.data.real(NAME, folder=tmp_path / "out").clients == 4


def test_a_damaged_file_is_refused_and_comes_anew(server: Path, tmp_path: Path) -> None:
    whole = server.read_bytes()
    server.write_bytes(whole[:-1])
    with pytest.raises(check.Refused, match="MD5") as refused:
        get(NAME, tmp_path)
    assert refused.value.field == "file"
    server.write_bytes(whole)
    assert get(NAME, tmp_path).is_file()


def test_without_network_one_line_says_what_to_do(server: Path, tmp_path: Path) -> None:
    server.unlink()
    with pytest.raises(OSError, match=r"heart_disease: could not read .*--from FOLDER") as error:
        get(NAME, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert list((tmp_path / "out").iterdir()) == []


def test_files_at_hand_are_converted_and_stay(server: Path, tmp_path: Path) -> None:
    assert get(NAME, tmp_path / "out", files=server.parent).is_file()
    assert server.is_file()
    server.unlink()
    for folder, value in ((server.parent, str(server.parent)), (tmp_path / "no", str(tmp_path / "no"))):
        with pytest.raises(check.Refused) as refused:
            get(NAME, tmp_path / "out", files=folder)
        assert (refused.value.field, refused.value.value) == ("files", value)


def test_a_hub_that_cannot_be_reached_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")

    def fails(*_: object, **__: object) -> None:
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(sources, "_reachable", lambda _: False)
    monkeypatch.setattr(datasets, "load_dataset", fails)
    with pytest.raises(OSError, match=r"femnist: could not read .*no route\); where") as error:
        get("femnist", tmp_path)
    assert "\n" not in str(error.value)


def test_archives_lie_where_readers_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_DATA", str(tmp_path / "a"))
    assert data_folder() == tmp_path / "a"
    assert data_folder(tmp_path / "b") == tmp_path / "b"
    monkeypatch.delenv("PARTITA_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_folder() == tmp_path / "partita"
    with pytest.raises(check.Refused) as refused:
        get("mnits", tmp_path)
    assert refused.value.field == "name"
