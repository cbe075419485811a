"""The figures as data, before anything is drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from report_rows import client, example, fake, record

from partita.engine.record import Record
from partita.report import figures as draw
from partita.report.rows import averages


def resolved(value: Any) -> Any:
    """A figure as plotly takes it: colours by value, our own keys gone."""
    if isinstance(value, dict):
        return {k: resolved(v) for k, v in value.items() if k not in ("when", "layouts")}
    if isinstance(value, list):
        return [resolved(v) for v in value]
    return "#123456" if isinstance(value, str) and value.startswith("@") else value


def test_plotly_knows_every_field() -> None:
    go = pytest.importorskip("plotly.graph_objects")
    runs = {label: [example(label, seed, train=True) for seed in (0, 1)] for label in ("a", "b")}
    made = [draw.curves(runs, "accuracy"), draw.losses(runs), draw.scatter(averages(runs))]
    made += [draw.violins(averages(runs)), draw.violins(averages(runs), "train")]
    for figure in made:
        assert figure is not None
        go.Figure(resolved(figure))
        for layout in figure.get("layouts", {}).values():
            go.Layout(layout)


def test_a_curve_is_the_mean_of_its_seeds_with_a_band() -> None:
    def run(seed: int, *scores: float) -> Record:
        rows = [
            {"round": i + 1, "seconds": 2.0 * (i + 1) + seed, "test.personal": x}
            for i, x in enumerate(scores)
        ]
        return record([], rows)

    figure = draw.curves({"x": [run(0, 0.2, 0.6), run(1, 0.4, 0.6)]}, "accuracy")
    assert figure is not None
    low, high, line = (t for t in figure["data"] if t["when"] == {"axis": "round"})
    assert line["x"] == [1, 2]
    assert line["y"] == pytest.approx([0.3, 0.6])
    assert low["y"] == pytest.approx([0.3 - 0.02**0.5, 0.6])
    assert high["y"] == pytest.approx([0.3 + 0.02**0.5, 0.6])
    by_seconds = [t for t in figure["data"] if t["when"] == {"axis": "seconds"}]
    assert by_seconds[-1]["x"] == [2.5, 4.5]


def test_equal_curves_are_drawn_once() -> None:
    rows = [{"round": 1, "test.personal": 0.5, "test.global": 0.5}]
    figure = draw.curves({"x": [record([], rows)]}, "accuracy")
    assert figure is not None
    assert [t["name"] for t in figure["data"]] == ["personal models"]


def test_points_are_clients_by_what_became_of_them() -> None:
    rows = [
        client("up", 0.9, 0.5, n_train=10),
        client("down", 0.1, 0.5, n_train=1000),
        client("same", 0.5, 0.5),
    ]
    figure = draw.scatter(averages({"x": [fake(*rows, client("unknown", None, 0.5))]}))
    assert figure is not None
    found = {t["name"]: (t["customdata"][0][0], t["y"], t["marker"]["color"]) for t in figure["data"]}
    assert found == {
        "better (1)": ("up", [0.4], "@gain"),
        "equal (1)": ("same", [0.0], "@equal"),
        "worse (1)": ("down", [-0.4], "@hurt"),
    }
    low, high = figure["layout"]["xaxis"]["range"]
    assert low < 1 < 3 < high
    assert figure["layout"]["xaxis"]["tickvals"] == [10, 20, 50, 100, 200, 500, 1000]


def test_clients_at_one_point_do_not_hide_each_other() -> None:
    figure = draw.scatter(averages({"x": [fake(*(client(str(i), 0.9, 0.5) for i in range(30)))]}))
    assert figure is not None
    x = figure["data"][0]["x"]
    assert len(set(x)) == 30
    assert all(19 < v < 21 for v in x)


def test_very_many_clients_are_sampled_and_that_is_said() -> None:
    rows = [client(str(i), 0.9, 0.5) for i in range(draw.MOST_POINTS + 1)]
    figure = draw.scatter(averages({"x": [fake(*rows)]}))
    assert figure is not None
    assert sum(len(t["x"]) for t in figure["data"]) == draw.MOST_POINTS
    many = np.arange(draw.MOST_POINTS + 1)
    assert draw.sample(many).tolist() == draw.sample(many).tolist()


def test_violins_hold_the_changes() -> None:
    rows = [client(str(i), 0.1 * i, 0.2, global_train=0.5, personal_train=0.75) for i in range(4)]
    figure, train = (draw.violins(averages({"x": [fake(*rows)]}), split) for split in ("test", "train"))
    assert figure is not None
    assert train is not None
    violin, median = figure["data"]
    assert violin["y"] == pytest.approx([-0.2, -0.1, 0.0, 0.1])
    assert median["y"] == pytest.approx([-0.05])
    assert train["data"][0]["y"] == [0.25] * 4
    assert draw.violins(averages({"x": [fake(client("a", 0.5))]})) is None
