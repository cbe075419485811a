"""Which share of the clients is active over virtual time, against the runs that have the same times."""

from __future__ import annotations

from typing import Any

import pytest

import partita as pt
from partita.schedule import Activity, activity, asynchronous, delays, preferred, scaled, synchronous, uniform
from support import each

SLOW_UPLOADS = delays(download=uniform(0.5, 1.5), upload=scaled(uniform(0.5, 1.5), uniform(4, 6)))
MIXED = delays(download=uniform(0, 1), compute=0.2, upload=uniform(1, 9), dropout=0.2)
END, CLIENTS, COHORT, STEPS = 40.0, 8, 5, 3


@each(
    "schedule",
    [
        asynchronous(delays=MIXED),
        asynchronous(concurrency=3, buffer=2, delays=SLOW_UPLOADS),
        synchronous(delays=SLOW_UPLOADS),
        synchronous(delays=MIXED, deadline=4.0),
        synchronous(delays=MIXED, deadline=4.0, late="apply"),
        asynchronous(),
    ],
)
def test_a_run_is_as_active_as_its_delays_say(schedule: Any) -> None:
    data = pt.data.digits(clients=CLIENTS, test=0.4, seed=0)
    run = pt.federate(
        pt.models.mlp(64, 10),
        data,
        pt.fedavg(lr=0.1),
        rounds=12,
        cohort=COHORT,
        steps=STEPS,
        batch=4,
        seed=3,
        schedule=schedule,
        baselines=False,
        progress=False,
    )
    clock = run.summary()["clock"]
    (one,) = activity(schedule, CLIENTS, clock["time"], cohort=COHORT, steps=STEPS, seed=3, points=1)
    assert one.active == pytest.approx(clock["active"], rel=1e-9)


def test_with_everyone_in_flight_nobody_is_idle_and_uploads_take_most_of_the_time() -> None:
    for part in activity(asynchronous(delays=SLOW_UPLOADS), 30, 300.0, points=3):
        assert part.active == pytest.approx(1.0)
        assert part.uploading == pytest.approx(5 / 6, abs=0.02)  # an upload takes 5 downloads on average
    rounds = activity(synchronous(delays=SLOW_UPLOADS), 30, 300.0, cohort=6, points=3)
    assert all(0.12 < part.active < 0.2 for part in rounds)  # 6 of 30, until the slowest of them


def test_phases_follow_each_other() -> None:
    turn = delays(download=1.0, compute=0.5, upload=2.0)  # 1, then 2 × 0.5, then 2
    found = activity(synchronous(delays=turn), 4, 8.0, cohort=2, steps=2, points=8)
    halves = [(0.5, 0, 0), (0, 0.5, 0), (0, 0, 0.5), (0, 0, 0.5)]
    assert found == [Activity(float(i + 1), *halves[i % 4]) for i in range(8)]


@each(
    ("given", "start"),
    [
        ({"schedule": preferred()}, "schedule=Preferred("),
        ({"until": 0.0}, "until=0.0: expected a number above 0"),
        ({"cohort": 9}, "cohort=9: expected a whole number from 1 up to 8"),
        ({"points": 0}, "points=0: expected a whole number from 1"),
        ({"schedule": asynchronous(delays=delays())}, "schedule=Asynchronous("),
        ({"schedule": asynchronous(concurrency=9)}, "concurrency=9: expected a whole number from 1 up to 8"),
    ],
)
def test_refusals(given: dict[str, Any], start: str) -> None:
    with pytest.raises(ValueError) as error:
        activity(**{"schedule": asynchronous(), "clients": CLIENTS, "until": 5.0, **given})
    assert str(error.value).startswith(start)
