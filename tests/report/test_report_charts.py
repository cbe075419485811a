"""The charts of a study: panels of lines, points, bars and violins, as in a paper's figure."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from report_rows import client, record
from typer.testing import CliRunner

import partita as pt
from partita.cli import app
from partita.recipes import Experiment, Study, Variant
from partita.recipes.study import read_figures, run_study
from partita.recipes.tables import Table
from partita.report import page as pages
from partita.report.charts import Chart, Panel, Series, as_chart, charts, curve


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    offline = SimpleNamespace(get_plotlyjs=lambda: "/* plotly */")
    monkeypatch.setattr(pages, "import_module", lambda _: offline)


def one(*series: Series, log: str = "") -> Any:
    """What is drawn of a chart with one panel."""
    figures, sections = charts([Chart("Error (Figure 1)", [Panel("a", "round", "error", series, log)])])
    assert len(figures) == len(sections) == 1
    return figures["chart-1-1"]


def run(seed: int, *losses: float) -> Any:
    rows = [{"round": i + 1, "seconds": 2.0 * i, "train_loss": v} for i, v in enumerate(losses)]
    return record([client("a", 0.5)], rows, facts={"seed": seed})


def test_a_curve_is_the_mean_over_seeds_with_a_band() -> None:
    line = curve("loss", [run(0, 1.0, 3.0), run(1, 2.0, 3.0)], lambda row: row["train_loss"], scale=100)
    assert (line.x, line.y) == ([1, 2], [150.0, 300.0])
    assert line.spread == pytest.approx([100 * 0.5**0.5, 0.0])
    low, high, drawn = one(line)["data"]
    assert drawn["y"] == [150.0, 300.0]
    assert low["y"] == pytest.approx([150 - 50 * 2**0.5, 300.0])
    assert high["y"] == pytest.approx([150 + 50 * 2**0.5, 300.0])


def test_one_seed_has_no_band() -> None:
    line = curve("loss", [run(0, 1.0, 3.0)], lambda row: row["train_loss"], along="seconds")
    assert line == Series("loss", [0.0, 2.0], [1.0, 3.0])
    assert len(one(line)["data"]) == 1


def test_what_diverged_is_left_out() -> None:
    line = Series("x", [1, 2, 3, 4], [1.0, None, float("inf"), 0.5])
    assert one(line)["data"][0]["x"] == [1, 4]
    assert charts([Chart("t", [Panel("a", "x", "y", [Series("x", [1], [float("nan")])])])]) == ({}, [])


def test_a_log_axis_has_no_place_for_zero() -> None:
    figure = one(Series("x", [1, 2, 3], [1.0, 0.0, 1e-8], [2.0, 0.0, 0.0]), log="y")
    assert figure["layout"]["yaxis"]["type"] == "log"
    assert "type" not in figure["layout"]["xaxis"]
    low, _, line = figure["data"]
    assert line["x"] == [1, 3]
    assert min(low["y"]) > 0


def test_the_same_name_has_the_same_colour_in_all_panels() -> None:
    a, b = Series("a", [1], [1.0]), Series("b", [1], [2.0])
    figures, (section,) = charts([Chart("t", [Panel("1", "x", "y", [a, b]), Panel("2", "x", "y", [b])])])
    first, second = figures["chart-1-1"]["data"], figures["chart-1-2"]["data"]
    assert first[1]["line"]["color"] == second[0]["line"]["color"] != first[0]["line"]["color"]
    assert 'data-figure="chart-1-2"' in section


def test_bars_points_and_violins() -> None:
    bar = one(Series("b", ["weak", "strong"], [1.0, 2.0], [0.1, 0.2], kind="bar"))
    assert bar["data"][0]["type"] == "bar"
    assert bar["data"][0]["error_y"]["array"] == [0.1, 0.2]
    assert bar["layout"]["barmode"] == "group"
    assert one(Series("p", [1, 2], [3.0, 4.0], kind="points"))["data"][0]["mode"] == "markers"
    assert one(Series("v", [], [1.0, 2.0, None], kind="violin"))["data"][0]["y"] == [1.0, 2.0]


def test_places_that_are_words_are_no_numbers() -> None:
    figure = one(Series("b", ["10", "50", "100"], [1.0, 2.0, 3.0], kind="bar"))
    assert figure["layout"]["xaxis"]["type"] == "category"
    assert "type" not in one(Series("b", [10, 50], [1.0, 2.0], kind="bar"))["layout"]["xaxis"]


def test_vertical_axes_of_one_title_have_one_range() -> None:
    small, large = Series("a", [1], [1e-7]), Series("a", [1, 2], [2.0, 4.0], [1.0, (0.5, 2.0)])
    panels = [Panel("1", "x", "jump", [small]), Panel("2", "x", "jump", [large])]
    figures, _ = charts([Chart("t", [*panels, Panel("3", "x", "other", [small])])])
    ranges = [figure["layout"]["yaxis"]["range"] for figure in figures.values()]
    assert ranges[0] == ranges[1] == pytest.approx([1e-7 - 0.3, 6.3])
    assert ranges[2][1] < 1e-6
    low, high, _ = figures["chart-1-2"]["data"]
    assert (low["y"], high["y"]) == ([1.0, 3.5], [3.0, 6.0])


def test_bars_and_logarithms_fit_into_their_range() -> None:
    assert one(Series("b", ["a"], [3.0], kind="bar"))["layout"]["yaxis"]["range"] == pytest.approx([0, 3.15])
    low, high = one(Series("x", [1, 2], [1.0, 1e-8]), log="y")["layout"]["yaxis"]["range"]
    assert (low, high) == pytest.approx((-8.4, 0.4))


def test_rows_of_panels() -> None:
    panels = [Panel(str(i), "x", "y", [Series("a", [1], [1.0])]) for i in range(4)]
    _, (section,) = charts([Chart("t", panels, columns=2)])
    assert 'style="--columns: 2"' in section
    assert as_chart(*json.loads(json.dumps(Chart("t", [], "n", 3)))) == Chart("t", [], "n", 3)


def test_a_name_cannot_be_markup() -> None:
    figure = one(Series("<b>x", [1], [1.0]))
    assert figure["data"][0]["name"] == "&lt;b&gt;x"
    assert "<b>x" not in json.dumps(figure)


def test_a_study_keeps_its_tables_and_charts_for_a_later_report(tmp_path: Path) -> None:
    data = pt.data.digits(3, seed=0)
    base = Experiment(
        pt.models.mlp(64, 8, 10), data, pt.fedavg(lr=0.1), rounds=2, steps=1, batch=8, evaluate_every=1
    )

    def study(seed: int) -> Study:
        del seed
        return Study(
            {"fedavg": Variant(base)},
            tables=lambda runs: [Table("Scores", ("method", "score"), [(name, "1") for name in runs])],
            charts=lambda runs: [
                Chart(
                    "Error (Figure 1)",
                    [
                        Panel(
                            "a",
                            "round",
                            "score",
                            [curve(n, r, lambda row: row["validation.global"]) for n, r in runs.items()],
                        )
                    ],
                    "How it fell.",
                )
            ],
        )

    out = tmp_path / "study"
    run_study(study, [0], out=out, announce=str, progress=False)
    tables, (chart,) = read_figures(out)
    assert [t.title for t in tables] == ["Scores"]
    assert chart.panels[0].series[0].x == [1, 2]
    assert as_chart(*json.loads(json.dumps(chart))) == chart
    (out / "report.html").unlink()
    assert CliRunner().invoke(app, ["report", str(out)]).exit_code == 0
    page = (out / "report.html").read_text()
    assert "Error (Figure 1)" in page
    assert "How it fell." in page
    assert "Scores" in page


def test_a_broken_file_of_figures_is_named(tmp_path: Path) -> None:
    (tmp_path / "figures.json").write_text('{"tables": []}')
    with pytest.raises(ValueError, match=r"figures\.json"):
        read_figures(tmp_path)
