"""Who is worse beyond chance, and how many truly lose."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from partita.core.check import Refused
from partita.engine.significance import Changes, losers, mean_changes, right_wrong, worse
from partita.engine.significance.population import _at_least, _by_parts, _smallest
from support import each

HOCHBERG = [
    0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262, 0.5719,
    0.6528, 0.7590, 1,
]  # fmt: skip
"""The example of Benjamini & Hochberg 1995, section 4.1: four are rejected at 0.05."""


def continuous(p_worse: list[float]) -> Changes:
    p = np.array(p_worse)
    nothing = np.zeros(len(p))
    return Changes(np.ones(len(p)), nothing, nothing, nothing, p, p, 1 - p, p, 1 - p)


def discrete(won: list[int], lost: list[int], extra: int = 5) -> Changes:
    """Clients with so many samples won and lost, and some that both models get right."""
    sizes = np.array(won) + lost + extra
    flags = [
        np.repeat([[True, False], [False, True], [True, True]], counts, axis=0)
        for counts in zip(won, lost, [extra] * len(won))
    ]
    return right_wrong(*np.concatenate(flags).T, np.stack([np.cumsum(sizes) - sizes, sizes], axis=1))


def test_the_example_of_benjamini_and_hochberg() -> None:
    order = np.random.default_rng(0).permutation(15)
    named = worse(continuous([HOCHBERG[i] for i in order]), rate=0.05)
    assert sorted(order[named].tolist()) == [0, 1, 2, 3]


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=12), st.integers(1, 40)
)
def test_the_discrete_rule_is_that_of_doehler_durand_and_roquain(
    clients: list[tuple[int, int]], percent: int
) -> None:
    """Critical values τ_1 ≤ ... ≤ τ_m from their definition, and the step-up rule with them."""
    rate, m = percent / 100, len(clients)
    changes = discrete(*map(list, zip(*clients)))
    supports = [[stats.binom.sf(c - 1, b + a, 0.5) for c in range(a + b + 1)] for a, b in clients]

    def chance(i: int, t: float) -> float:
        return max((s for s in supports[i] if s <= t * (1 + 1e-9)), default=0.0)

    attainable = sorted({s for support in supports for s in support if s < 0.99})
    top = [t for t in attainable if sum(chance(i, t) / (1 - chance(i, t)) for i in range(m)) <= rate * m]
    critical = []
    for k in range(1, m + 1):
        cost = {t: sum(chance(i, t) / (1 - chance(i, max(top))) for i in range(m)) for t in top}
        critical.append(max((t for t in top if cost[t] <= rate * k * (1 + 1e-12)), default=-1.0))
    p = np.sort(changes.p_worse)
    fits = [k for k in range(m) if p[k] <= critical[k] * (1 + 1e-9)]
    wanted = changes.p_worse <= p[fits[-1]] * (1 + 1e-9) if fits else np.zeros(m, bool)
    assert worse(changes, rate).tolist() == wanted.tolist()


def test_clients_who_cannot_be_told_do_not_cost_power() -> None:
    """Forty clients that differ in one sample leave one alone whose 6 changes are all losses."""
    changes = discrete([0] + [1, 0] * 20, [6] + [0, 1] * 20)
    assert worse(changes).tolist() == [True] + [False] * 40
    plain = continuous(changes.p_worse.tolist())
    assert not worse(plain).any()


def test_nobody_is_named_where_there_is_nothing() -> None:
    assert not worse(discrete([0, 0, 3], [0, 0, 3])).any()
    assert not worse(right_wrong([], [], [(0, 0), (0, 0)])).any()
    assert not worse(mean_changes([0.0, 0, 0], [(0, 3)])).any()
    with pytest.raises(Refused) as error:
        worse(continuous([0.1]), rate=0.0)
    assert error.value.field == "rate"


# ---- how many truly lose


@each("m, count, t, level", list(itertools.product((1, 5, 40), (0, 1, 4, 30), (0.01, 0.3), (0.001, 0.025))))
def test_the_smallest_number_of_losers_by_trying_all(m: int, count: int, t: float, level: float) -> None:
    count = min(count, m)
    tried = [L for L in range(m + 1) if stats.binom.sf(count - L - 1, m - L, t) >= level]
    assert _smallest(m, count, t, level) == min(tried)


def test_a_discrete_test_counts_by_parts() -> None:
    below, p = np.array([0.0, 0.2, 0.5, 0.3]), np.array([0.2, 0.4, 1.0, 0.3])
    assert _by_parts(below, p, 0.3).tolist() == pytest.approx([1.0, 0.5, 0.0, 1.0])
    # over all outcomes of a client that loses nothing the part is t, on average
    for d, t in itertools.product((0, 1, 4), (0.01, 0.3, 0.5)):
        c = np.arange(d + 1)
        parts = _by_parts(stats.binom.sf(c, d, 0.5), stats.binom.sf(c - 1, d, 0.5), t)
        assert stats.binom.pmf(c, d, 0.5) @ parts == pytest.approx(t)


def test_clear_losers_and_winners_are_counted() -> None:
    told = losers(discrete([0] * 6 + [40] * 14, [40] * 6 + [0] * 14))
    assert (told.low, told.high, told.of) == (6, 6, 20)
    assert told.estimate == pytest.approx(6, abs=0.01)
    assert str(told) == "6 of 20 (95% interval 6 to 6)"


def test_the_same_function_never_loses() -> None:
    changes = discrete([0] * 10, [0] * 10)
    assert losers(changes)[:3] == (pytest.approx(0, abs=5), 0, 10)
    assert losers(changes, same=np.ones(10, bool))[:4] == (0, 0, 0, 10)
    some = discrete([0] * 4 + [0] * 6, [30] * 4 + [0] * 6)
    told = losers(some, same=np.arange(10) >= 4)
    assert (told.estimate, told.low, told.high, told.of) == (4, 4, 4, 10)


def test_clients_without_samples_do_not_count() -> None:
    assert losers(right_wrong([], [], [(0, 0)] * 3))[:4] == (0, 0, 0, 0)
    assert losers(mean_changes([1.0], [(0, 1), (0, 0)])).of == 1


def test_what_nobody_shows_alone_all_show_together() -> None:
    """Each of 200 clients has lost 3 and won 1: nobody stands out, yet many must lose."""
    changes = discrete([1] * 200, [3] * 200)
    assert not worse(changes, 0.1).any()
    told = losers(changes)
    assert told.low >= 40
    assert told.high == 200


def test_those_who_gain_do_not_hide_those_who_lose() -> None:
    """Winners have p_worse near 1; the bound that looks at p_worse ≤ ½ alone is not weakened by them."""
    p = np.array([0.02] * 20 + [1.0] * 180)
    assert _at_least(p, p, 0.025) >= 15


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=30))
def test_the_interval_holds_the_estimate(clients: list[tuple[int, int]]) -> None:
    changes = discrete(*map(list, zip(*clients)))
    told = losers(changes)
    assert 0 <= told.low <= told.estimate <= told.high <= told.of == len(clients)
    wider = losers(changes, level=0.99)
    assert wider.low <= told.low
    assert wider.high >= told.high
    mirrored = losers(discrete(*reversed([*map(list, zip(*clients))])))
    assert (mirrored.low, mirrored.high) == (told.of - told.high, told.of - told.low)
