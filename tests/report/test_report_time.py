"""Virtual time: when scores were reached, who was at work, how long turns took and how stale uploads were."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from report_rows import client, example, fake, record, timed

from partita.engine.record import Record
from partita.report import figures as draw
from partita.report import histograms
from partita.report import page as pages
from partita.report.compare import table
from partita.report.cost import cost, visits
from partita.report.header import header, what_ran
from partita.report.page import page
from partita.report.rows import averages
from partita.report.time import reached, targets, time
from partita.report.time import slow as slow_clients
from support import each

EVIL = "</script><b>@0"
FIGURES = ["time.scores", "time.active", "time.delays", "time.ages"]


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    offline = SimpleNamespace(get_plotlyjs=lambda: "/* plotly */")
    monkeypatch.setattr(pages, "import_module", lambda _: offline)


def shown(markup: str | None) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", markup or "")).strip()


def told(runs: dict[str, list[Record]]) -> str:
    """The text of the section."""
    return shown(time(runs, averages(runs))[1])


def ran(*points: tuple[float, float], seed: int = 0, **facts: Any) -> Record:
    """A run that had these scores at these times."""
    rows = [
        {"round": i + 1, "seconds": 1.0 * i, "time": at, "test.personal": x}
        for i, (at, x) in enumerate(points)
    ]
    clock = {"time": points[-1][0], "staleness": {"max": 1}}
    made = fake(client("a", points[-1][1]), seed=seed, rounds=len(points), clock=clock, **facts)
    return record(made.clients, rows, facts=made.facts)


# ---- whether there is anything to tell


def test_a_clock_that_counts_rounds_tells_nothing() -> None:
    plain = example()
    plain.facts["clock"] = {"time": 50.0, "staleness": {"max": 0, "counts": [[0, 9]]}, "late": 0, "lost": 0}
    for run in (example(), plain):
        assert run.facts.virtual_time is None
        assert time({"x": [run]}, averages({"x": [run]})) == ({}, None)
        assert 'id="time"' not in page({"x": [run]})
        assert "virtual" not in page({"x": [run], "y": [run]})


@each("more", [{"time": 51.0}, {"staleness": {"max": 1}}, {"late": 1}, {"lost": 1}])
def test_more_than_rounds_is_told(more: dict[str, Any]) -> None:
    run = example()
    run.facts["clock"] = {"time": 50.0, "staleness": {"max": 0}, "late": 0, "lost": 0, **more}
    assert run.facts.virtual_time == run.facts["clock"]["time"]
    assert 'id="time"' in page({"x": [run]})


def test_the_page_has_all_figures() -> None:
    runs = {"a": [timed(), timed(seed=1)], "b": [timed("b", pace=5.0, stale=False)], "c": [example("c")]}
    figures, section = time(runs, averages(runs))
    assert list(figures) == FIGURES
    text = page(runs)
    for name in FIGURES:
        assert f'data-figure="{name}"' in str(section)
        assert f'data-figure="{name}"' in text
    assert section is not None
    assert section.count("How to read this.") == 4
    assert [t["name"] for t in figures["time.active"]["data"] if "name" in t] == ["a", "b"]


ODD: list[Any] = [
    {},
    {"time": None},
    {"time": 0.0, "staleness": {"max": 3, "counts": [[0, 1], [3, 1]]}, "active": None},
    {"time": float("nan"), "late": 1},
    {"time": 3.0, "staleness": 3, "delay": "long"},
    {"time": 3.0, "staleness": {"counts": 3}, "delay": {"counts": [[], None, [1.0, 2.0, 0], ["a", 1]]}},
    {"time": 3.0, "delay": {"counts": [[0.0, 0.0, 5]]}},
    [3],
]


@each("clock", ODD, ids=str)
def test_odd_clocks_have_a_page(clock: Any) -> None:
    run = timed()
    run.facts["clock"] = clock
    for runs in ({"x": [run]}, {"x": [run], "y": [run, timed(seed=1)], "z": [fake(client("a", None))]}):
        text = shown(page(runs).split("<main>")[1].split("<footer>")[0])
        assert "nan" not in text.lower().split()


def test_no_text_of_users_becomes_markup() -> None:
    run = timed(EVIL)
    for row in run.clients:
        row["client"] = EVIL
    text = page({EVIL: [run], EVIL + "2": [run]})
    assert EVIL not in text
    assert text.count("<script") == 4


# ---- curves


def test_a_curve_against_time() -> None:
    figure = draw.curves_in_time({"x": [ran((2.0, 0.1), (5.0, 0.4), (5.0, 0.5))]}, "accuracy")
    assert figure is not None
    [line] = figure["data"]
    assert (line["x"], line["y"]) == ([2.0, 5.0], [0.1, 0.5])  # of two at one time, the last
    assert "when" not in line
    assert draw.curves_in_time({"x": [ran((0.0, 0.1), (0.0, 0.4))]}, "accuracy") is None


def test_seeds_are_averaged_at_the_same_time() -> None:
    a, b = ran((1.0, 0.1), (3.0, 0.3)), ran((2.0, 0.4), (4.0, 0.4), seed=1)
    figure = draw.curves_in_time({"x": [a, b]}, "accuracy")
    assert figure is not None
    low, high, line = figure["data"]
    assert line["x"] == [2.0, 3.0]  # as far as both go
    assert line["y"] == pytest.approx([0.3, 0.35])  # (0.2 + 0.4) / 2, (0.3 + 0.4) / 2
    assert [h - y for h, y in zip(high["y"], line["y"])] == pytest.approx([0.02**0.5, 0.005**0.5])
    assert low["y"][0] == pytest.approx(0.3 - 0.02**0.5)


def test_seeds_with_other_rounds_do_not_zigzag() -> None:
    a, b = ran((1.0, 0.0), (2.0, 0.2), (3.0, 0.4)), ran((1.0, 0.5), (2.0, 0.5), seed=1)
    b.metrics[1]["round"] = 3
    [line] = (
        t
        for t in draw.curves({"x": [a, b]}, "m")["data"]
        if t["mode"] != "lines" and "round" in t["when"].values()
    )
    assert (line["x"], line["y"]) == ([1, 2, 3], pytest.approx([0.25, 0.35, 0.45]))


def test_equal_scores_at_other_times_are_two_lines() -> None:
    runs = {"a": [ran((1.0, 0.1), (2.0, 0.2))], "b": [ran((5.0, 0.1), (9.0, 0.2))]}
    figure = draw.curves_in_time(runs, "accuracy")
    assert figure is not None
    assert [t["name"] for t in figure["data"]] == ["a", "b"]


# ---- time to a score


def test_targets_are_round_scores_on_the_way_to_the_best() -> None:
    assert targets({"a": [ran((1.0, 0.8966))], "b": [ran((1.0, 0.5))]}) == [0.44, 0.71, 0.8, 0.85, 0.88]
    assert targets({"a": [ran((1.0, 1.0))]}) == [0.5, 0.8, 0.9, 0.95, 0.99]
    assert targets({"a": [ran((1.0, 0.12))]}) == [0.06, 0.096, 0.108, 0.114, 0.118]
    assert targets({"a": [ran((1.0, 0.8)), ran((1.0, 0.6), seed=1)]})[-1] == 0.69  # of their mean


def test_targets_of_errors_come_from_above() -> None:
    runs = {"a": [ran((1.0, 0.3), higher_is_better=False)], "b": [ran((1.0, 2.0), higher_is_better=False)]}
    assert targets(runs) == [0.6, 0.38, 0.34, 0.32, 0.31]
    run = ran((1.0, 0.9), (2.0, 0.33), (4.0, 0.3), higher_is_better=False)
    assert [run.time_to(goal) for goal in (1.0, 0.34, 0.32, 0.2)] == [1.0, 2.0, 4.0, None]
    text = told({"a": [run]})
    assert "≤ 0.60" in text
    assert "loss" not in text
    assert "at most that much" in text


@each("score", [0.0, -1.0, float("nan")])
def test_scores_without_a_zero_have_no_targets(score: float) -> None:
    runs = {"a": [ran((1.0, score))]}
    assert targets(runs) == []
    assert "reaches" not in told(runs)
    assert "Time to a score" not in told(runs)


def test_a_score_is_reached_when_every_seed_has() -> None:
    seeds = [ran((1.0, 0.2), (3.0, 0.6), (5.0, 0.5)), ran((1.0, 0.6), (9.0, 0.9), seed=1)]
    assert reached(seeds, 0.6) == {"mean": 2.0, "std": pytest.approx(2**0.5)}
    assert reached(seeds, 0.9) is None
    assert reached(seeds[1:], 0.9) == {"mean": 9.0, "std": 0.0}


QUICK, SLOW = ran((1.0, 0.5), (35.0, 0.9), (40.0, 1.0)), ran((60.0, 0.5), (120.0, 0.9))


def test_how_much_sooner_is_said() -> None:
    both = {"slow": [SLOW], "quick": [QUICK]}
    text = told(both)
    assert "quick reaches accuracy 0.90 after 35 units of virtual time, slow after 120." in text
    assert "≥ 0.50 ≥ 0.80 ≥ 0.90 ≥ 0.95 ≥ 0.99" in text
    assert "slow 60 120 120 – –" in text
    assert "quick 1 35 35 40 40" in text
    markup = str(time(both, averages(both))[1])
    assert "<b>35</b>" in markup
    assert "<b>120</b>" not in markup


def test_who_does_not_reach_it_is_said() -> None:
    poor = {f"poor {i}": [ran((60.0, 0.3))] for i in range(6)}
    assert "quick reaches accuracy 0.99 after 40 units of virtual time; poor 0 does not." in told(
        {"quick": [QUICK], "poor 0": poor["poor 0"]}
    )
    assert "; poor 0 and poor 1 do not." in told({"q": [QUICK], **dict(list(poor.items())[:2])})
    assert "; 6 others do not." in told({"q": [QUICK], **poor})
    many = {f"slow {i}": [SLOW] for i in range(6)}
    assert "virtual time, the last of 7, slow 5, after 120." in told({"q": [QUICK], **many})


def test_a_single_run_is_told_by_nine_tenths_of_its_score() -> None:
    assert "x reaches accuracy 0.90 after 35 of 40 units of virtual time." in told({"x": [QUICK]})


def test_seeds_have_a_deviation() -> None:
    text = told({"x": [ran((1.5, 0.5), (3.0, 1.0)), ran((3.25, 0.5), (5.0, 1.0), seed=1)], "y": [QUICK]})
    assert "x 2.38 ± 1.24 4 ± 1 4 ± 1 4 ± 1 4 ± 1" in text
    assert "not reached by every seed" in text
    assert "a line goes as far as all of its seeds do" in text


# ---- the clock


def test_one_run_has_tiles_and_several_a_table() -> None:
    text = told({"x": [timed()]})
    assert "virtual time 100 server steps per unit 0.500 clients at work 80 % mean delay 2.50" in text
    assert "longest delay 11 mean staleness 3 oldest upload 59 uploads too late 1 uploads lost 2" in text
    two = {"x": [timed(), timed(seed=1)], "y": [timed(stale=False, pace=5.0)]}
    text = told(two)
    assert "x 100 0.500 80 % 2.50 11 3 59 1 2" in text  # 100 and 101
    assert "y 250 0.200 20 % 2.50 11 0 0 1 2" in text
    assert "ran without delays" not in text


def test_what_never_happened_is_left_out() -> None:
    run = timed(stale=False, late=0, lost=0)
    text = told({"x": [run]})
    assert "late" not in text.split("The clock")[1]
    assert "staleness" not in text.split("The clock")[1].lower()
    assert "time.ages" not in time({"x": [run]}, averages({"x": [run]}))[0]


def test_runs_without_delays_are_named() -> None:
    text = told({"x": [timed()], "y": [example()]})
    assert "y ran without delays: each round takes one unit." in text
    assert "y – – – – – – – – –" in text  # an older run has no clock


def test_cost_and_comparison_show_virtual_time() -> None:
    assert "virtual time 100 client steps" in shown(cost({"x": [timed()]}))
    assert "virtual" not in shown(cost({"x": [example()]}))
    runs = {"x": [timed(), timed(seed=1)], "y": [example()]}
    rows = table(runs)
    assert [row["virtual_time"] for row in rows] == [pytest.approx(100.5), None]
    text = shown(header(runs, averages(runs), None))
    assert "time virtual time sent" in text
    assert re.search(r"1 min 23 s – 41\.0 MB", text)


def test_traffic_is_per_upload() -> None:
    run = timed(staleness={"counts": [[0, 300], [2, 100]]})
    assert visits(run) == 400  # not 50 rounds of 20
    run.config["algorithm"]["stages"] = [{}]
    assert visits(run) is None


def test_steps_of_the_server_are_no_rounds() -> None:
    expected = "fedalt on 40 clients of digits: 50 server steps, seed 0."
    assert what_ran({"x": [timed()]}) == expected
    longer = example()
    longer.facts["rounds"] = 400
    assert what_ran({"x": [timed()], "y": [longer]}).endswith(": 50 to 400 server steps, seed 0.")
    assert what_ran({"x": [example()], "y": [longer]}).endswith(": 50 to 400 rounds, seed 0.")


# ---- histograms


def counted(kind: str, counts: list[list[float]], seed: int = 0) -> Record:
    return fake(client("a", 0.5), seed=seed, rounds=3, clock={"time": 9.0, kind: {"counts": counts}})


def test_delays_are_shares_of_the_uploads_in_log_bins() -> None:
    # bins 0 and 2 of four for each doubling, and a turn that took no time
    a = counted("delay", [[0.0, 0.0, 1], [1.0, 2**0.25, 3]])
    b = counted("delay", [[2**0.5, 2**0.75, 4]], seed=1)
    figure = histograms.delays({"x": [a, b]})
    assert figure is not None
    [trace] = figure["data"]
    assert trace["x"] == pytest.approx([2 ** ((b + 0.5) / 4) for b in (-1, 0, 1, 2, 3)])
    assert trace["y"] == pytest.approx([0, 3 / 8, 0, 4 / 8, 0])
    assert trace["customdata"][1] == "took 1 to 1.19"
    assert trace["line"]["shape"] == "hvh"
    assert figure["layout"]["xaxis"]["type"] == "log"


def test_very_different_delays_share_bins() -> None:
    wide = counted("delay", [[2 ** (b / 4), 2 ** ((b + 1) / 4), 1] for b in range(-80, 80)])
    figure = histograms.delays({"x": [wide]})
    assert figure is not None
    [trace] = figure["data"]
    assert trace["y"] == pytest.approx([0, *[4 / 160] * 40, 0])
    assert trace["customdata"][21] == "took 1 to 2"
    axis = figure["layout"]["xaxis"]
    assert len(axis["tickvals"]) == len(axis["ticktext"]) <= 9
    assert "0.01" in axis["ticktext"]


def test_equal_delays_are_not_drawn() -> None:
    same = counted("delay", [[1.0, 1.19, 100]])
    varied = counted("delay", [[1.0, 1.19, 1], [2.0, 2.38, 1]])
    assert histograms.delays({"x": [same]}) is None
    figure = histograms.delays({"x": [same], "y": [varied]})
    assert figure is not None
    assert [(t["name"], t["line"]["color"], t["showlegend"]) for t in figure["data"]] == [("y", "@1", True)]


def test_staleness_by_age() -> None:
    stale, fresh = counted("staleness", [[0, 6], [2, 2]]), counted("staleness", [[0, 100]])
    figure = histograms.ages({"x": [stale], "y": [fresh]})
    assert figure is not None
    [trace] = figure["data"]
    assert trace["x"] == [-1, 0, 1, 2, 3]
    assert trace["y"] == [0, 0.75, 0, 0.25, 0]
    assert trace["customdata"][3] == "2 steps old"
    assert histograms.ages({"y": [fresh]}) is None


def test_many_ages_are_grouped_and_a_long_tail_is_cut() -> None:
    figure = histograms.ages({"x": [counted("staleness", [[age, 1] for age in range(100)])]})
    assert figure is not None
    [trace] = figure["data"]
    assert trace["y"] == pytest.approx([0, *[0.05] * 20, 0])
    assert (trace["x"][1], trace["customdata"][1]) == (2, "0 to 4 steps old")
    figure = histograms.ages({"x": [counted("staleness", [[0, 500], [1, 499], [12345, 1]])]})
    assert figure is not None
    [trace] = figure["data"]
    assert trace["customdata"][-2] == "40 or more steps old"
    assert trace["y"][-2] == pytest.approx(0.001)
    assert figure["layout"]["xaxis"]["ticktext"][-1] == "…"


def test_plotly_knows_every_field() -> None:
    go = pytest.importorskip("plotly.graph_objects")
    runs = {"a": [timed(), timed(seed=1)], "b": [timed("b", stale=False, pace=3.0)]}
    figures, _ = time(runs, averages(runs))
    assert list(figures) == FIGURES
    for figure in figures.values():
        go.Figure(_resolved(figure))


def _resolved(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _resolved(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_resolved(v) for v in value]
    return "#123456" if isinstance(value, str) and value.startswith("@") else value


# ---- slow clients


def slow(rows: list[dict[str, Any]], higher: bool) -> str:
    return slow_clients(fake(*rows, higher_is_better=higher))


def paced(scores: list[float], reports: int = 5) -> list[dict[str, Any]]:
    return [client(str(i), x, delay=1.0 + i, reports=reports + i) for i, x in enumerate(scores)]


def test_the_slowest_are_named_with_their_reports() -> None:
    rows = [
        client(name, 0.5, delay=d, reports=n)
        for name, d, n in (("3", 2.0, 9), ("anna", 8.5, 1), ("c", 1.5, 7))
    ]
    rows += [client("d", 0.5, delay=None, reports=0), client("e", 0.5, delay=1.0, reports=8)]
    expected = (
        "The longest mean delays are those of anna (8.50, 1 report), client 3 (2, 9 reports) and c (1.50, 7 "
        "reports); a client on average: 3.25, 5 reports. 1 of 5 clients never reported."
    )
    assert slow(rows, True) == expected


def test_slow_clients_may_do_worse() -> None:
    falling = [0.9 - 0.01 * i for i in range(12)]
    assert "Slow clients score worse (rank correlation of delay and score −1.00, p <0.001)." in slow(
        paced(falling), True
    )
    assert "Slow clients score better" in slow(paced(falling), False)
    assert "Slow clients score better" in slow(paced(falling[::-1]), True)
    mixed = [0.5, 0.6] * 6
    assert (
        "Slow clients do not score clearly differently (rank correlation of delay and score +0.14, p = 0.6"
        in (slow(paced(mixed), True))
    )


def test_the_late_are_named_and_reports_are_the_measure() -> None:
    rows = [client(str(i), 0.5 + 0.01 * i, delay=1.0 + i % 3, reports=3 + i, late=20 - i) for i in range(12)]
    text = slow(rows, True)
    assert "Most often too late: client 0 (20), client 1 (19) and client 2 (18)." in text
    assert "Clients that report rarely score worse (rank correlation of reports and score +1.00" in text
    assert "Clients that report rarely score better" in slow(rows, False)


def test_what_cannot_be_said_is_not_said() -> None:
    assert "Slow clients" not in slow(paced([0.9, 0.5, 0.1]), True)  # too few
    assert "Slow clients" not in slow(paced([0.9] * 20), True)  # all alike
    assert slow([client(str(i), 0.1 * i, delay=1.0, reports=3) for i in range(20)], True) == ""
    assert slow([client("a", 0.5)], True) == ""  # an older run


def test_lines_of_many_runs_are_folded() -> None:
    few = {f"m{i}": [timed()] for i in range(2)}
    many = {f"m{i}": [timed()] for i in range(6)}
    assert "<details>" not in str(time(few, averages(few))[1])
    assert "<summary>Slow clients</summary>" in str(time(many, averages(many))[1])
