"""The statistics of a record, by hand: each is defined once, and the same for all who show it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import partita as pt
from partita.engine.record import Record, Summary, gain, lookup, mean, read, spread


def record(*personal: Any, reference: float = 0.5, higher: bool = True, **columns: list[Any]) -> Record:
    rows = [{"client": str(i), "personal": x, "global": reference} for i, x in enumerate(personal)]
    rows = [{**row, **{k: column[i] for k, column in columns.items()}} for i, row in enumerate(rows)]
    return Record([], rows, {}, Summary(higher_is_better=higher))


def test_a_gain_is_signed_by_the_metric_and_zero_up_to_rounding() -> None:
    ours, theirs = [0.6, 0.1 + 0.2, 0.4, math.nan, math.inf], [0.5, 0.3, 0.5, 0.5, math.inf]
    np.testing.assert_allclose(gain(ours, theirs, True), [0.1, 0, -0.1, math.nan, math.nan], atol=1e-15)
    np.testing.assert_allclose(gain(ours, theirs, False), [-0.1, 0, 0.1, math.nan, math.nan], atol=1e-15)
    assert gain(0.1 + 0.2, 0.3, True) == 0
    assert gain(1e-12, 3e-12, True) < 0  # the tolerance is relative


def test_hurt_are_honest_clients_with_a_loss() -> None:
    scores = (0.4, 0.5, 0.6, None, 0.1, 0.5 - 1e-12)
    run = record(*scores, byzantine=[0, 0, 0, 0, 1, 0])
    assert run.hurt() == 1
    assert record(*scores, higher=False).hurt() == 1
    assert run.hurt("local") is None  # nobody has a score alone
    assert record(0.4, byzantine=[1]).hurt() is None
    with pytest.raises(pt.Refused) as refused:
        run.hurt("globl")
    assert refused.value.field == "reference"


def test_the_worst_tenth_is_what_nine_honest_clients_in_ten_reach() -> None:
    scores = [float(i) for i in range(11)]
    assert record(*scores).worst_tenth() == 1.0
    assert record(*scores, higher=False).worst_tenth() == 9.0
    assert record(*scores, -5.0, None, byzantine=[0] * 11 + [1, 0]).worst_tenth() == 1.0
    assert record(None).worst_tenth() is None


def test_the_time_to_a_score_is_that_of_the_first_evaluation() -> None:
    rows: list[dict[str, Any]] = [
        {"round": 1, "time": 2.0},
        {"round": 2, "time": 4.0, "test.personal": 0.6, "test.global": None},
        {"round": 3, "time": 6.0, "test.personal": 0.5, "test.global": 0.7},
    ]
    for higher, early, late in ((True, 0.55, 0.65), (False, 0.65, 0.55)):
        run = Record(rows, [], {}, Summary(higher_is_better=higher))
        assert (run.time_to(early), run.time_to(late)) == (4.0, None if higher else 6.0)
    assert Record(rows, [], {}, Summary()).time_to(0.7, "global") == 6.0


def test_a_spread_has_the_sample_deviation_of_what_is_known() -> None:
    assert spread([1.0, None, 3.0, math.nan]) == {"mean": 2.0, "std": pytest.approx(math.sqrt(2))}
    assert spread([4]) == {"mean": 4.0, "std": 0.0}
    assert spread([None]) is None
    assert mean([None, 1, 2.0, math.inf]) == 1.5
    assert lookup({"a": {"b": 1}}, "a", "b") == 1
    assert lookup({"a": 1}, "a", "b") is None


def test_a_run_counts_the_hurt_as_its_record_does(tmp_path: Path) -> None:
    data = pt.data.digits(clients=6, partition=pt.data.label_skew(classes=3), seed=0)
    method = pt.fedalt(personal="output", lr=0.1)
    common: dict[str, Any] = {"steps": 2, "batch": 8, "out": tmp_path / "run", "report": False}
    run = pt.federate(pt.models.mlp(64, 8, 10), data, method, rounds=2, **common)
    assert run.summary()["hurt"] == {"vs_global": run.hurt("global"), "vs_local": run.hurt("local")}
    loaded = read(tmp_path / "run")
    for kind in ("global", "local"):
        assert loaded.hurt(kind) == run.hurt(kind)
        np.testing.assert_array_equal(loaded.gains(kind), run.gains(kind))
    assert loaded.worst_tenth() == run.worst_tenth()
