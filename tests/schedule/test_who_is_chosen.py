"""Who is chosen: exact probabilities, power-of-choice as in its paper, and what a choice may not return."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import partita as pt
from partita.schedule import Known
from partita.schedule.choice import chosen_by, proportional
from support import each

S = pt.schedule


def nobody_answers(clients: np.ndarray, samples: int | None) -> np.ndarray:
    raise AssertionError(f"{clients} were asked for {samples} samples")


def known(samples: Any, loss: Any = None, **more: Any) -> Known:
    n = len(samples)
    loss = np.full(n, np.nan) if loss is None else np.asarray(loss, dtype=float)
    reported = ~np.isnan(loss)
    usual = {"candidates": np.arange(n), "seen": reported * 3, "chosen": reported * 1, "_ask": nobody_answers}
    return Known(**{"round": 3, "time": 3.0, "samples": np.asarray(samples), "loss": loss, **usual, **more})


def shares(choice: Any, facts: Known, count: int, times: int = 4000) -> np.ndarray:
    """How often each client is chosen, of so many draws."""
    hits, rng = np.zeros(len(facts.samples)), np.random.default_rng(0)
    for _ in range(times):
        hits[chosen_by(choice, facts, count, rng)] += 1
    return hits / times


def near(found: np.ndarray, expected: Any, times: int = 4000) -> None:
    """Within four standard deviations of a binomial share; exactly where the probability is 0 or 1."""
    p = np.asarray(expected)
    assert (np.abs(found - p) <= 4 * np.sqrt(p * (1 - p) / times) + 1e-12).all(), (found, p)


# ---- proportional to size or loss


@each("count", [1, 2, 3])
def test_the_larger_the_likelier(count: int) -> None:
    """P(i) is exactly count n_i / n, and so a mean in which clients count equally is unbiased."""
    sizes = np.array([1, 2, 3, 4, 5, 5])
    near(shares(S.by_size(), known(sizes), count), count * sizes / sizes.sum())


def test_who_would_have_more_than_one_is_certain() -> None:
    """Of 3: client 0 (probability 3 · 50/60 above 1) is certain, and the others share two places."""
    found = shares(S.by_size(), known([50, 4, 3, 2, 1, 0]), 3)
    near(found, [1.0, 2 * 0.4, 2 * 0.3, 2 * 0.2, 2 * 0.1, 0.0])


def test_places_are_as_many_as_wanted() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        n = int(rng.integers(1, 12))
        weights = rng.random(n) ** 4 * (rng.random(n) < 0.7)
        count = int(rng.integers(1, n + 1))
        places = proportional(weights, count, rng)
        assert len(set(places.tolist())) == count
        positive = int((weights > 0).sum())
        assert (weights[places] > 0).sum() == min(count, positive)


def test_the_mean_of_a_cohort_by_size_is_unbiased() -> None:
    """E[mean of the cohort's values] = Σ n_i v_i / Σ n_i: what `weighting="uniform"` needs."""
    sizes, values = np.array([1, 1, 2, 4, 8, 4]), np.array([5.0, -3.0, 2.0, 1.0, 0.5, -4.0])
    rng = np.random.default_rng(1)
    means = [values[chosen_by(S.by_size(), known(sizes), 2, rng)].mean() for _ in range(6000)]
    error = np.std(means) / np.sqrt(len(means))
    assert error < 0.05
    assert np.mean(means) == pytest.approx((sizes * values).sum() / sizes.sum(), abs=4 * error)


def test_by_loss() -> None:
    loss = np.array([0.5, 1.0, 1.5, 2.0])
    near(shares(S.by_loss(), known([1] * 4, loss), 1), loss / 5)
    near(shares(S.by_loss(power=2.0), known([1] * 4, loss), 1), loss**2 / (loss**2).sum())
    near(shares(S.by_loss(power=0.0), known([1] * 4, loss), 2), [0.5] * 4)


def test_losses_that_are_not_known() -> None:
    """A new client counts like the largest loss, one that was chosen in vain like the mean."""
    loss = [np.nan, np.nan, 1.0, 3.0]
    near(
        shares(S.by_loss(), known([1] * 4, loss, chosen=np.array([0, 5, 1, 1])), 1),
        np.array([3, 2, 1, 3]) / 9,
    )
    near(shares(S.by_loss(), known([1] * 4), 1), [0.25] * 4)
    near(shares(S.by_loss(), known([1] * 4, [-1.0, 0.0, -2.0, 0.0]), 1), [0.25] * 4)


def test_a_method_that_reports_no_loss_is_refused() -> None:
    facts = known([1, 1], seen=np.array([2, 0]))
    for choice in (S.by_loss(), S.power_of_choice(d=2, losses="last")):
        with pytest.raises(pt.Refused, match="report no training loss"):
            chosen_by(choice, facts, 1, np.random.default_rng(0))


def test_least_chosen() -> None:
    facts = known([1] * 5, chosen=np.array([2, 0, 1, 1, 3]))
    near(shares(S.least_chosen(), facts, 2), [0, 1, 0.5, 0.5, 0])


# ---- power of choice


def plainly(d: int, m: int, samples: list[int], loss: list[float]) -> dict[frozenset[int], float]:
    """P(chosen set), by going through all candidate sets in the order in which they are drawn."""
    found: dict[frozenset[int], float] = {}
    for drawn in itertools.permutations(range(len(samples)), d):
        probability, left = 1.0, float(sum(samples))
        for client in drawn:  # one after another, each by its share of what is left
            probability *= samples[client] / left
            left -= samples[client]
        best = frozenset(sorted(drawn, key=lambda c: -loss[c])[:m])
        found[best] = found.get(best, 0.0) + probability
    return found


def test_power_of_choice_has_the_probabilities_of_its_algorithm() -> None:
    samples, loss = [1, 2, 3, 4, 2], [3.0, 1.0, 2.0, 0.5, 2.5]
    expected, times = plainly(3, 2, samples, loss), 4000
    counts: dict[frozenset[int], int] = {}
    rng = np.random.default_rng(0)
    for _ in range(times):
        chosen = chosen_by(S.power_of_choice(d=3, losses="last"), known(samples, loss), 2, rng)
        counts[frozenset(chosen)] = counts.get(frozenset(chosen), 0) + 1
    assert counts.keys() <= expected.keys()
    sets = list(expected)
    near(np.array([counts.get(s, 0) / times for s in sets]), [expected[s] for s in sets])


def test_those_who_never_reported_come_first() -> None:
    facts = known([1] * 4, [9.0, np.nan, np.nan, 8.0], chosen=np.array([1, 0, 2, 1]))
    near(shares(S.power_of_choice(d=4, losses="last"), facts, 1), [0, 1, 0, 0])
    near(
        shares(S.power_of_choice(d=4, losses="last"), facts, 2), [1, 1, 0, 0]
    )  # the other was chosen in vain: the mean


@each("samples", [None, 5])
def test_candidates_are_asked_now(samples: int | None) -> None:
    asked = []

    def answers(clients: np.ndarray, some: int | None) -> np.ndarray:
        asked.append((sorted(clients.tolist()), some))
        return clients.astype(float)

    choice = S.power_of_choice(d=3, samples=samples)
    chosen = chosen_by(choice, replace(known([1] * 9), _ask=answers), 2, np.random.default_rng(0))
    ((clients, some),) = asked
    assert (len(clients), some) == (3, samples)
    assert sorted(chosen) == clients[1:]


def test_equal_losses_are_drawn() -> None:
    near(shares(S.power_of_choice(d=4, losses="last"), known([1] * 4, [1.0] * 4), 1), [0.25] * 4)


# ---- a user's own


def returns(value: Any) -> Any:
    return lambda known, count, rng: value  # noqa: ARG005


@each(
    "value, reason",
    [
        ([], "returned 0 clients"),
        ([1, 2, 3], "returned 3 clients"),
        ([1, 1], "a client twice"),
        ([1, 7], r"busy, away or none: \[7\]"),
        ([0], r"busy, away or none: \[0\]"),
        ([0.5], "no list of client numbers"),
        ([[1]], "no list of client numbers"),
        ([[1], [1, 2]], "no list of client numbers"),
        (None, "no list of client numbers"),
    ],
)
def test_what_a_choice_may_not_return(value: Any, reason: str) -> None:
    with pytest.raises(pt.Refused, match=reason) as error:
        chosen_by(returns(value), known([1] * 4, candidates=np.array([1, 2])), 5, np.random.default_rng(0))
    assert error.value.field == "choose"


@each("value", [3, "by_size", S.by_size, lambda known: known])
def test_what_is_no_choice(value: Any) -> None:
    for schedule in (S.synchronous, S.asynchronous, S.preferred):
        with pytest.raises(pt.Refused, match="power_of_choice") as error:
            schedule(choose=value)
        assert error.value.field == "choose"


def test_what_does_not_combine() -> None:
    cases = [
        (lambda: S.synchronous("turns", choose=S.by_size()), "order", "least_chosen"),
        (lambda: S.synchronous("turns", available=S.day_night()), "order", "least_chosen"),
        (lambda: S.asynchronous(order="same", available=S.day_night()), "order", "'random'"),
        (lambda: S.asynchronous(choose=S.power_of_choice(d=3)), "choose", "losses='last'"),
        (lambda: S.power_of_choice(3, "last", 4), "power_of_choice samples", "None with losses='last'"),
        (lambda: S.synchronous(choose=S.power_of_choice(d=3)).check(9, 4), "power_of_choice d", "from 4"),
        (lambda: S.synchronous(choose=S.power_of_choice(d=30)).check(9, 4), "power_of_choice d", "up to 9"),
        (lambda: S.activity(S.synchronous(choose=S.by_size()), 9, 5.0), "schedule choose", "None"),
    ]
    for build, field, allowed in cases:
        with pytest.raises(pt.Refused) as error:
            build()
        assert error.value.field == field
        assert allowed in error.value.allowed
