"""Two models on the same samples: tests and intervals against enumeration, SciPy and published examples."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import roc_auc_score

from partita.core.check import Refused
from partita.engine.significance import Changes, mean_changes, metric_changes, paired, right_wrong
from support import each

DARWIN = [49.0, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
"""Crossed less self-fertilized maize, in eighths of an inch (Fisher 1935, The Design of Experiments)."""


def flags(both: int, ours: int, theirs: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples that both models get right, one of them alone, and none."""
    counts = [both, ours, theirs, neither]
    return np.repeat([True, True, False, False], counts), np.repeat([True, False, True, False], counts)


def one(both: int, ours: int, theirs: int, neither: int) -> Changes:
    right = flags(both, ours, theirs, neither)
    return right_wrong(*right, [(0, len(right[0]))])


def fields(changes: Changes) -> dict[str, np.ndarray]:
    return {name: value for name, value in vars(changes).items() if value is not None}


# ---- right or wrong


def test_airways_before_and_after_transplantation() -> None:
    """Bentur et al. 2009, as worked out by Fagerland, Lydersen & Laake 2014 (Statistics in Medicine)."""
    changes = one(1, 1, 7, 12)
    assert changes.p[0] == pytest.approx(0.0703, abs=5e-5)
    assert changes.change[0] == pytest.approx(-0.286, abs=5e-4)
    assert changes.low[0] == pytest.approx(-0.517, abs=5e-4)
    assert changes.high[0] == pytest.approx(-0.026, abs=5e-4)


@each("ours, theirs", [(0, 0), (0, 1), (3, 0), (2, 5), (7, 7), (40, 20), (0, 30)])
def test_mcnemar_is_the_binomial_test(ours: int, theirs: int) -> None:
    changes = one(4, ours, theirs, 3)
    for p, wins, kind in (
        (changes.p, ours, "two-sided"),
        (changes.p_better, ours, "greater"),
        (changes.p_worse, theirs, "greater"),
    ):
        assert p[0] == pytest.approx(
            stats.binomtest(wins, ours + theirs, 0.5, kind).pvalue if wins + theirs else 1
        )
    equal = stats.binom.pmf(ours, ours + theirs, 0.5)
    assert changes.p_better[0] - changes.better_beyond[0] == pytest.approx(equal)
    assert changes.p_worse[0] - changes.worse_beyond[0] == pytest.approx(equal)


@each(
    "ours, theirs, n", [(0, 0, 5), (0, 0, 200), (1, 0, 5), (2, 5, 21), (40, 20, 160), (5, 0, 5), (0, 9, 10)]
)
def test_the_ends_of_the_interval_are_where_the_score_statistic_is_the_quantile(
    ours: int, theirs: int, n: int
) -> None:
    """With the likelihood maximized by search, not by the formula."""
    changes = one(n - ours - theirs, ours, theirs, 0)
    for end in (changes.low[0], changes.high[0]):
        if abs(end) > 1 - 1e-9:
            continue
        q = np.linspace(max(0.0, -end), (1 - end) / 2, 400_001)[
            1:-1
        ]  # the share that only `theirs` gets right
        shares = np.stack([q + end, q, 1 - 2 * q - end])
        counts = np.array([ours, theirs, n - ours - theirs])[:, None]
        likelihood = np.where(counts > 0, counts * np.log(np.maximum(shares, 1e-300)), 0.0).sum(0)
        best = q[likelihood.argmax()]
        statistic = abs(ours - theirs - n * end) / np.sqrt(n * (2 * best + end * (1 - end)))
        assert statistic == pytest.approx(1.96, abs=5e-3)


def test_the_exact_test_never_rejects_too_often() -> None:
    """Over all outcomes of n samples, for models that are equally good."""
    outcomes = [(d, c) for d in range(21) for c in range(d + 1)]  # unlike samples, of which c are lost
    right = [flags(0, d - c, c, 0) for d, c in outcomes]
    sizes = np.array([d for d, _ in outcomes])
    ranges = np.stack([np.cumsum(sizes) - sizes, sizes], axis=1)
    p = dict(zip(outcomes, right_wrong(*np.hstack(right), ranges).p_worse.tolist()))
    for n, differ, level in itertools.product((5, 10, 20), (0.1, 0.5, 1.0), (0.01, 0.05, 0.1)):
        chances = {(d, c): stats.binom.pmf(d, n, differ) * stats.binom.pmf(c, d, 0.5) for d, c in outcomes}
        assert sum(chances[o] for o in outcomes if p[o] <= level) <= level + 1e-12


def test_clients_without_samples_and_with_one() -> None:
    changes = right_wrong([True, False], [True, True], [(0, 0), (1, 1), (0, 2), (2, 0)])
    assert changes.n.tolist() == [0, 1, 2, 0]
    assert np.isnan(changes.change[[0, 3]]).all()
    assert np.isnan(changes.low[[0, 3]]).all()
    assert changes.change[[1, 2]].tolist() == [-1.0, -0.5]
    assert changes.p_worse.tolist() == [1.0, 0.5, 0.5, 1.0]
    assert (changes.p == 1).all()
    assert changes.low[1] == pytest.approx(-1.0)
    assert 0 < changes.high[1] < 1


