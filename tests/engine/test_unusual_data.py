"""Data that are unusual but good: clients without samples, classes that no one has, odd names."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

import partita as pt
from small import arrays, data, federate, numbers, with_value
from support import tensors


@pytest.fixture(params=["loop", "vmap"])
def executor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_clients_without_samples_or_with_one(executor: str) -> None:
    """No sample at all; one to train and none to test; one to test and none to train; some of both."""
    x, y = arrays()["x"], arrays()["y"]
    train, test = [[0, 0], [0, 1], [0, 0], [1, 9], [10, 5]], [[0, 0], [0, 0], [15, 1], [16, 4], [20, 4]]
    mixed = pt.data.FederatedData.make(x, y, train, test, names=["none", "one", "tested", "dora", "emil"])
    run = federate(None, data=mixed, executor=executor)
    assert run.summary()["excluded"] == []
    assert [row["personal"] is None for row in run.clients] == [True, True, False, False, False]
    assert all(torch.isfinite(t).all() for t in tensors(run).values())


def test_an_empty_cohort_trains_nothing(executor: str) -> None:
    """Rounds in which no one who reports has data leave the model as it was."""
    mixed = pt.data.FederatedData.make(arrays()["x"], arrays()["y"], [[0, 24], [0, 0], [0, 0]])
    run = federate(None, data=mixed, cohort=1, executor=executor, rounds=6, algorithm=pt.fedavg(lr=0.1))
    assert all(torch.isfinite(t).all() for t in run.shared.values())


def test_no_one_has_test_data(executor: str, tmp_path: Path) -> None:
    run = federate(tmp_path / "run", data=data(test=0.0), executor=executor)
    assert run.summary()["test"] == {"local": None, "global": None, "personal": None}
    assert pt.load(tmp_path / "run").clients[0]["personal"] is None


def test_a_class_that_no_one_has(executor: str) -> None:
    run = federate(None, model=pt.models.mlp(4, 9), algorithm=pt.fedavg(lr=0.1), executor=executor)
    assert run.summary()["test"]["personal"] is not None


def test_a_batch_larger_than_any_client(executor: str) -> None:
    large, whole = (federate(None, batch=b, executor=executor).shared for b in (10**6, None))
    assert all(torch.allclose(large[k], whole[k]) for k in whole)


def test_a_client_whose_loss_is_not_finite_is_named(executor: str, tmp_path: Path) -> None:
    far = data(x=with_value(arrays()["x"], 1e38), y=numbers(1))
    net = pt.models.mlp(4, 3, 1)
    federate(tmp_path / "run", data=far, model=net, batch=None, executor=executor, rounds=2)
    run = pt.load(tmp_path / "run")
    assert run.summary()["excluded"] == ["bob"]
    assert [row["excluded"] for row in run.metrics] == [["bob"], ["bob"]]
    assert all(torch.isfinite(t).all() for t in tensors(run).values())


ODD_NAMES = [
    "a b",
    "  ",
    "émile 漢字 🎻",
    "a/b\\c",
    'x,"y";z',
    "two\nlines",
    "back\rhome",
    "\r\n",
    "",
    "=1+1",
    "\0",
    "None",
]


def test_clients_with_odd_names(tmp_path: Path) -> None:
    out = tmp_path / "run"
    odd = pt.data.from_arrays(**arrays(client=np.arange(24) % len(ODD_NAMES), names=ODD_NAMES))
    run = federate(out, data=odd)
    assert run.names == ODD_NAMES
    assert pt.load(out).names == ODD_NAMES
    with open(out / "clients.csv", newline="", encoding="utf-8") as f:
        formulas = {"\r\n": "'\r\n", "=1+1": "'=1+1"}  # a quote makes them harmless in a spreadsheet
        assert [row["client"] for row in csv.DictReader(f)] == [formulas.get(n, n) for n in ODD_NAMES]
    run.save(tmp_path / "copy")
    assert pt.load(tmp_path / "copy").client(5).name == "two\nlines"
