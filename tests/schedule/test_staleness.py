"""How much stale deltas count."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import partita as pt
from partita import schedule
from partita.engine.description import describe
from partita.schedule.staleness import NAMED, as_staleness
from support import each

ages = st.integers(0, 10_000)


def values(kind: Any, upto: int = 4) -> list[float]:
    return [as_staleness("staleness", kind)(tau) for tau in range(upto)]


def test_names() -> None:
    assert values(None) == values("constant") == [1.0] * 4
    assert values("sqrt") == pytest.approx([1 / math.sqrt(1 + t) for t in range(4)])
    assert values("inverse") == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])


def test_polynomial() -> None:
    assert values(schedule.polynomial(2)) == pytest.approx([1, 1 / 4, 1 / 9, 1 / 16])
    for a, name in ((0, "constant"), (0.5, "sqrt"), (1, "inverse")):
        assert values(schedule.polynomial(a)) == values(name)


def test_hinge() -> None:
    assert values(schedule.hinge(2, 1), 5) == pytest.approx([1, 1, 1 / 3, 1 / 5, 1 / 7])
    assert values(schedule.hinge(1, 0)) == values("inverse")


@given(st.floats(0.0, 5.0), st.floats(1e-3, 20.0), st.floats(0.0, 50.0), ages)
def test_a_fresh_delta_counts_in_full_and_none_grows_with_age(a: float, c: float, b: float, tau: int) -> None:
    for s in (*NAMED.values(), schedule.polynomial(a), schedule.hinge(c, b)):
        assert s(0) == 1.0
        assert 0.0 < s(tau + 1) <= s(tau) <= 1.0


@given(st.floats(1e-3, 20.0), st.integers(0, 100))
def test_the_hinge_has_no_jump(a: float, b: int) -> None:
    """Without the + 1 it would be 1/a one step beyond b, more than 1 for a < 1."""
    s = schedule.hinge(a, b)
    assert s(b) == 1.0
    assert s(b + 1) == pytest.approx(1 / (a + 1))


def test_a_function_of_ones_own() -> None:
    def own(tau: int) -> float:
        return 0.9**tau

    assert as_staleness("staleness", own) is own
    assert pt.fedasync(0.1, staleness=own).asynchronous == {"buffer": 1, "staleness": own}


def test_what_was_given_is_written_down() -> None:
    assert describe(pt.fedbuff(0.1))["staleness"] == "sqrt"
    assert describe(pt.fedbuff(0.1, staleness=None))["staleness"] is None
    written = describe(pt.fedasync(0.1, staleness=schedule.hinge(10, 4)))["staleness"]
    assert written == {"name": "hinge", "a": 10.0, "b": 4.0}


@each(
    ("make", "start"),
    [
        (lambda: schedule.polynomial(-1), "a=-1: expected a number from 0"),
        (lambda: schedule.hinge(0, 1), "a=0: expected a number above 0"),
        (lambda: schedule.hinge(1, -1), "b=-1: expected a number from 0"),
        (lambda: schedule.hinge(1), "b: hinge needs this argument"),
        (
            lambda: as_staleness("staleness", "sqrtt"),
            "staleness='sqrtt': expected one of 'constant', 'sqrt', ",
        ),
        (
            lambda: as_staleness("staleness", 0.5),
            "staleness=0.5: expected one of 'constant', 'sqrt', 'inverse', or",
        ),
        (
            lambda: as_staleness("staleness", schedule.polynomial),
            "staleness=<class ",
        ),
        (lambda: as_staleness("staleness", lambda: 1.0), "staleness=<function <lambda>"),
        (lambda: pt.fedbuff(0.1, staleness="square"), "staleness='square': expected one of 'constant'"),
        (lambda: pt.fedbuff(0.1, buffer=0), "buffer=0: expected a whole number from 1"),
        (lambda: pt.fedasync(0.1, 0.0), "server_lr=0.0: expected a number above 0"),
    ],
)
def test_refusals(make: Any, start: str) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value).startswith(start)
