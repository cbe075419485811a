"""An upload that is not finite is set aside and named; the run goes on as if its client had no data."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import partita as pt
from partita.aggregate.screen import usable
from partita.callbacks import Callback

SIZES, BAD = [9, 7, 5, 8], 2


# ---- the function


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["delta", "extra", "state"])
def test_one_bad_entry_names_its_client(poison, where) -> None:
    parts = {"delta": torch.zeros(4, 3, 2), "extra": torch.zeros(4), "state": torch.zeros(4, 1)}
    parts[where].view(4, -1)[2, -1] = poison
    stacks = (
        {"a": parts["delta"]},
        {"x": parts["extra"]},
        parts["state"],
        torch.zeros(4, 2, dtype=torch.int64),
    )
    assert usable(stacks, 4) == [True, True, False, True]


def test_opposite_infinities_do_not_cancel() -> None:
    x = torch.zeros(2, 4)
    x[0, 1], x[0, 2] = float("inf"), -float("inf")
    assert usable(x, 2) == [False, True]


def test_large_and_finite_is_usable() -> None:
    """The quick sum overflows, the closer look finds nothing wrong."""
    x = torch.full((3, 10), 3e38)
    assert usable(x, 3) == [True] * 3
    x[1, 4] = float("nan")
    assert usable(x, 3) == [True, False, True]


def test_nothing_to_look_at() -> None:
    assert usable(({}, {}), 3) == [True] * 3
    assert usable(torch.zeros(3, 2, dtype=torch.int64), 3) == [True] * 3
    assert usable(torch.zeros(3, 0), 3) == [True] * 3


# ---- in a run


def data(scale: float = 1.0, without: bool = False, bad: int = BAD) -> pt.data.FederatedData:
    """Four clients; the features of one are scaled, or it has no training samples."""
    g = torch.Generator().manual_seed(0)
    n, m = sum(SIZES), 3 * len(SIZES)
    x, y = torch.rand(n + m, 4, generator=g) + 0.5, torch.randint(0, 3, (n + m,), generator=g)
    ends = np.cumsum(SIZES)
    train = [(int(e) - s, s) for e, s in zip(ends, SIZES)]
    test = [(n + 3 * i, 3) for i in range(len(SIZES))]
    begin, length = train[bad]
    x[begin : begin + length] *= scale
    if without:
        train[bad] = (begin, 0)
    return pt.data.FederatedData.make(x, y, train, test, names=["ann", "bob", "eve", "joe"])


class Told(Callback):
    def __init__(self) -> None:
        self.excluded: list[tuple[str, ...]] = []

    def round(self, event) -> None:
        self.excluded.append(event.excluded)


def run(source, method, executor, **options):
    common = {"rounds": 3, "batch": 4, "epochs": 1, "baselines": False, "evaluate_every": 1, "metric": "loss"}
    return pt.federate(pt.models.mlp(4, 6, 3), source, method, executor=executor, **{**common, **options})


def close(a, b) -> None:
    assert a.keys() == b.keys()
    for k in a:
        torch.testing.assert_close(a[k], b[k], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@pytest.mark.parametrize("method", [pt.fedavg(lr=0.1), pt.fedalt("output", lr=0.1), pt.local(lr=0.1)])
def test_the_run_goes_on_without_the_client(method, executor) -> None:
    told = Told()
    got = run(data(scale=1e38), method, executor, callbacks=[told])
    expected = run(data(without=True), method, executor)
    assert told.excluded == [("eve",)] * 3
    assert got.summary()["excluded"] == ["eve"]
    assert [row["excluded"] for row in got.metrics] == [["eve"]] * 3
    assert expected.summary()["excluded"] == []
    close(got.shared, expected.shared)
    for i in range(4):  # its own state included: as if it had never trained
        close(got.client(i).personal, expected.client(i).personal)
    for a, b in zip(got.metrics, expected.metrics):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-5)
        assert a["test.personal"] == pytest.approx(b["test.personal"], rel=1e-5)
    assert all(torch.isfinite(x).all() for x in got.shared.values())


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_the_largest_client_may_be_the_bad_one(executor) -> None:
    """It is the one that the trial before the run looks at; its squared errors overflow."""

    def squared(scale: float = 1.0, without: bool = False) -> pt.data.FederatedData:
        source = data(scale, without, bad=0)
        return replace(source, y=source.y.float())

    method = pt.fedavg(lr=0.01)
    options = {"executor": executor, "rounds": 2, "batch": 4, "baselines": False}
    got = pt.federate(pt.models.mlp(4, 6, 1), squared(1e38), method, **options)
    assert got.summary()["excluded"] == ["ann"]
    close(got.shared, pt.federate(pt.models.mlp(4, 6, 1), squared(without=True), method, **options).shared)


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_a_client_keeps_the_state_of_its_last_good_round(executor) -> None:
    """The rate explodes in the third round: everybody is set aside and stays where it was."""

    def rate(t: int, rounds: int) -> float:  # noqa: ARG001
        return 0.1 if t < 2 else 1e300

    def until(rounds: int):
        return run(data(), pt.fedalt("output", lr=rate), executor, rounds=rounds)

    good, bad = until(2), until(4)
    assert bad.summary()["excluded"] == ["ann", "bob", "eve", "joe"]
    assert bad.summary()["rounds"] == bad.metrics[-1]["round"] == 4
    assert [row["excluded"] for row in bad.metrics[:2]] == [[], []]
    assert all(torch.equal(good.shared[k], bad.shared[k]) for k in good.shared)
    for i in range(4):
        a, b = good.client(i).personal, bad.client(i).personal
        assert all(torch.equal(a[k], b[k]) for k in a)
    assert bad.metrics[-1]["train_loss"] is None
    assert bad.metrics[-1]["test.personal"] == good.metrics[-1]["test.personal"]


def test_server_memory_is_not_poisoned() -> None:
    got = run(data(scale=1e38), pt.fedadam(lr=0.1, server_lr=0.01), "loop")
    close(got.shared, run(data(without=True), pt.fedadam(lr=0.1, server_lr=0.01), "loop").shared)


def test_only_a_cohort_with_the_client_names_it() -> None:
    told = Told()
    got = run(data(scale=1e38), pt.fedavg(lr=0.1), "loop", rounds=8, cohort=2, callbacks=[told])
    assert set(told.excluded) == {(), ("eve",)}
    first = told.excluded.index(("eve",))
    assert [row["excluded"] for row in got.metrics] == [[]] * first + [["eve"]] * (8 - first)


def test_the_files_name_it(tmp_path) -> None:
    out = tmp_path / "run"
    run(data(scale=1e38), pt.fedalt("output", lr=0.1), "loop", out=out)
    assert json.loads((out / "summary.json").read_text())["excluded"] == ["eve"]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["excluded"] for row in rows] == [["eve"]] * 3
    with (out / "clients.csv").open(newline="") as f:
        assert [row["client"] for row in csv.DictReader(f)] == ["ann", "bob", "eve", "joe"]
