"""Delays: the right distributions, drawn by (seed, purpose, event, client) and by nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import partita as pt
from partita.core import draws
from partita.schedule import (
    classes,
    constant,
    delays,
    exponential,
    gamma,
    lognormal,
    scaled,
    trace,
    uniform,
)
from support import each

N = 2000
DISTRIBUTIONS = {
    "uniform": (uniform(0.5, 2.0), stats.uniform(0.5, 1.5)),
    "exponential": (exponential(3.0), stats.expon(scale=3.0)),
    "lognormal": (lognormal(2.0, sigma=0.7), stats.lognorm(0.7, scale=2.0)),
    "gamma": (gamma(3.0, shape=2.5), stats.gamma(2.5, scale=1.2)),
    "gamma, exponential": (gamma(3.0, shape=1.0), stats.expon(scale=3.0)),
    "gamma, irregular": (gamma(1.0, shape=0.3), stats.gamma(0.3, scale=1 / 0.3)),
}
every = each(("delay", "expected"), DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)

WAYS: dict[str, Callable[[int], tuple[int, str, int, int]]] = {
    "clients": lambda i: (7, "upload", 3, i),
    "events": lambda i: (7, "upload", i, 3),
    "seeds": lambda i: (i, "upload", 3, 5),
    "purposes": lambda i: (7, f"purpose {i}", 3, 5),
    "all": lambda i: (i % 3, ("download", "upload", "compute")[i % 7 % 3], i // 40, i % 40),
}


# ---- distributions


@every
def test_quantiles(delay: Any, expected: Any) -> None:
    u = np.array([1e-9, 0.001, 0.05, 0.3, 0.5, 0.77, 0.95, 0.999, 1 - 1e-9])
    np.testing.assert_allclose([delay.quantile(x) for x in u], expected.ppf(u), rtol=1e-6)


@every
def test_moments(delay: Any, expected: Any) -> None:
    u = (np.arange(20_000) + 0.5) / 20_000
    values = np.array([delay.quantile(x) for x in u])
    assert values.mean() == pytest.approx(expected.mean(), rel=2e-3)
    assert np.median(values) == pytest.approx(expected.median(), rel=1e-3)


@each("way", WAYS)
@every
def test_draws(delay: Any, expected: Any, way: str) -> None:
    """2000 of them, however they differ, look like the distribution."""
    found = [delay.at(*WAYS[way](i)) for i in range(N)]
    assert stats.kstest(found, expected.cdf).pvalue > 1e-3
    assert abs(np.mean(found) - expected.mean()) < 4 * expected.std() / np.sqrt(N)


@every
def test_neighbours_are_independent(delay: Any, expected: Any) -> None:  # noqa: ARG001
    def found(purpose: str, event: int) -> np.ndarray:
        return np.array([delay.at(1, purpose, event, i) for i in range(N)])

    first = found("upload", 5)
    for other in (np.roll(first, 1), found("download", 5), found("upload", 6)):
        assert abs(stats.spearmanr(first, other).statistic) < 4 / np.sqrt(N)


def test_a_constant_is_one() -> None:
    assert {constant(2.5).at(*WAYS["all"](i)) for i in range(50)} == {2.5}
    assert uniform(3.0, 3.0).at(0, "upload", 0, 0) == 3.0
    assert exponential(0.0).at(0, "upload", 0, 0) == 0.0
    assert lognormal(2.0, sigma=0.0).at(0, "upload", 0, 0) == pytest.approx(2.0)


@each(
    "longest",
    [constant(1e12), uniform(0, 1e12), exponential(1e12), lognormal(1e12, 10), gamma(1e12, 0.01)],
)
def test_the_longest_delays_are_finite(longest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for u in (2.0**-53, 1 - 2.0**-53):  # the ends of what is drawn
        monkeypatch.setattr(draws, "number", lambda *_, u=u: u)
        assert 0 <= longest.at(0, "upload", 0, 0) < 1e60


# ---- what a draw depends on

DELAYS = [exponential(1.0), gamma(1.0), lognormal(1.0), uniform(0, 1), scaled(exponential(1), uniform(1, 9))]


@each("delay", DELAYS, ids=lambda d: type(d).__name__)
def test_a_draw_is_a_function_of_its_arguments(delay: Any) -> None:
    keys = [WAYS["all"](i) for i in range(60)]
    forth = {k: delay.at(*k) for k in keys}
    torch.manual_seed(5)
    np.random.seed(5)
    assert {k: delay.at(*k) for k in reversed(keys)} == forth
    here = (3, "upload", 4, 5)
    others = [(2, "upload", 4, 5), (3, "download", 4, 5), (3, "upload", 5, 5), (3, "upload", 4, 6)]
    assert len({delay.at(*k) for k in (here, *others)}) == 5


# ---- each client's own


def test_a_factor_is_the_same_in_all_events() -> None:
    delay = scaled(constant(2.0), uniform(4, 6))
    found = np.array([[delay.at(0, "upload", event, client) for event in range(5)] for client in range(N)])
    assert (found == found[:, :1]).all()
    assert stats.kstest(found[:, 0] / 2, stats.uniform(4, 2).cdf).pvalue > 1e-3
    assert delay.at(0, "download", 0, 0) != delay.at(0, "upload", 0, 0)  # another factor for another purpose


def test_what_is_scaled_is_drawn_anew() -> None:
    delay = scaled(exponential(1.0), [1.0, 10.0])
    found = np.array([[delay.at(0, "upload", event, client) for event in range(N)] for client in (0, 1)])
    for mine, mean in zip(found, (1.0, 10.0)):
        assert stats.kstest(mine, stats.expon(scale=mean).cdf).pvalue > 1e-3


def test_classes_have_their_shares() -> None:
    delay = classes([(0.7, 1.0), (0.2, 3.0), (0.1, 10.0)])
    found = [delay.at(0, "speed", 0, client) for client in range(5000)]
    shares = [found.count(factor) / 5000 for factor in (1.0, 3.0, 10.0)]
    assert shares == pytest.approx([0.7, 0.2, 0.1], abs=0.02)


def test_a_client_stays_in_its_class() -> None:
    """Whatever it is used for, and wherever it stands."""
    delay = classes([(0.5, 1.0), (0.5, 10.0)])
    for client in range(40):
        assert len({delay.at(0, "upload", event, client) for event in range(20)}) == 1
        assert delay.at(0, "upload factor", 0, client) == scaled(1.0, delay).at(0, "upload", 9, client)


def test_classes_without_members() -> None:
    assert {classes([(0.0, 5.0), (1.0, 2.0)]).at(0, "speed", 0, i) for i in range(200)} == {2.0}
    assert {classes([(1.0, 2.0), (0.0, 5.0)]).at(0, "speed", 0, i) for i in range(200)} == {2.0}


@each("numbers", [[1, 2.5], (1, 2.5), np.array([1, 2.5]), torch.tensor([1.0, 2.5])])
def test_numbers_are_the_clients_own(numbers: Any) -> None:
    made = delays(upload=numbers)
    made.check(2)
    assert [made.length(0, 9, client, steps=3) for client in (0, 1)] == [1.0, 2.5]


@each("number", [2, 2.0, np.float32(2), np.int64(2), torch.tensor(2.0)])
def test_a_number_is_everyones(number: Any) -> None:
    assert delays(download=number).length(0, 0, 0, 0) == 2.0


# ---- a whole turn


def test_a_turn_is_download_compute_upload() -> None:
    made = delays(download=exponential(1.0), upload=lognormal(2.0), compute=uniform(0.1, 0.2), speed=[1, 4])
    for client in (0, 1):
        none, one, ten = (made.length(5, 8, client, steps) for steps in (0, 1, 10))
        assert none == exponential(1.0).at(5, "download", 8, client) + lognormal(2.0).at(
            5, "upload", 8, client
        )
        assert ten - none == pytest.approx(10 * (one - none))
        assert one - none == pytest.approx((1, 4)[client] * uniform(0.1, 0.2).at(5, "compute", 8, client))


def test_slow_classes_compute_slowly() -> None:
    made = delays(compute=0.5, speed=classes([(0.5, 1), (0.5, 8)]), upload=1.0)
    found = {client: made.length(0, 0, client, steps=10) for client in range(50)}
    assert set(found.values()) == {1.0 + 5.0, 1.0 + 40.0}
    assert found == {client: made.length(0, 77, client, steps=10) for client in range(50)}


def test_without_compute_steps_take_no_time() -> None:
    made = delays(upload=1.0)
    assert not made.computes
    assert made.length(0, 0, 0, steps=1000) == 1.0


def test_dropout() -> None:
    made = delays(dropout=0.2)
    lost = [made.lost(0, event, client) for event in range(50) for client in range(100)]
    assert np.mean(lost) == pytest.approx(0.2, abs=4 * np.sqrt(0.16 / 5000))
    assert made.lost(0, 3, 4) == made.lost(0, 3, 4)
    assert not any(delays().lost(0, event, 0) for event in range(1000))


def test_dropout_of_each_client() -> None:
    made = delays(dropout=[0.0, 0.5])
    found = [[made.lost(0, event, client) for event in range(1000)] for client in (0, 1)]
    assert not any(found[0])
    assert np.mean(found[1]) == pytest.approx(0.5, abs=0.07)


# ---- recorded delays


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "delays.csv"
        path.write_text(text, encoding="utf-8")
        return path

    return write


Write = Callable[[str], Path]


@each(
    "text",
    ["1\n2.5\n4\n", "delay\n1\n2.5\n4\n", "1.0\r\n2.5\r\n4e0", "\n 1 \n\n2.5\n   \n4\n\n", "\ufeff1\n2.5\n4"],
    ids=["plain", "heading", "windows", "blank lines", "spreadsheet"],
)
def test_a_plain_file(text: str, write: Write) -> None:
    delay = trace(write(text))
    found = [delay.at(0, "upload", event, client) for event in range(30) for client in range(100)]
    assert {x: found.count(x) / 3000 for x in set(found)} == pytest.approx(
        dict.fromkeys((1, 2.5, 4), 1 / 3), abs=0.04
    )


@each("heading", ["", "device,delay\n", "\nname, seconds\n"])
def test_a_file_with_devices(heading: str, write: Write) -> None:
    """A client is one device for ever, whatever it waits for."""
    delay = trace(write(heading + "phone,9\nphone, 7\nlaptop,1\n watch ,30\nwatch,40\nwatch,50\n"))
    devices = [{9.0, 7.0}, {1.0}, {30.0, 40.0, 50.0}]
    of = []
    for client in range(600):
        found = {delay.at(0, p, event, client) for p in ("download", "upload") for event in range(40)}
        assert found in devices
        of.append(devices.index(found))
    assert [of.count(i) / 600 for i in range(3)] == pytest.approx([1 / 3] * 3, abs=0.07)


@each(
    ("text", "allowed"),
    [
        ("", "a file with at least one number"),
        ("delay\n", "a file with at least one number"),
        ("1\ntwo\n3\n", r"delays that are numbers from 0 \(line 2: 'two'\)"),
        ("delay\n\n1\n-2\n", r"\(line 4: '-2'\)"),
        ("a,1\nb,nan\n", r"\(line 2: 'nan'\)"),
        ("a,1\nb,inf\n", r"\(line 2: 'inf'\)"),
        ("a,1\nb,\n", r"\(line 2: ''\)"),
        ("1,2,3\n", r"one delay, or device,delay, in every line \(line 1\)"),
        ("a,1\n2\n", r"one delay, or device,delay, in every line \(line 2\)"),
        ("1\na,2\n", r"one delay, or device,delay, in every line \(line 2\)"),
        ("1;2\n3;4\n", r"\(line 2: '3;4'\)"),
    ],
)
def test_a_wrong_file(text: str, allowed: str, write: Write) -> None:
    path = write(text)
    with pytest.raises(ValueError, match=rf"^delay path='{path}': expected .*{allowed}"):
        trace(path)


def test_no_file(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "no.csv", "No such file"), (tmp_path, "Is a directory"), ("a\0b", "null")):
        with pytest.raises(ValueError, match=rf"^delay path=.*: expected a readable file \(.*{why}"):
            trace(path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="a readable file"):
        trace(tmp_path / "binary")


def test_a_file_that_has_changed_is_another(write: Write) -> None:
    before = trace(write("1\n"))
    again = trace(write("1\n"))
    other = trace(write("2\n"))
    assert before == again != other
    assert [d.at(0, "upload", 0, 0) for d in (before, other)] == [1.0, 2.0]  # each what it was made of


def run(path: Path, out: Path, **options: Any) -> pt.Run:
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    data = pt.data.from_arrays(x, (x[:, 0] > 0).long(), np.arange(24) % 4)
    schedule = pt.schedule.asynchronous(2, delays=delays(upload=trace(path)))
    given: dict[str, Any] = {"rounds": 3, "schedule": schedule, "baselines": False, "report": False}
    return pt.federate(pt.models.mlp(4, 2), data, pt.fedavg(lr=0.1), out=out, **given, **options)


def test_a_run_is_not_resumed_with_another_file(write: Write, tmp_path: Path) -> None:
    first = run(write("1\n2\n3\n"), tmp_path / "run")
    upload = first.config["schedule"]["delays"]["upload"]
    assert upload == {"name": "trace", "path": str(tmp_path / "delays.csv"), "digest": upload["digest"]}
    again = run(write("1\n2\n3\n"), tmp_path / "run", resume=True)
    assert again.summary()["clock"] == first.summary()["clock"]
    with pytest.raises(ValueError, match=r"its schedule \(delays\.upload\.digest: .*give the same"):
        run(write("1\n2\n4\n"), tmp_path / "run", resume=True)


# ---- wrong input

DELAY = "a number from 0, one for each client, or a delay such as partita.schedule.exponential"
PAIRS = r"pairs \(share, factor\) such as .* whose shares sum to 1"
NUMBER = "a number from 0 up to"


@each(
    ("make", "says", "allowed"),
    [
        (lambda: constant(-1), "delay value=-1", NUMBER),
        (lambda: constant(1e13), "delay value=1", NUMBER),
        (lambda: uniform(2, 1), "delay high=1.0", "a number from low=2"),
        (lambda: uniform("a", 1), "delay low='a'", NUMBER),
        (lambda: exponential(float("nan")), "delay mean=nan", NUMBER),
        (lambda: exponential(True), "delay mean=True", NUMBER),
        (lambda: lognormal(1, sigma=-0.1), "delay sigma=-0.1", "a number from 0 up to 10"),
        (lambda: lognormal(1, sigma=11), "delay sigma=11", "a number from 0 up to 10"),
        (lambda: gamma(1, shape=0), "delay shape=0", "a number from 0.01 up to"),
        (lambda: trace(3), "delay path=3", r"str \| Path"),
        (lambda: classes([]), r"delay shares=\[\]", PAIRS),
        (lambda: classes(0.5), "delay shares=0.5", PAIRS),
        (lambda: classes([(0.5, 1), (0.4, 2)]), r"delay shares=\[", PAIRS),
        (lambda: classes([(1.5, 1), (-0.5, 2)]), r"delay shares=\[", PAIRS),
        (lambda: classes([(1, -1)]), r"delay shares=\[", PAIRS),
        (lambda: classes([(1, "slow")]), r"delay shares=\[", PAIRS),
        (lambda: classes([(0.5, 1, 2), (0.5, 1, 2)]), r"delay shares=\[", PAIRS),
        (lambda: classes([1.0, 2.0]), r"delay shares=\[", PAIRS),
        (lambda: scaled("x", 1), "delay of='x'", DELAY),
        (lambda: scaled(1, None), "delay factor=None", DELAY),
        (lambda: scaled(1, -2), "delay factor=-2", NUMBER),
        (lambda: delays(download=-1), "delays download=-1", NUMBER),
        (lambda: delays(upload="1"), "delays upload='1'", DELAY),
        (lambda: delays(upload=exponential), "delays upload=<class ", DELAY),
        (lambda: delays(upload=delays()), r"delays upload=Delays\(", DELAY),
        (lambda: delays(upload=pt.optim.constant(1)), r"delays upload=pt.optim.constant\(lr", DELAY),
        (lambda: delays(compute=None), "delays compute=None", DELAY),
        (lambda: delays(compute=[1, "x"]), "delays compute='x'", NUMBER),
        (lambda: delays(speed=True), "delays speed=True", DELAY),
        (lambda: delays(speed=float("inf")), "delays speed=inf", NUMBER),
        (lambda: delays(dropout=1), "delays dropout=1", "a number from 0 and below 1"),
        (lambda: delays(dropout=-0.1), "delays dropout=-0.1", "a number from 0 and below 1"),
        (lambda: delays(dropout=[0.1, 1.0]), r"delays dropout=\[0.1, 1.0\]", "a number from 0 and below 1"),
        (lambda: delays(dropout="often"), "delays dropout='often'", "one for each client"),
        (lambda: delays(upload=[1, 2]).check(3), r"delays upload=\(1.0, 2.0\)", "each of the 3 clients"),
        (lambda: delays(compute=1.0, speed=[1]).check(3), r"delays speed=\(1.0,\)", "each of the 3 clients"),
        (lambda: delays(dropout=[0.1]).check(3), r"delays dropout=\(0.1,\)", "each of the 3 clients"),
        (
            lambda: delays(upload=scaled(1.0, [1, 2])).check(3),
            r"delays upload factor=\(1.0, 2.0\)",
            "each of the 3 clients",
        ),
    ],
)
def test_what_is_refused(make: Callable[[], object], says: str, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"^{says}.*: expected .*{allowed}"):
        make()


def test_a_typo_gets_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"^delays uplod=1: .* \(did you mean 'upload'\?\)"):
        delays(uplod=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"^bufer=1: .* \(did you mean 'buffer'\?\)"):
        pt.schedule.asynchronous(bufer=1)  # type: ignore[call-arg]
