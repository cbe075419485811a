"""Why a client may have been hurt, one reason at a time."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from report_rows import client, fake

from partita.report.reasons import Notes, crowd, reasons
from support import each

# n_train 10, 20, …, 100: the lower quartile is 32.5
CLIENTS = [
    client(str(i), 0.8, 0.7, n_train=10 * i, n_test=100, label_shift=i / 20, distance=1.0)
    for i in range(1, 11)
]


def why(
    row: dict[str, Any],
    reference: str = "global",
    excluded: Mapping[str, str] = MappingProxyType({}),
    among: list[dict[str, Any]] = CLIENTS,
    higher: bool = True,
    unusual: Mapping[str, list[str]] = MappingProxyType({}),
) -> list[str]:
    """The reasons for one client, among others."""
    usual, one = crowd(fake(*among, higher_is_better=higher)), fake(row, higher_is_better=higher)
    [gained], [on_train] = one.gains(reference), one.gains(reference, "train")
    return reasons(row, gained, on_train, usual, Notes(excluded, unusual))


def hurt(**more: object) -> dict[str, Any]:
    """A client that lost 0.1, with nothing unusual about it."""
    return {**client("x", 0.6, 0.7, n_train=50, n_test=100, label_shift=0.2, distance=1.0), **more}


def test_nothing_unusual_has_no_reason() -> None:
    assert why(hurt()) == []


def test_few_samples_are_below_the_lower_quartile() -> None:
    assert crowd(fake(*CLIENTS)).few_samples == 32.5
    assert why(hurt(n_train=33)) == []
    assert why(hurt(n_train=32)) == ["few data: 32 training samples, three clients in four have 33 or more"]
    assert why(hurt(n_train=None)) == []


@each(
    ("n_test", "personal", "words"),
    [
        (8, 0.7 - 1 / 8, "of its 8 test samples, a single one is 12 points"),
        (18, 0.7 - 2 / 18, "of its 18 test samples, a single one is 5.6 points"),
        (1, 0.0, "it has a single test sample"),
    ],
)
def test_a_change_of_few_test_samples_may_be_chance(n_test: int, personal: float, words: str) -> None:
    assert why(hurt(n_test=n_test, personal=personal)) == [f"may be chance: {words}"]


def test_a_change_of_three_test_samples_is_not_called_chance() -> None:
    assert why(hurt(n_test=18, personal=0.7 - 3 / 18)) == []


def test_samples_weigh_in_points_only_where_scores_are_parts_of_one() -> None:
    rows = [client("a", 3.0, 2.0)]
    assert why(rows[0], among=rows, higher=False) == []
    assert why(hurt(personal=0.8, n_test=1), higher=False) == []


def test_where_a_test_was_made_nobody_guesses_what_is_chance() -> None:
    assert why(hurt(n_test=8, personal=0.7 - 1 / 8, vs_global_p=0.5)) == []


def test_what_the_run_found_unlike_others_is_said_of_that_client_alone() -> None:
    words = ["its inputs are unlike the others’: distance 5, the median client 1 (z = 9.0)"]
    assert why(hurt(), unusual={"x": words}) == words
    assert why(hurt(), unusual={"y": words}) == []


def test_far_is_twice_the_median() -> None:
    assert why(hurt(distance=1.99)) == []
    assert why(hurt(distance=2.0)) == ["its personal part moved far: 2.0 times the median"]


def test_without_distances_nothing_moved_far() -> None:
    rows = [client(str(i), 0.6, 0.7, n_test=100, distance=0.0) for i in range(5)]
    assert why({**rows[0], "distance": 0.0}, among=rows) == []


def test_overfitting_is_up_on_train_and_down_on_test() -> None:
    up = hurt(global_train=0.8, personal_train=0.95)
    assert why(up) == ["it overfits: +0.1500 on its training samples"]
    assert why(hurt(global_train=0.9, personal_train=0.85)) == []
    assert why({**up, "local": 0.7}, reference="local") == []  # no training score alone


def test_excluded_clients_are_told_by_name() -> None:
    assert why(hurt(), excluded={"x": ""}) == ["it was excluded: its uploads were unusable"]
    assert why(hurt(), excluded={"y": ""}) == []
    told = why(hurt(), excluded={"x": "not finite"})
    assert told == ["it was excluded: its uploads were unusable (not finite)"]


def test_several_reasons_hold_at_once() -> None:
    assert len(why(hurt(n_train=1, distance=5.0, n_test=5, personal=0.5), excluded={"x": ""})) == 4


def test_missing_numbers_are_no_reason() -> None:
    bare = [{"client": "a", "personal": 0.1, "global": 0.9}, {"client": "b"}]
    assert why(bare[0], among=bare) == []
