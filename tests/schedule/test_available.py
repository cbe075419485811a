"""Windows in which clients are available, and that nobody is chosen outside of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import partita as pt
from partita.core import draws
from partita.core.types import ServerState
from partita.schedule import StageSpec
from partita.schedule.known import Answers, Facts
from support import each

S = pt.schedule
SEED = 3


def server(version: int) -> ServerState:
    return ServerState({"w": torch.tensor(0.0)}, {}, {}, version)


def begin(schedule: Any, clients: int, cohort: int, seed: int = SEED) -> Any:
    schedule.check(clients, cohort)
    return schedule.begin(StageSpec(clients, cohort, 0, 10**6, seed, 0.0, lambda _: 1))


# ---- each window by itself, against the plain definition


def is_day(client: int, time: float, period: float, share: float, phase: float | None) -> bool:
    start = draws.number(SEED, "phase", client) * period if phase is None else phase
    return ((time - start) % period) < share * period


@each("phase", [None, 2.5])
def test_day_and_night(phase: float | None) -> None:
    found = S.day_night(period=10.0, share=0.3, phase=phase)
    clients = np.arange(50)
    for time in np.random.default_rng(0).random(40) * 100:
        opens = found.opens(SEED, clients, time)
        there = [is_day(c, time, 10.0, 0.3, phase) for c in range(50)]
        assert ((opens == time) == there).all()
        assert (opens - time <= 7.0 + 1e-9).all()
        assert (found.opens(SEED, clients, time + 1e-6)[opens > time] == opens[opens > time]).all()


def test_slots_by_chance() -> None:
    found = S.intermittent(share=0.2, slot=2.0)
    clients = np.arange(4000)
    there = found.opens(SEED, clients, 7.0) == 7.0
    assert there.mean() == pytest.approx(0.2, abs=0.02)
    same = [draws.number(SEED, "slot", 3, c) < 0.2 for c in range(50)]
    assert (there[:50] == same).all()
    assert (found.opens(SEED, clients, 7.0)[~there] == 8.0).all()  # the next slot may be another
    never = S.intermittent(share=[0.0] * 4000).opens(SEED, clients, 7.0)
    assert (never == np.inf).all()


def test_windows_that_come_again() -> None:
    given = [[(2, 5), (8, 9)], [], [(22, 30)], [(0, 12), (12, 24)], [(3, 4), (3.5, 6)]]
    found = S.windows(given, period=24.0)
    for day in (0, 1, 5):
        for hour in np.arange(0.0, 24.0, 0.5):
            time = 24.0 * day + hour
            opens = found.opens(SEED, np.arange(5), time)
            expected = [
                2 <= hour < 5 or 8 <= hour < 9,
                False,
                hour >= 22 or hour < 6,  # over midnight, and so also on the first morning
                True,
                3 <= hour < 6,
            ]
            assert ((opens <= time) == expected).all()
            assert opens[1] == np.inf
            if hour == 9:
                assert opens[0] == time + 17


def test_windows_that_end() -> None:
    found = S.windows([[(2, 5)], [(1, 3), (6, 7)]])
    assert found.opens(SEED, np.arange(2), 0.0).tolist() == [2.0, 1.0]
    assert found.opens(SEED, np.arange(2), 3.0).tolist() == [3.0, 6.0]
    assert found.opens(SEED, np.arange(2), 7.0).tolist() == [np.inf, np.inf]


def test_windows_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "windows.csv"
    path.write_text("device,from,until\nphone,0,2\nlaptop,3,5\nphone,6,8\n")
    found, clients = S.windows(path), np.arange(400)
    phones = np.array([draws.number(SEED, "device", c) < 0.5 for c in range(400)])
    assert ((found.opens(SEED, clients, 1.0) == 1.0) == phones).all()
    assert (found.opens(SEED, clients, 5.5)[phones] == 6.0).all()
    assert (found.opens(SEED, clients, 5.5)[~phones] == np.inf).all()
    assert found.digest != S.windows(_other(path)).digest


def _other(path: Path) -> Path:
    other = path.with_name("other.csv")
    other.write_text("phone,0,2\n")
    return other


# ---- what always holds


EVERY = {
    "day_night": S.day_night(period=5.0, share=0.3),
    "shares": S.day_night(period=5.0, share=[0.0, 0.1, 0.5, 1.0, 0.3, 0.2], phase=[0, 1, 2, 3, 4, 5]),
    "intermittent": S.intermittent(share=0.3, slot=1.3),
    "windows": S.windows([[(1, 2)], [(0.5, 3)], [(4, 6)], [], [(2, 2.5), (3, 4)], [(0, 0.1)]], period=6.0),
}


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(EVERY)),
    asynchronous=st.booleans(),
    cohort=st.integers(1, 6),
    length=st.sampled_from([0.7, S.exponential(1.0), S.uniform(0, 2)]),
    seed=st.integers(0, 5),
)
def test_nobody_leaves_outside_of_its_windows(
    name: str, asynchronous: bool, cohort: int, length: Any, seed: int
) -> None:
    available, kind = EVERY[name], S.asynchronous if asynchronous else S.synchronous
    running = begin(kind(available=available, delays=S.delays(upload=length)), 6, cohort, seed)
    left: list[tuple[float, int]] = []
    send = running.clock.send

    def sends(server: ServerState, chosen: Any, informed: Any = ()) -> Any:
        flights = send(server, chosen, informed)
        left.extend((f.begin, f.client) for f in flights)
        return flights

    running.clock.send = sends
    for version in range(25):
        before = running.time
        cohort_now = running.next(server(version))
        assert running.time >= before
        assert cohort_now.clients  # time went on until somebody was there
    for time, client in left:
        assert available.opens(seed, np.array([client]), time)[0] <= time
    never = {"shares": {0}, "windows": {3}}.get(name, set())
    assert not never & {client for _, client in left}


def test_time_goes_on_to_the_next_window() -> None:
    available = S.windows([[(5, 6)], [(9, 20)]])
    running = begin(S.synchronous(available=available), 2, 2)
    assert [(running.next(server(v)).clients, running.time) for v in range(3)] == [
        ((0,), 6.0),
        ((1,), 10.0),
        ((1,), 11.0),
    ]


def test_who_becomes_available_joins_those_in_flight() -> None:
    """Client 1 comes at 2 while client 0 is at work: it does not wait for the upload at 10."""
    available = S.windows([[(0, 1)], [(2, 30)]])
    delays = S.delays(upload=[10.0, 3.0])
    running = begin(S.asynchronous(available=available, delays=delays), 2, 2)
    assert [(running.next(server(v)).clients, running.time) for v in range(4)] == [
        ((1,), 5.0),
        ((1,), 8.0),
        ((0,), 10.0),
        ((1,), 11.0),
    ]


@each("kind", [S.synchronous, S.asynchronous])
def test_a_stage_ends_when_nobody_will_come(kind: Any) -> None:
    running = begin(kind(available=S.windows([[(0, 2)], [(1, 1.5)]])), 2, 2)
    version = 0
    while not running.done(server(version)):
        running.next(server(version))
        version += 1
    assert 2 <= version <= 5
    assert running.time < 5


@each("unfinished, lost", [("finish", ()), ("lost", (0,))])
def test_turns_that_outlast_the_window(unfinished: str, lost: tuple[int, ...]) -> None:
    available = S.windows([[(0, 2)], [(0, 9)]], unfinished=unfinished)
    running = begin(S.synchronous(available=available, delays=S.delays(upload=3.0)), 2, 2)
    cohort = running.next(server(0))
    assert cohort.lost == lost
    assert set(cohort.clients) | set(cohort.lost) == {0, 1}


def asking(available: Any, download: float, compute: float, cohort: int = 2, clients: int = 6) -> Any:
    """A synchronous server that asks clients for their loss: the larger the number, the larger the loss."""
    delays = S.delays(download=download, compute=compute, upload=0.1)
    schedule = S.synchronous(choose=S.power_of_choice(d=4), available=available, delays=delays)
    nothing = np.zeros(clients, dtype=np.int64)
    facts = Facts(nothing + 1, nothing * np.nan, nothing, nothing)
    spec = StageSpec(clients, cohort, 0, 10**6, SEED, 0.0, lambda _: 1, facts=lambda: facts)
    return schedule.begin(spec._replace(ask=lambda asked, _: Answers(asked.astype(float), asked * 0 + 1)))


def test_nobody_is_sent_that_left_before_all_had_answered() -> None:
    """The answers of round 0 come at 3.02, when all are away; in the next window they need no download."""
    running = asking(S.windows([[(0, 2), (8, 9.9)]] * 6, 10.0, "lost"), download=3.0, compute=0.02)
    cohort = running.next(server(0))
    assert len(cohort.clients) == 2
    assert cohort.lost == ()
    assert running.time == pytest.approx(8.0 + 0.02 + 0.02 + 0.1)


def test_who_stays_is_chosen_before_who_leaves() -> None:
    away, there = [(0.0, 1.0)], [(0.0, 50.0)]
    running = asking(S.windows([there, there, away, away]), download=2.0, compute=0.1, clients=4)
    assert sorted(running.next(server(0)).clients) == [0, 1]
    assert running.time == pytest.approx(2.0 + 0.1 + 0.1 + 0.1)


def test_a_round_in_which_nobody_stays_for_an_answer_ends() -> None:
    running = asking(S.windows([[(0, 2)]] * 6, 10.0), download=0.0, compute=3.0)
    assert running.next(server(0)).clients == ()


def test_windows_that_touch_are_one() -> None:
    """Until when a turn may last: over midnight, over equal slots, and never where all is open."""
    zero = np.array([0])
    together = S.windows([[(3.5, 9.7), (22, 46.2), (11.2, 31.7)]], 29.0, "lost")
    assert together.closes(SEED, zero, 5.0)[0] == np.inf
    assert S.windows([[(0, 6), (20, 24)]], 24.0, "lost").closes(SEED, zero, 22.0)[0] == 30.0
    assert S.windows([[(0, 24)]], 24.0, "lost").closes(SEED, zero, 5.0)[0] == np.inf
    assert S.day_night(10.0, 0.5, 0.0, "lost").closes(SEED, zero, 12.0)[0] == 15.0
    found = S.intermittent(0.7, 1.0, "lost")
    for client in range(30):
        clients = np.array([client])
        if found.opens(SEED, clients, 0.5)[0] > 0.5:
            continue
        end = found.closes(SEED, clients, 0.5)[0]
        there = [draws.number(SEED, "slot", slot, client) < 0.7 for slot in range(int(end) + 1)]
        assert all(there[:-1])
        assert not there[-1]


def test_everyone_who_is_there_is_equally_likely() -> None:
    """Also where some are tried before all are asked: a third of 300 clients is there."""
    clients, hits = 300, np.zeros(300)
    phase = [0.0 if c % 3 == 0 else 5.0 for c in range(clients)]
    available = S.day_night(10.0, 0.5, phase)
    spec = StageSpec(clients, 4, 0, 10**6, SEED, 1.0, lambda _: 1)
    clock = S.Clock.of(spec, None, available)
    for draw in range(3000):
        chosen = clock.idle(4, draw)
        assert len(set(chosen)) == 4
        hits[chosen] += 1
    assert not hits[np.array(phase) > 0].any()
    there = hits[::3]
    assert ((there - 120) ** 2 / 120).sum() < 160  # χ² of 99 degrees of freedom: 148 at p = 0.001


def test_activity_knows_windows() -> None:
    half = S.day_night(period=10.0, share=0.5, phase=0.0)
    found = S.activity(S.asynchronous(available=half), 6, 20.0, points=4)
    assert [part.active for part in found] == pytest.approx([1.0, 0.0, 1.0, 0.0])


@each(
    "build, field",
    [
        (lambda: S.windows([[(3, 2)]]), "windows given"),
        (lambda: S.windows([[(3, 30)]], period=24.0), "windows given"),
        (lambda: S.windows([[(25, 26)]], period=24.0), "windows given"),
        (lambda: S.windows([(3, 4)]), "windows given"),
        (lambda: S.windows("nowhere.csv"), "windows given"),
        (lambda: S.windows([[], []]).check(3, "available"), "available given"),
        (lambda: S.day_night(share=[0.5]).check(3, "available"), "available share"),
        (lambda: S.day_night(phase=[0.5]).check(3, "available"), "available phase"),
        (lambda: S.day_night(share=0.0), "day_night share"),
        (lambda: S.intermittent(share=1.5), "intermittent share"),
        (lambda: S.synchronous(available=0.5), "available"),
        (lambda: S.asynchronous(available=S.day_night), "available"),
    ],
)
def test_what_is_refused(build: Any, field: str) -> None:
    with pytest.raises(pt.Refused) as error:
        build()
    assert error.value.field == field


def test_numbers_for_many_at_once() -> None:
    found = draws.numbers(7, "phase", 5, np.arange(20))
    assert found.tolist() == [draws.number(7, "phase", 5, c) for c in range(20)]
