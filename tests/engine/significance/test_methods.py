"""Several methods on the same clients."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from partita.core.check import Refused
from partita.engine.significance import rank_methods
from partita.engine.significance.methods import _groups, holm
from support import each

NEMENYI = {2: 1.960, 3: 2.343, 4: 2.569, 5: 2.728, 6: 2.850, 7: 2.949, 8: 3.031, 9: 3.102, 10: 3.164}
"""Critical values at 0.05 of table 5 (a) in Demšar 2006."""


@each("k", NEMENYI)
def test_critical_differences_of_demsar(k: int) -> None:
    scores = np.random.default_rng(k).normal(size=(14, k))
    wanted = NEMENYI[k] * np.sqrt(k * (k + 1) / (6 * 14))
    assert rank_methods(scores).critical_difference == pytest.approx(wanted, abs=1.5e-3)


@each("clients, k, digits", [(10, 3, 6), (25, 5, 6), (25, 4, 0)])
def test_friedman_is_that_of_scipy(clients: int, k: int, digits: int) -> None:
    """SciPy's χ², corrected for ties, in the form of Iman & Davenport; with ties where digits are few."""
    scores = np.round(np.random.default_rng(0).normal(size=(clients, k)) + 0.3 * np.arange(k), digits)
    told = rank_methods(scores)
    χ2 = stats.friedmanchisquare(*scores.T).statistic
    f = (clients - 1) * χ2 / (clients * (k - 1) - χ2)
    assert told.p == pytest.approx(stats.f.sf(f, k - 1, (k - 1) * (clients - 1)))
    assert told.ranks.sum() == pytest.approx(k * (k + 1) / 2)
    assert rank_methods(-scores, higher_is_better=False).ranks.tolist() == told.ranks.tolist()


def test_holm_of_holm() -> None:
    assert holm([0.01, 0.04, 0.03]).tolist() == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]).tolist() == pytest.approx([1.0, 1.0])


def test_two_methods_are_one_paired_test() -> None:
    """Student's sleep data (1908): hours gained with two drugs; p = 0.00283, interval 0.70 to 2.46."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    told = rank_methods(np.stack([first, second], axis=1))
    (pair,) = told.pairs
    assert (pair.first, pair.second, told.best) == (1, 0, 1)
    assert pair.difference == pytest.approx(1.58)
    assert pair.low <= 0.7001
    assert pair.high >= 2.4599
    assert 0.0028 <= pair.p_mean < 0.05
    wanted = stats.wilcoxon(np.subtract(second, first), zero_method="pratt", method="asymptotic").pvalue
    assert pair.p_rank == pytest.approx(wanted)


def test_groups_and_the_best_against_the_rest() -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(40, 1)) + 0.1 * rng.normal(size=(40, 4)) + np.array([0.0, 1.0, 0.01, 1.01])
    told = rank_methods(scores)
    assert sorted(map(sorted, told.groups)) == [[0, 2], [1, 3]]
    assert len(told.pairs) == 6
    rest = told.against_best()
    assert [pair.first for pair in rest] == [told.best] * 3
    assert sorted(pair.second for pair in rest) == sorted({0, 1, 2, 3} - {told.best})
    clear = [pair for pair in rest if pair.second in (0, 2)]
    assert all(pair.p_mean < 0.001 and pair.p_rank < 0.001 and pair.low > 0.8 for pair in clear)
    # an interval without zero and a small p are the same statement
    assert all((pair.low > 0) == (pair.p_mean < 0.05) for pair in told.pairs)


def test_simultaneous_intervals_are_wider_than_single_ones() -> None:
    scores = np.random.default_rng(1).normal(size=(50, 6))
    pair = rank_methods(scores).pairs[0]
    single = stats.ttest_rel(scores[:, pair.first], scores[:, pair.second]).confidence_interval()
    assert pair.high - pair.low > 1.3 * (single.high - single.low)


def test_groups_are_the_longest_stretches() -> None:
    apart = {frozenset(pair) for pair in ((0, 2), (0, 3))}
    assert _groups([0, 1, 2, 3], apart) == [[0, 1], [1, 2, 3]]
    assert _groups([0, 1], {frozenset((0, 1))}) == []


def test_equal_methods_and_unknown_scores() -> None:
    same = rank_methods(np.ones((5, 3)))
    assert same.p == 1.0
    assert same.groups == [[0, 1, 2]]
    assert {pair[2:] for pair in same.pairs} == {(0.0, 0.0, 0.0, 1.0, 1.0)}
    scores = np.array([[1.0, 2.0], [2.0, 3.0], [np.nan, 0.0], [0.0, 1.5]])
    assert rank_methods(scores).clients == 3
    assert rank_methods(scores).ranks.tolist() == [2.0, 1.0]


@each("scores", [[[1.0, 2.0]], [[1.0], [2.0]], [1.0, 2.0], [[1.0, np.nan], [2.0, 3.0]]])
def test_too_few_are_refused(scores: list[object]) -> None:
    with pytest.raises(Refused) as error:
        rank_methods(scores)  # type: ignore[arg-type]
    assert error.value.field == "scores"


def test_weighted_means_are_those_of_their_samples_and_ranks_count_clients() -> None:
    draw = np.random.default_rng(3)
    scores, weights = draw.normal(0.8, 0.05, (30, 3)), draw.integers(1, 50, 30)
    plain, weighted = rank_methods(scores), rank_methods(scores, weights=weights)
    assert weighted.ranks.tolist() == plain.ranks.tolist()
    means = weights @ scores / weights.sum()
    assert weighted.best == int(means.argmax())
    for pair in weighted.pairs:
        assert pair.difference == pytest.approx(means[pair.first] - means[pair.second])
        assert pair.low < pair.difference < pair.high
    alike = rank_methods(scores, weights=np.full(30, 7))
    assert [p.high for p in alike.pairs] == pytest.approx([p.high for p in plain.pairs])
