"""Every partitioner: each row once, the same for the same seed, always ends."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.core.draws import generator
from partita.data import (
    dirichlet,
    iid,
    label_skew,
    natural,
    power_law,
    split,
)
from partita.data.partitioners import Partitioner, deal
from support import each


def labels(rows: int, classes: int, seed: int) -> np.ndarray:
    return generator(seed, "labels").integers(0, classes, rows)


def run(partition: Partitioner, y: np.ndarray, clients: int, seed: int) -> list[np.ndarray]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return partition(y, clients, generator(seed, "partition"))


EVERY_ROW: list[Callable[[], Partitioner]] = [
    iid,
    lambda: dirichlet(1e-3),
    lambda: dirichlet(0.5),
    lambda: dirichlet(1e6),
    lambda: power_law(),
    lambda: power_law(exponent=3, minimum=1),
    lambda: power_law(exponent=0),
]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 300), st.integers(1, 12), st.integers(1, 40), st.integers(0, 5))
@pytest.mark.parametrize("make", EVERY_ROW)
def test_every_row_once_and_no_client_empty(
    make: Callable[[], Partitioner], rows: int, classes: int, clients: int, seed: int
) -> None:
    y = labels(rows, classes, seed)
    if rows < clients:
        with pytest.raises(ValueError, match=f"{clients - rows} clients would be empty"):
            run(make(), y, clients, seed)
        return
    parts = run(make(), y, clients, seed)
    assert len(parts) == clients
    assert sorted(np.concatenate(parts)) == list(range(rows))
    assert min(len(p) for p in parts) >= 1
    again = run(make(), y, clients, seed)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 12), st.integers(0, 5))
def test_label_skew_gives_exactly_that_many_classes(
    clients: int, classes: int, total: int, seed: int
) -> None:
    y = generator(seed, "y").permutation(np.arange(total * 50) % total)
    if classes > total:
        with pytest.raises(ValueError, match=f"classes={classes}"):
            run(label_skew(classes), y, clients, seed)
        return
    parts = run(label_skew(classes), y, clients, seed)
    assert all(len(np.unique(y[p])) == classes for p in parts)
    holders = np.array([sum(c in y[p] for p in parts) for c in range(total)])
    assert holders.max() - holders.min() <= 1
    rows = np.concatenate(parts)
    assert len(np.unique(rows)) == len(rows)
    if clients * classes >= total:
        assert len(rows) == len(y)
    for c in range(total):
        shares = [int((y[p] == c).sum()) for p in parts if (y[p] == c).any()]
        assert not shares or max(shares) - min(shares) <= 1


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=2, max_size=8), st.integers(1, 10), st.integers(1, 3))
def test_label_skew_with_rare_labels_is_exact_or_refused(
    counts: list[int], clients: int, classes: int
) -> None:
    y = np.repeat(np.arange(len(counts)), counts)
    possible = (
        classes <= len(counts)
        and sum(min(n, clients) for n in counts) >= clients * classes
        and len(y) >= clients
    )
    if not possible:
        with pytest.raises(ValueError):
            run(label_skew(classes), y, clients, 0)
        return
    assert all(len(np.unique(y[p])) == classes for p in run(label_skew(classes), y, clients, 0))


def test_label_skew_with_log_normal_sizes() -> None:
    """Li et al. (2020): two classes each, `minimum` rows of each, and a tail as long as that of e^{2z}."""
    y = labels(60_000, 10, 0)
    parts = run(label_skew(2, sigma=2.0, minimum=5), y, 1000, 0)
    sizes = np.array([len(p) for p in parts])
    held = [np.unique(y[p], return_counts=True)[1] for p in parts]
    assert all(len(counts) == 2 and counts.min() >= 5 for counts in held)
    assert sorted(np.concatenate(parts)) == list(range(60_000))
    above = np.log(np.concatenate(held) - 4.5)  # of what comes on top of the minimum, where it is not rounded
    high = np.sort(above)[-1000:]  # the upper half
    quartile = (high[500] - high[0]) / 0.6745  # ln p is normal: the deviation by the upper half alone
    assert 1.7 < quartile < 2.3
    assert sizes.max() > 20 * np.median(sizes)
    even = run(label_skew(2), y, 1000, 0)
    assert max(map(len, even)) < 1.2 * min(map(len, even))
    with pytest.raises(ValueError, match="classes=2"):
        run(label_skew(2, minimum=31), y, 1000, 0)  # 2000 holdings of 31 rows are more than there are


def test_label_skew_names_labels_without_a_client() -> None:
    with pytest.warns(UserWarning, match=r"no client holds the labels \d(, \d){7}$"):
        parts = label_skew(2)(labels(100, 10, 0), 1, generator(0, "partition"))
    assert len(parts) == 1


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 30), st.integers(0, 5))
def test_dirichlet_minimum(minimum: int, seed: int) -> None:
    y = labels(400, 10, seed)
    parts = run(dirichlet(0.01, minimum=minimum), y, 13, seed)
    assert min(len(p) for p in parts) >= minimum
    assert len(np.unique(np.concatenate(parts))) == 400


def test_dirichlet_says_how_many_clients_were_helped() -> None:
    y = labels(1000, 10, 0)
    bare = run(dirichlet(1e-3, minimum=0), y, 50, 0)
    empty = sum(len(p) == 0 for p in bare)
    assert empty >= 30  # about 1 + 0.05·ln 100 clients hold a label
    with pytest.warns(UserWarning, match=f"{empty} of 50 clients had fewer than 1 rows"):
        dirichlet(1e-3)(y, 50, generator(0, "partition"))
    with pytest.raises(ValueError, match=r"at most 20 for 1000 rows .30 clients would be left with fewer"):
        dirichlet(1.0, minimum=50)(y, 50, generator(0, "partition"))


def test_deal_leaves_nothing_over_for_the_last_client() -> None:
    proportions = np.array([0.0, 1 - 1e-9, 5e-10, 5e-10])
    assert np.bincount(deal(100, proportions), minlength=4).tolist() == [0, 100, 0, 0]
    assert np.bincount(deal(10, np.full(4, 0.25))).sum() == 10


def test_dirichlet_skew_falls_with_alpha() -> None:
    y = labels(5000, 10, 0)

    def largest_share(alpha: float) -> float:
        parts = run(dirichlet(alpha, minimum=0), y, 10, 0)
        return float(np.mean([np.bincount(y[p]).max() / len(p) for p in parts if len(p)]))

    assert largest_share(0.05) > largest_share(0.5) + 0.1 > largest_share(100) + 0.2


def test_iid_sizes_and_power_law_sizes() -> None:
    y = labels(1003, 10, 0)
    assert {len(p) for p in run(iid(), y, 10, 0)} == {100, 101}
    sizes = np.sort([len(p) for p in run(power_law(exponent=1, minimum=3), y, 20, 0)])[::-1]
    assert sizes[0] > 8 * sizes[-1]
    assert sizes[-1] >= 3
    assert np.ptp([len(p) for p in run(power_law(exponent=0), y, 20, 0)]) <= 1


def test_natural_keeps_ids_together() -> None:
    ids = np.array(["b", "a", "c", "a", "b", "c", "d"])
    parts = run(natural(ids), np.zeros(7), 4, 0)
    assert [p.tolist() for p in parts] == [[1, 3], [0, 4], [2, 5], [6]]
    fewer = run(natural(ids), np.zeros(7), 2, 0)
    assert sorted(np.concatenate(fewer)) == list(range(7))
    assert set(ids[fewer[0]]).isdisjoint(ids[fewer[1]])
    with pytest.raises(ValueError, match="at most 4, the number of ids"):
        run(natural(ids), np.zeros(7), 5, 0)
    with pytest.raises(ValueError, match="one id for each of the 9 rows"):
        run(natural(ids), np.zeros(9), 4, 0)


def test_another_seed_is_another_partition() -> None:
    y = labels(200, 5, 0)
    for partition in (iid(), dirichlet(0.5), label_skew(2), power_law()):
        one, two = (run(partition, y, 10, seed) for seed in (0, 1))
        assert any(not np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@each(
    ("make", "message"),
    [
        (lambda: dirichlet(0), "alpha=0: expected a number above 0"),
        (lambda: dirichlet(float("nan")), "alpha=nan"),
        (lambda: dirichlet(1, minimum=-1), "minimum=-1"),
        (lambda: label_skew(0), "classes=0"),
        (lambda: label_skew(1, sigma=-1.0), "sigma=-1"),
        (lambda: label_skew(1, minimum=0), "minimum=0"),
        (lambda: power_law(exponent=-1), "exponent=-1"),
        (lambda: iid()(np.zeros(3), 0, generator(0, "")), "clients=0"),
        (lambda: dirichlet(1)(np.zeros(3), 2, generator(0, "")), "y of dirichlet='float64"),
        (lambda: label_skew(1)(np.zeros((3, 2), int), 2, generator(0, "")), "y of label_skew"),
        (lambda: split(np.ones(4), [0, 1, 0, 1], 2, "iid"), "partition='iid'"),
        (lambda: split(np.ones(2), [0, 1], 2, lambda *_: [[0], [0]]), "no row twice"),
        (lambda: split(np.ones(2), [0, 1], 2, lambda *_: [[0], [2]]), "row numbers from 0 to 1"),
    ],
)
def test_refusals(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_repr_shows_the_options() -> None:
    assert repr(dirichlet(0.1)) == "dirichlet(alpha=0.1, minimum=1)"