# ---- means over samples


def test_maize_of_darwin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fisher 1935, section 21: of 32,768 sums 835 exceed the observed one and 28 equal it."""
    drawn = mean_changes(DARWIN, [(0, 15)])
    assert drawn.p_better[0] == pytest.approx(863 / 32768, abs=0.008)
    monkeypatch.setattr(paired, "ENUMERATED", 15)
    changes = mean_changes(DARWIN, [(0, 15)])
    assert changes.p_better[0] * 2**15 == pytest.approx(863)
    assert changes.better_beyond[0] * 2**15 == pytest.approx(835)
    assert changes.p[0] == pytest.approx(0.05267, abs=5e-6)
    interval = stats.ttest_1samp(DARWIN, 0).confidence_interval()
    assert changes.low[0] <= interval.low + 1e-9
    assert changes.high[0] >= interval.high - 1e-9


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=8))
def test_sign_flips_are_all_signs(gains: list[int]) -> None:
    changes = mean_changes(gains, [(0, len(gains))])
    sums = np.array([np.dot(signs, gains) for signs in itertools.product((1, -1), repeat=len(gains))])
    assert changes.p_better[0] == pytest.approx((sums >= sum(gains)).mean())
    assert changes.p_worse[0] == pytest.approx((sums <= sum(gains)).mean())
    assert changes.better_beyond[0] == pytest.approx((sums > sum(gains)).mean())
    assert changes.change[0] == pytest.approx(np.mean(gains))


@each("n", [2, 5, 9])
def test_few_samples_have_the_t_interval(n: int) -> None:
    gains = np.random.default_rng(n).normal(1, 1, n)
    changes = mean_changes(gains, [(0, n)], level=0.9)
    wanted = stats.ttest_1samp(gains, 0).confidence_interval(0.9)
    assert (changes.low[0], changes.high[0]) == pytest.approx((wanted.low, wanted.high))


def test_skewed_gains_reach_farther_on_the_side_of_the_tail() -> None:
    gains = np.random.default_rng(0).exponential(1, 40)
    changes = mean_changes(gains, [(0, 40)])
    t = stats.ttest_1samp(gains, 0).confidence_interval()
    assert changes.high[0] > t.high + 0.02
    assert changes.low[0] == pytest.approx(t.low)


def test_many_samples_have_the_normal_limit() -> None:
    """Just below and above the number from which nothing is drawn, the answers agree."""
    x = np.random.default_rng(1).normal(0.05, 1, paired.NORMAL + 1)
    drawn, limit = mean_changes(x[:-1], [(0, len(x) - 1)]), mean_changes(x, [(0, len(x))])
    assert drawn.p[0] == pytest.approx(limit.p[0], abs=0.03)
    assert drawn.low[0] == pytest.approx(limit.low[0], abs=0.01)


def test_gains_that_say_nothing() -> None:
    gains = [0.0, 0, 0, 2.0, 0.1, 0.1, 0.1, np.nan, 1.0, np.inf]
    changes = mean_changes(gains, [(0, 3), (3, 1), (4, 3), (7, 2), (9, 1), (0, 0)])
    assert changes.n.tolist() == [3, 1, 3, 0, 0, 0]
    assert changes.p_worse.tolist() == [1, 1, 1, 1, 1, 1]
    assert changes.p_better.tolist() == [1, 0.5, 0.125, 1, 1, 1]
    assert changes.low[[0, 2]].tolist() == pytest.approx([0.0, 0.1])
    assert changes.high[[0, 2]].tolist() == pytest.approx([0.0, 0.1])
    assert np.isnan(changes.low[[1, 3, 4, 5]]).all()
    assert np.isnan(changes.change[3:]).all()


# ---- metrics of a whole client


def auc(scores: np.ndarray, positive: np.ndarray) -> float:
    """The share of pairs in order; NaN where there is one class only."""
    ones = int(positive.sum())
    if ones in (0, len(positive)):
        return float("nan")
    return (
        float(stats.rankdata(scores)[positive].sum() - ones * (ones + 1) / 2) / ones / (len(positive) - ones)
    )


def test_auc_of_one_client() -> None:
    """With many samples the interval is about that of DeLong, DeLong & Clarke-Pearson 1988."""
    rng = np.random.default_rng(0)
    positive = np.arange(300) % 3 == 0
    base = rng.normal(size=300)
    ours, theirs = (shift * positive + base + rng.normal(size=300) for shift in (0.8, 1.8))
    changes = metric_changes(
        auc, ours, theirs, positive, [(0, 300)], higher_is_better=True, strata=positive, resamples=300
    )
    delta = np.subtract(*((np.sign(x[positive][:, None] - x[~positive]) + 1) / 2 for x in (ours, theirs)))
    error = np.sqrt(
        delta.mean(1).var(ddof=1) / positive.sum() + delta.mean(0).var(ddof=1) / (~positive).sum()
    )
    assert changes.change[0] == pytest.approx(delta.mean())
    assert changes.change[0] == pytest.approx(roc_auc_score(positive, ours) - roc_auc_score(positive, theirs))
    assert changes.low[0] == pytest.approx(delta.mean() - 1.96 * error, abs=0.35 * error)
    assert changes.high[0] == pytest.approx(delta.mean() + 1.96 * error, abs=0.35 * error)
    assert changes.p_worse[0] < 0.01
    assert changes.p_better[0] > 0.99
    lower = metric_changes(
        auc, ours, theirs, positive, [(0, 300)], higher_is_better=False, strata=positive, resamples=300
    )
    assert lower.change[0] == -changes.change[0]
    assert lower.high[0] == pytest.approx(-changes.low[0])
    assert lower.p_better[0] == changes.p_worse[0]


def test_a_metric_that_is_undefined_for_a_client() -> None:
    """One class only, one positive sample (it cannot be drawn anew), no samples; and the same outputs."""
    positive = np.array([False] * 4 + [True] + [False] * 5 + [True, False] * 5)
    outputs = np.random.default_rng(0).normal(size=(2, 20))
    outputs[1, 10:] = outputs[0, 10:]
    ranges = [(0, 4), (4, 6), (0, 0), (10, 10)]
    changes = metric_changes(
        auc, *outputs, positive, ranges, higher_is_better=True, strata=positive, resamples=50
    )
    assert changes.n.tolist() == [0, 6, 0, 10]
    assert np.isfinite(changes.change).tolist() == [False, True, False, True]
    assert np.isnan(changes.low).tolist() == [True, True, True, False]
    assert (changes.p == 1).all()
    assert changes.low[3] == changes.high[3] == 0


def test_resamples_without_a_value_are_left_out() -> None:
    """Without strata some resamples have one class only, for which this metric raises or gives NaN."""

    def strict(scores: np.ndarray, positive: np.ndarray) -> float:
        if len(np.unique(positive)) < 2:
            raise ValueError("one class")
        return auc(scores, positive)

    positive = np.array([True, True] + [False] * 8)
    outputs = np.random.default_rng(0).normal(size=(2, 10))
    changes = metric_changes(strict, *outputs, positive, [(0, 10)], higher_is_better=True, resamples=200)
    assert np.isfinite([changes.low[0], changes.high[0]]).all()
    assert changes.low[0] <= changes.change[0] <= changes.high[0]


# ---- all of them


@settings(max_examples=15)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(0, 100))
def test_a_client_does_not_depend_on_the_others(sizes: list[int], seed: int) -> None:
    """In any order, with the others or alone, the same is said of a client; swapped models mirror it."""
    rng = np.random.default_rng(seed)
    total = sum(sizes)
    ranges = np.stack([np.cumsum(sizes) - sizes, sizes], axis=1)
    ours, theirs = rng.random((2, total)) < 0.6
    gains = rng.normal(size=total)
    order = rng.permutation(len(sizes))
    for compare, mirrored in (
        (lambda where: right_wrong(ours, theirs, where), right_wrong(theirs, ours, ranges)),
        (lambda where: mean_changes(gains, where), mean_changes(-gains, ranges)),
    ):
        together: Any = compare(ranges)
        shuffled, alone = fields(compare(ranges[order])), fields(compare(ranges[:1]))
        for name, values in fields(together).items():
            np.testing.assert_allclose(shuffled[name], values[order], atol=1e-12)
            np.testing.assert_allclose(alone[name], values[:1], atol=1e-12)
        known = together.n > 0
        np.testing.assert_allclose(mirrored.change, -together.change)
        np.testing.assert_allclose(mirrored.p_worse, together.p_better, atol=2e-2)  # other signs are drawn
        assert (together.p_worse + together.p_better >= 1 - 1e-12).all()
        assert (together.worse_beyond <= together.p_worse).all()
        inside = known & np.isfinite(together.low)
        assert (together.low[inside] <= together.change[inside] + 1e-12).all()
        assert (together.high[inside] >= together.change[inside] - 1e-12).all()


@each(
    "call, field",
    [
        (lambda: right_wrong([True], [True, False], [(0, 1)]), "theirs"),
        (lambda: right_wrong([True], [True], [(0, 2)]), "ranges"),
        (lambda: mean_changes([1.0, 2.0], [(-1, 2)]), "ranges"),
        (lambda: mean_changes([[1.0, 2.0]], [(0, 1)]), "gains"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, field: str) -> None:
    with pytest.raises(Refused) as error:
        call()
    assert error.value.field == field
