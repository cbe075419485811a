"""What is followed beside scores, and what is shown of runs with Byzantine clients."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from report_rows import attacked, client, example, fake, measured, record

from partita.engine.record import Record
from partita.report import page as pages
from partita.report.compare import paired, table
from partita.report.header import byzantine
from partita.report.hurt import hurt
from partita.report.measures import measures
from partita.report.page import page
from partita.report.rows import averages, checked
from support import each


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    offline = SimpleNamespace(get_plotlyjs=lambda: "/* plotly */")
    monkeypatch.setattr(pages, "import_module", lambda _: offline)


def shown(markup: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", markup)).strip()


def followed(*values: dict[str, Any], seed: int = 0, **more: Any) -> Record:
    """A run whose evaluations found this."""
    rows = [{"round": i + 1, "seconds": 1.0 * i, "measures": value, **more} for i, value in enumerate(values)]
    return record([client("a", 0.5)], rows, facts={"seed": seed})


# ---- figures over the rounds


def test_a_number_over_the_rounds_is_the_mean_of_its_seeds() -> None:
    a = followed({"mine": {"size": 1.0}}, {"mine": {"size": 3.0}})
    b = followed({"mine": {"size": 2.0}}, {"mine": {"size": 3.0}}, seed=1)
    figures, section = measures({"x": [a, b]})
    assert set(figures) == {"mine.size"}
    low, high, line = figures["mine.size"]["data"]
    assert (line["x"], line["y"]) == ([1, 2], [1.5, 3.0])
    assert low["y"] == pytest.approx([1.5 - 0.5**0.5, 3.0])
    assert high["y"] == pytest.approx([1.5 + 0.5**0.5, 3.0])
    assert not any("when" in trace for trace in figures["mine.size"]["data"])
    assert section is not None
    assert "What the measure mine found at each evaluation." in shown(section)
    assert 'data-figure="mine.size"' in section


def test_labels_overlay() -> None:
    runs = {k: [followed({"gradient_norm": {"total": v, "mean": v}})] for k, v in (("a", 1.0), ("b", 2.0))}
    figures, section = measures(runs)
    assert list(figures) == ["gradient_norm.total", "gradient_norm.mean"]
    assert [t["name"] for t in figures["gradient_norm.total"]["data"]] == ["a", "b"]
    colours = [t["line"]["color"] for t in figures["gradient_norm.total"]["data"]]
    assert colours == ["@0", "@1"]
    assert section is not None
    assert section.count("How to read this.") == 2
    assert "so personalize less" in section


def test_a_label_without_the_measure_has_no_line_and_keeps_its_colour() -> None:
    figures, _ = measures({"a": [followed({})], "b": [followed({"mine": {"size": 2.0}})]})
    assert [(t["name"], t["line"]["color"]) for t in figures["mine.size"]["data"]] == [("b", "@1")]


def test_the_change_at_aggregation_has_a_band_of_its_deviation() -> None:
    a = followed({"aggregation_change": {"mean": 1.0, "std": 0.25}})
    b = followed({"aggregation_change": {"mean": 2.0, "std": 0.75}})
    figures, section = measures({"x": [a, b]})
    assert list(figures) == ["aggregation_change.mean"]
    low, high, line = figures["aggregation_change.mean"]["data"]
    assert (low["y"], line["y"], high["y"]) == ([1.0], [1.5], [2.0])
    assert section is not None
    assert "Jump at aggregation" in section


@each(
    ("values", "log"),
    [
        ((1.0, 0.001), True),
        ((1.0, 0.02), False),
        ((1.0, 0.0), False),
        ((-1.0, 1000.0), False),
        ((3.0,), False),
    ],
)
def test_two_decades_make_a_log_scale(values: tuple[float, ...], log: bool) -> None:
    figures, _ = measures({"x": [followed(*({"mine": {"size": v}} for v in values))]})
    axis = figures["mine.size"]["layout"]["yaxis"]
    assert (axis.get("type") == "log") == log
    assert ("log scale" in axis["title"]["text"]) == log


def test_a_band_on_a_log_scale_stays_above_zero() -> None:
    values = [{"aggregation_change": {"mean": m, "std": 2.0}} for m in (1000.0, 1.0)]
    figures, _ = measures({"x": [followed(*values)]})
    low, *_ = figures["aggregation_change.mean"]["data"]
    assert low["y"] == [998.0, 0.1]


def test_what_aggregators_say() -> None:
    said = {"iterations": 7, "f": 2, "chosen": 3, "buckets": [1, 2], "inner.iterations": 4, "spread": 0.5}
    figures, section = measures({"x": [followed({}, aggregation=said)]})
    assert list(figures) == ["aggregation.iterations", "aggregation.inner.iterations", "aggregation.spread"]
    assert figures["aggregation.iterations"]["data"][0]["y"] == [7]
    assert section is not None
    assert "Iterations of the aggregator (inner.iterations)" in section
    assert "Aggregation: spread" in section


# ---- the line


def line(*loss: Any, lam: Any = (0.0, 0.5, 1.0)) -> dict[str, Any]:
    return {"line_loss": {"loss": list(loss), "lambda": list(lam)}}


def test_the_last_line_is_drawn_and_averaged() -> None:
    a, b = followed(line(9, 9, 9), line(1.0, 2.0, 4.0)), followed(line(3.0, 2.0, 0.0), seed=1)
    figures, section = measures({"x": [a, b], "y": [followed(line(1.0, 1.0, 1.0))]})
    assert list(figures) == ["line_loss.loss"]
    first, second = figures["line_loss.loss"]["data"]
    assert (first["name"], first["x"], first["y"]) == ("x", [0.0, 0.5, 1.0], [2.0, 2.0, 2.0])
    assert second["y"] == [1.0, 1.0, 1.0]
    axis = figures["line_loss.loss"]["layout"]["xaxis"]
    assert dict(zip(axis["tickvals"], axis["ticktext"])) == {
        0: "own model",
        0.5: "halfway",
        1: "aggregated",
    }
    assert section is not None
    assert "A right end above the left one: the full step to the aggregate hurts." in section


def test_lines_of_other_points_are_not_averaged() -> None:
    a, b = followed(line(1.0, 3.0, lam=(0, 1))), followed(line(5.0, 5.0, 5.0))
    figures, _ = measures({"x": [a, b]})
    assert figures["line_loss.loss"]["data"][0]["y"] == [1.0, 3.0]


ODD: list[Any] = [
    None,
    3,
    [],
    {"mine": None},
    {"mine": {"size": None}},
    {"mine": {"size": float("nan")}},
    {"mine": {"size": "large"}},
    {"mine": {"size": [1, 2]}},
    {"line_loss": {}},
    {"line_loss": {"loss": 3}},
    {"line_loss": {"loss": [1, 2], "lambda": [1]}},
    {"line_loss": {"loss": [None, float("nan")], "lambda": [0, 1]}},
]


@each("value", ODD, ids=str)
def test_odd_measures_are_left_out(value: Any) -> None:
    run = followed(value, aggregation=value if not isinstance(value, dict) else None)
    assert measures({"x": [run]}) == ({}, None)
    assert 'id="measures"' not in page({"x": [run]})


def test_plotly_knows_every_field() -> None:
    go = pytest.importorskip("plotly.graph_objects")
    figures, _ = measures({"a": [measured(), measured(seed=1)], "b": [measured("b")]})
    assert len(figures) == 5
    for figure in figures.values():
        go.Figure(_resolved(figure))


def _resolved(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _resolved(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_resolved(v) for v in value]
    return "#123456" if isinstance(value, str) and value.startswith("@") else value


def test_the_page_has_the_section() -> None:
    text = page({"fedalt": [measured()]})
    assert 'id="measures"' in text
    assert 'id="measures"' not in page({"fedalt": [example()]})
    evil = "</script><b>"
    text = page({"x": [followed({evil: {evil: 1.0}})]})
    assert evil not in text
    assert text.count("<script") == 4


# ---- Byzantine clients


def test_the_header_says_how_many_are_byzantine() -> None:
    said = "10 of 40 clients are Byzantine (sign_flip); scores are those of the honest clients."
    assert byzantine({"x": [attacked()]}) == said
    assert said in shown(page({"x": [attacked()]}))
    assert byzantine({"x": [example()]}) == ""
    both = {"x": [attacked()], "y": [example()]}
    expected = "x: 10 of 40 clients are Byzantine (sign_flip); y: none; "
    expected += "scores are those of the honest clients."
    assert byzantine(both) == expected
    assert byzantine({"x": [attacked()], "y": [attacked("fedavg")]}) == said
    one = fake(client("a", 0.5), clients=3, byzantine={"clients": 1, "attack": "alie"})
    assert (
        byzantine({"x": [one]})
        == "1 of 3 clients is Byzantine (alie); scores are those of the honest clients."
    )


def test_byzantine_clients_are_in_no_figure_and_no_table() -> None:
    run = attacked()
    text = page({"fedalt": [run]})
    lying = [row["client"] for row in run.clients if row["byzantine"]]
    assert len(lying) == 10
    for name in lying:
        assert f">{name}<" not in text
        assert f'"{name}"' not in text
    runs = checked({"x": [run], "y": [attacked("fedavg", gain=0.0)]})
    assert [len(seeds[0].clients) for seeds in runs.values()] == [30, 30]
    assert checked(runs)["x"][0] is runs["x"][0]
    assert [row["clients"] for row in paired(runs)] == [30]
    honest = [row for row in run.clients if not row["byzantine"]]
    assert table({"x": [run]})[0]["hurt_vs_global"] == sum(r["personal"] < r["global"] for r in honest)


def test_who_is_byzantine_may_differ_between_seeds() -> None:
    first = fake(client("a", 0.5, 0.6), client("b", 0.1, 0.6, byzantine=1))
    second = fake(client("a", 0.9, 0.6, byzantine=1), client("b", 0.7, 0.6), seed=1)
    rows = averages(checked({"x": [first, second]}))["x"].clients
    assert [(row["client"], row["personal"]) for row in rows] == [("a", 0.5), ("b", 0.7)]


def test_a_run_of_byzantine_clients_only_has_a_page() -> None:
    assert "No client has two scores" in page({"x": [fake(client("a", 0.5, 0.6, byzantine=1))]})


def test_the_excluded_are_told_why() -> None:
    run = fake(client("a", 0.5, 0.6), client("b", 0.5, 0.6), excluded=["a"], excluded_why={"a": "too large"})
    text = shown(hurt({"x": [run]}, averages({"x": [run]})))
    assert text.count("It was excluded: its uploads were unusable (too large)") == 1


def test_settings_show_the_attack() -> None:
    text = shown(page({"x": [attacked()]}))
    assert "attack.name sign_flip" in text
    assert "attack.scale 2.0" in text
    assert "settings.byzantine 0, 4, 8, 12, 16, 20, 24, 28, 32, 36" in text
