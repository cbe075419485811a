"""Where the time of a round goes, as the bench counts it."""

from __future__ import annotations

import time

import pytest

from partita.bench.compare import Marks
from partita.callbacks import Event
from partita.phases import Phases


def test_phases_inside_others_count_once() -> None:
    phases = Phases("cpu")
    begin = time.perf_counter()
    with phases("steps"):
        time.sleep(0.01)
        with phases("states"):
            time.sleep(0.02)
    total = time.perf_counter() - begin
    found = phases.seconds
    assert found["steps"] >= 0.01
    assert found["states"] >= 0.02
    assert found["steps"] + found["states"] == pytest.approx(total, abs=0.005)


def test_a_phase_that_fails_ends() -> None:
    phases = Phases("cpu")
    with pytest.raises(ValueError, match="wrong"), phases("steps"), phases("states"):
        raise ValueError("wrong")
    with phases("files"):
        time.sleep(0.01)
    assert phases.seconds["files"] >= 0.01
    assert phases.seconds["steps"] < 0.01


def test_shares_are_of_the_whole_time_without_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 20.0, 30.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    marks = Marks("cpu")
    for i in range(3):
        spent = {"steps": 6.0 * i, "cohort": 1.0 * i, "evaluation": 2.0 * i, "files": 0.0}
        marks.round(Event("x", i + 1, 3, None, (), spent))
    assert marks.shares() == pytest.approx({"steps": 12 / 16, "cohort": 2 / 16, "other": 2 / 16})
