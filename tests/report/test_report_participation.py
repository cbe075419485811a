"""Who took part: shown where clients differ, with what they were chosen by."""

from __future__ import annotations

import re
from typing import Any

import pytest
from report_rows import client, fake, record

from partita.engine.record import Record
from partita.report.participation import participation
from partita.report.rows import averages


def ran(reports: list[float], schedule: Any = None) -> Record:
    made = fake(*(client(f"c{i}", 0.5, reports=n) for i, n in enumerate(reports)), rounds=9)
    return record(made.clients, config={"schedule": schedule} if schedule else {}, facts=made.facts)


def told(runs: dict[str, list[Record]]) -> str:
    markup = participation(runs, averages(runs))[1]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", str(markup or ""))).strip()


def test_all_equally_often_is_not_told() -> None:
    runs = {"a": [ran([3, 3, 3])]}
    assert participation(runs, averages(runs)) == ({}, None)


def test_figures_of_one_run() -> None:
    schedule = {"name": "synchronous", "order": "random", "choose": {"name": "by_loss", "power": 1.0}}
    runs = {"a": [ran([0, 0, 1, 2, 2, 3, 3, 4, 5, 20], schedule)]}
    text = told(runs)
    assert "by_loss(power=1.0) 0 2.5 20 2 50 %" in text
    figure = participation(runs, averages(runs))[0]["participation"]
    (outline,) = figure["data"]
    assert sum(outline["y"]) == pytest.approx(1.0)
    assert outline["y"][0] == outline["y"][-1] == 0.0
    shares = dict(zip(outline["x"], outline["y"]))
    assert shares[0.0] == pytest.approx(0.2)
    assert shares[20.0] == pytest.approx(0.1)


def test_bins_hold_every_client_of_long_runs() -> None:
    runs = {"a": [ran([0, 7, 500, 999, 1234])]}
    (outline,) = participation(runs, averages(runs))[0]["participation"]["data"]
    assert sum(outline["y"]) == pytest.approx(1.0)
    assert len(outline["x"]) < 50


def test_several_runs_and_stages() -> None:
    windows = {"name": "windows", "given": "<b>.csv", "period": None, "digest": "12"}
    stages = [{"name": "synchronous", "order": "turns"}, {"order": "random", "available": windows}]
    runs = {"a": [ran([1, 2], stages)], "<i>b": [ran([2, 2])]}
    text = told(runs)
    assert "turns, then random, while available by windows(given=&lt;b&gt;.csv)" in text
    assert "&lt;i&gt;b" in text
    assert len(participation(runs, averages(runs))[0]["participation"]["data"]) == 2
