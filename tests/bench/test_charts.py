"""Pictures of a study's charts."""

from __future__ import annotations

from pathlib import Path

import pytest

import charts
from drawing import picture
from partita.engine.store.files import json_text
from partita.report.charts import Chart, Panel, Series

TWO = [
    Chart("Error (Figure 1)", [Panel(f"panel {i}", "round", "error", [Series("a", [1, 2], [1.0, 0.1])], "y")])
    for i in range(2)
]


@pytest.fixture
def study(tmp_path: Path) -> Path:
    (tmp_path / "figures.json").write_text(json_text({"tables": [], "charts": TWO}))
    return tmp_path


@pytest.mark.slow
@pytest.mark.skipif(picture.browser() is None, reason="no browser is installed")
def test_a_picture_for_each_chart(study: Path) -> None:
    charts.main([str(study), "--out", str(study / "error.svg")])
    for i, name in enumerate(("error.svg", "error-2.svg")):
        drawn = (study / name).read_text()
        assert "Error (Figure 1)" in drawn
        assert f"panel {i}" in drawn
        assert drawn.count("<svg") > 1  # the panel itself


@pytest.mark.parametrize("words", [["--out", "error.png"], ["--out", "error.svg", "--only", "3"]])
def test_what_cannot_be_drawn(
    study: Path, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(study)
    with pytest.raises(SystemExit):
        charts.main([str(study), *words])
    assert words[-2].strip("-") in capsys.readouterr().err
    assert [path.name for path in study.iterdir()] == ["figures.json"]


def test_no_charts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        charts.main([str(tmp_path), "--out", "x.svg"])
    assert "a study with charts" in capsys.readouterr().err
