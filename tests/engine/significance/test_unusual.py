"""Clients whose inputs or labels are unlike those of the others."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from partita.core.check import Refused
from partita.engine.significance import unlike_inputs, unlike_labels


def test_the_distance_is_that_to_the_others() -> None:
    counts = np.array([[10, 0], *[[5, 5]] * 9])
    told = unlike_labels(counts)
    assert told.distance[0] == pytest.approx(0.5)
    others = np.array([10 + 8 * 5, 8 * 5]) / 90
    assert told.distance[1] == pytest.approx(np.abs([0.5, 0.5] - others).sum() / 2)
    assert told.usual == pytest.approx(told.distance[1])


def test_what_chance_gives_is_taken_off() -> None:
    """Without any spread over clients z is (d − e) / s with e the mean distance of binomial samples."""
    rng = np.random.default_rng(0)
    n, p = 12, np.array([0.7, 0.2, 0.1])
    drawn = np.abs(rng.multinomial(n, p, 200_000) / n - p).sum(1) / 2
    counts = np.array([[12, 0, 0]] + [[700_000, 200_000, 100_000]] * 20)
    told = unlike_labels(counts)
    by_chance = sum(stats.binom(n, c).expect(lambda k, c=c: abs(k - n * c)) for c in p) / n / 2
    assert by_chance == pytest.approx(drawn.mean(), abs=1e-3)
    noise = np.sqrt((1 - 2 / np.pi) * (p * (1 - p)).sum() / n) / 2
    assert told.z[0] == pytest.approx((0.3 - by_chance) / noise, rel=0.02)
    assert noise == pytest.approx(drawn.std(), rel=0.35)


def test_a_client_with_labels_of_its_own_stands_out() -> None:
    rng = np.random.default_rng(0)
    counts = np.stack([rng.multinomial(n, [0.1] * 10) for n in rng.integers(20, 60, 40)])
    assert not unlike_labels(counts).stands_out.any()
    counts[7] = rng.multinomial(40, [0.5, 0.5] + [0] * 8)
    told = unlike_labels(counts)
    assert np.flatnonzero(told.stands_out).tolist() == [7]
    assert "labels are unlike" in (told.sentence(7) or "")
    assert told.sentence(6) is None


def test_where_all_differ_alike_nobody_stands_out() -> None:
    """Each client has two classes of ten; and few samples alone make nobody unusual."""
    rng = np.random.default_rng(0)
    counts = np.zeros((60, 10), int)
    for client in range(60):
        counts[client, rng.choice(10, 2, replace=False)] = rng.integers(1, 40, 2)
    assert not unlike_labels(counts).stands_out.any()
    few = np.stack([rng.multinomial(3 if i < 5 else 200, [0.1] * 10) for i in range(50)])
    assert not unlike_labels(few).stands_out.any()
    assert unlike_labels(few).distance[:5].min() > 2 * unlike_labels(few).distance[5:].max()


def inputs(rng: np.random.Generator, sizes: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    means = 0.3 * rng.normal(size=(len(sizes), width))
    x = rng.normal(size=(sizes.sum(), width)) + np.repeat(means, sizes, axis=0)
    return x, np.stack([np.cumsum(sizes) - sizes, sizes], axis=1)


def test_a_client_with_inputs_of_its_own_stands_out() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(2, 50, 40)
    x, ranges = inputs(rng, sizes, 30)
    assert not unlike_inputs(x, ranges).stands_out.any()
    start, length = ranges[11]
    x[start : start + length] += rng.normal(0, 1.5, 30)
    told = unlike_inputs(x, ranges)
    assert np.flatnonzero(told.stands_out).tolist() == [11]
    assert "inputs are unlike" in (told.sentence(11) or "")
    # features of any scale, and constant ones, change nothing; nor does the shape of a sample
    scaled = np.concatenate([x * 10.0 ** (np.arange(30) % 7 - 3) + 5, np.full((len(x), 2), 7.0)], axis=1)
    np.testing.assert_allclose(unlike_inputs(scaled, ranges).distance, told.distance, rtol=1e-6)
    np.testing.assert_allclose(unlike_inputs(x.reshape(-1, 5, 6), ranges).z, told.z)


def test_clients_without_samples_and_few_clients() -> None:
    rng = np.random.default_rng(0)
    x, ranges = inputs(rng, np.array([0, *[5] * 9]), 3)
    told = unlike_inputs(x, ranges)
    assert np.isnan(told.distance).tolist() == [True] + [False] * 9
    assert not unlike_inputs(x, ranges[:4]).stands_out.any()
    assert np.isnan(unlike_inputs(x, ranges[:4]).z).all()
    empty = unlike_labels(np.array([[0, 0], *[[3, 3]] * 9]))
    assert np.isnan(empty.distance[0])
    assert not empty.stands_out.any()
    assert np.isnan(unlike_labels(np.zeros((3, 2))).usual)
    assert not unlike_inputs(np.ones((50, 4)), [(5 * i, 5) for i in range(10)]).stands_out.any()
    with pytest.raises(Refused) as error:
        unlike_labels([[1, -1]])
    assert error.value.field == "counts"
