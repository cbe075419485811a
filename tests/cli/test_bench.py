"""Where the time of a round goes, as the bench counts it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from partita.cli.bench.measure import RoundTimes
from partita.engine.callbacks import Event
from partita.engine.counters import Timer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what the clock shows, one look after the other."""

    def show(*times: float) -> None:
        now = iter(times)
        monkeypatch.setattr(time, "perf_counter", lambda: next(now))

    return show


def spent(phases: Timer) -> dict[str, float]:
    return {name: seconds for name, seconds in phases.seconds.items() if seconds}


def test_phases_inside_others_count_once(clock: Callable[..., None]) -> None:
    clock(10.0, 11.0, 13.0, 13.5, 17.5, 18.0)
    phases = Timer("cpu")
    with phases("steps"):
        with phases("states"):
            pass
        with phases("states"):
            pass
    assert spent(phases) == {"steps": 2.0, "states": 6.0}


def test_a_phase_that_fails_ends(clock: Callable[..., None]) -> None:
    clock(0.0, 1.0, 3.0, 7.0, 10.0, 12.0)
    phases = Timer("cpu")
    with pytest.raises(ValueError, match="wrong"), phases("steps"), phases("states"):
        raise ValueError("wrong")
    with phases("files"):
        pass
    assert spent(phases) == {"steps": 5.0, "states": 2.0, "files": 2.0}


def test_shares_are_of_the_whole_time_without_evaluations(clock: Callable[..., None]) -> None:
    clock(10.0, 20.0, 30.0)
    times = RoundTimes("cpu")
    for i in range(3):
        spent = {"steps": 6.0 * i, "cohort": 1.0 * i, "evaluation": 2.0 * i, "files": 0.0}
        times.round(Event("x", i + 1, 3, None, (), spent))
    assert times.shares() == pytest.approx({"steps": 12 / 16, "cohort": 2 / 16, "other": 2 / 16})
