"""Validation: what is held out of each client's training samples, and that the test samples stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import partita as pt
from partita.core import check
from partita.data import FederatedData, Population
from partita.data.federated import SPLITS
from partita.data.validation import validated
from support import each

RNG = np.random.default_rng(0)
Y = RNG.choice(3, 200, p=[0.7, 0.25, 0.05])
X = np.arange(200, dtype=np.float32)[:, None]  # a sample is its own number
CLIENT = np.repeat(["a", "b", "c", "d"], [120, 60, 19, 1])


def made(**given: Any) -> FederatedData:
    return pt.data.from_arrays(X, Y, CLIENT, **given)


def rows(data: FederatedData, split: str, i: int | None = None) -> list[int]:
    """Return the numbers of the samples in a split, of one client or of all."""
    clients = range(data.clients) if i is None else [i]
    return [int(v) for c in clients for v in data.client(c, split)[0][:, 0]]


def leaf(path: Path, values: range) -> Path:
    user = {"x": [[float(v)] for v in values], "y": [v % 2 for v in values]}
    path.write_text(json.dumps({"users": ["u"], "user_data": {"u": user}}))
    return path


def test_each_client_holds_out_a_share_and_keeps_its_test_samples() -> None:
    data, without = made(seed=3), made(seed=3, validation=0)
    assert without.sizes("validation").tolist() == [0] * 4
    assert data.sizes("validation").tolist() == [10, 5, 2, 0]  # of 96, 48, 15 and 1
    for i in range(4):
        assert rows(data, "test", i) == rows(without, "test", i)
        assert sorted(rows(data, "train", i) + rows(data, "validation", i)) == rows(without, "train", i)
    assert rows(made(seed=3), "validation") == rows(data, "validation")
    assert rows(made(seed=4, test=without_test(without)), "validation") != rows(data, "validation")


def without_test(data: FederatedData) -> np.ndarray[Any, Any]:
    mask = np.zeros(len(X), dtype=np.bool_)
    mask[rows(data, "test")] = True
    return mask


@each("seed", range(5))
def test_classes_are_held_out_in_proportion_and_those_of_several_samples_keep_some(seed: int) -> None:
    data = made(seed=seed, validation=0.3)
    for i in range(3):
        train, held = (data.client(i, split)[1] for split in ("train", "validation"))
        both = torch.cat([train, held])
        for label in both.unique():
            n, k = int((both == label).sum()), int((held == label).sum())
            assert k < n
            assert abs(k - 0.3 * n) < 1.5


def test_a_rare_class_is_held_out_as_often_as_others_over_many_clients() -> None:
    y = np.repeat([0, 1], [97, 3])  # 0.3 of the rare class for each client: rounding would never take it
    masks = [validated(y, 0.1, 0, client) for client in range(300)]
    assert {int(mask.sum()) for mask in masks} == {10}
    rare = sum(int(mask[97:].sum()) for mask in masks)
    assert 60 <= rare <= 120  # about 90
    assert max(int(mask[97:].sum()) for mask in masks) == 1


def test_classes_of_one_sample_are_in_validation_as_in_the_test_part() -> None:
    """A writer has most letters once: validation must not be of digits alone."""
    y = np.concatenate([np.zeros(40, np.int64), np.arange(1, 21)])
    masks = [validated(y, 0.1, 0, client) for client in range(300)]
    assert {int(mask.sum()) for mask in masks} == {6}
    assert abs(sum(int(mask[40:].sum()) for mask in masks) / 1800 - 1 / 3) < 0.02


@each("y, share, held", [
    (np.zeros(4, np.int64), 0.1, 0),
    (np.zeros(5, np.int64), 0.1, 1),
    (np.zeros(2, np.int64), 0.9, 1),
    (np.arange(9), 0.5, 5),  # every class has one sample
    (np.array([0, 0, 1]), 0.9, 2),
    (np.arange(10.0), 0.5, 5),  # numbers are no classes
    (np.zeros((10, 4), np.int64), 0.2, 2),
    (np.zeros(0, np.int64), 0.5, 0),
    (np.zeros(1, np.int64), 0.99, 0),
    (np.repeat([0, 1], 500), 0.999, 999),
])  # fmt: skip
def test_small_clients_keep_samples_to_train_on(y: Any, share: float, held: int) -> None:
    assert validated(y, share, 0, 0).sum() == held


def test_hold_out_draws_what_the_builder_draws() -> None:
    built, held = made(seed=2), made(seed=2, validation=0).hold_out(0.1, seed=2)
    for i in range(4):
        for split in SPLITS:
            assert all(map(torch.equal, built.client(i, split), held.client(i, split)))
    assert held.source["validation"] == 0.1
    assert made(validation=0).hold_out(0).fingerprint() == made(validation=0).fingerprint()


def test_hold_out_copies_rows_that_clients_share() -> None:
    pool = FederatedData.make(X, Y, [(0, 50), (0, 50), (30, 40)], [(100, 20), (0, 50), (0, 0)])
    data = pool.hold_out(0.2, seed=1)
    assert data.sizes("validation").tolist() == [10, 10, 8]
    for i in range(3):
        train, held = rows(data, "train", i), rows(data, "validation", i)
        assert sorted(train + held) == rows(pool, "train", i)
        assert rows(data, "test", i) == rows(pool, "test", i)
    assert rows(data, "validation", 0) != rows(data, "validation", 1)


@each("given, field", [
    ({"validation": 1.0}, "validation"),
    ({"validation": -0.1}, "validation"),
    ({"validation": True}, "validation"),
    ({"validation": "0.1"}, "validation"),
    ({"validation": np.zeros(3, np.bool_)}, "validation"),
    ({"validation": np.ones(200, np.bool_), "test": np.ones(200, np.bool_)}, "validation"),
])  # fmt: skip
def test_what_is_no_share_and_no_mask_is_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(check.Refused) as refused:
        made(**given)
    assert refused.value.field == field


def test_data_that_hold_out_samples_already_are_refused() -> None:
    with pytest.raises(check.Refused, match="validation=0") as refused:
        made().hold_out(0.2)
    assert (refused.value.field, refused.value.value) == ("validation", 0.2)


def test_masks_and_fractions_go_together() -> None:
    mask = np.arange(200) % 10 == 0
    data = made(validation=mask, test=0.2)
    assert rows(data, "validation") == np.flatnonzero(mask).tolist()
    assert not set(rows(data, "test")) & set(rows(data, "validation"))
    both = made(validation=torch.from_numpy(mask), test=np.arange(200) % 10 == 1)
    assert rows(both, "validation") == np.flatnonzero(mask).tolist()
    assert len(rows(both, "test")) == 20


def test_from_datasets_takes_a_validation_set_for_some_clients() -> None:
    def part(*values: float) -> tuple[Tensor, Tensor]:
        return torch.tensor(values)[:, None], torch.zeros(len(values), dtype=torch.int64)

    train = {"a": part(0, 1, 2), "b": part(3, 4)}
    data = pt.data.from_datasets(train, validation={"b": part(5, 6)}, test={"a": part(7)})
    assert [rows(data, split) for split in SPLITS] == [[0, 1, 2, 3, 4], [5, 6], [7]]
    with pytest.raises(check.Refused) as refused:
        pt.data.from_datasets(train, validation={"c": part(5)})
    assert (refused.value.field, refused.value.value) == ("validation", "c")
    drawn = pt.data.from_datasets({"a": (X, Y)}, test=0.5, validation=0.1)
    assert drawn.sizes("validation").tolist() == [10]


def test_readers_take_a_validation_part_of_their_own(tmp_path: Path) -> None:
    mask = np.arange(200) % 4 == 0
    np.savez(tmp_path / "all.npz", x=X, y=Y, client=CLIENT, held=mask)
    data = pt.data.from_npz(tmp_path / "all.npz", validation="held")
    assert rows(data, "validation") == np.flatnonzero(mask).tolist()
    assert pt.data.from_npz(tmp_path / "all.npz").sizes("validation").tolist() == [10, 5, 2, 0]
    train, held = leaf(tmp_path / "train.json", range(20)), leaf(tmp_path / "held.json", range(20, 26))
    read = pt.data.from_leaf(train, test=0.5, validation=held)
    assert rows(read, "validation") == [*range(20, 26)]
    assert read.sizes("test").tolist() == [10]
    assert pt.data.from_leaf(train, test=0.5).sizes("validation").tolist() == [1]


def test_huggingface_takes_a_column_a_fraction_or_a_dataset() -> None:
    datasets = pytest.importorskip("datasets")
    columns = {"x": X.tolist(), "y": Y.tolist(), "who": CLIENT.tolist()}
    mask = (np.arange(200) % 4 == 0).tolist()
    table = datasets.Dataset.from_dict({**columns, "held": mask})
    names = {"x": "x", "y": "y", "client": "who"}
    assert len(rows(pt.data.from_huggingface(table, **names, validation="held"), "validation")) == 50
    assert len(rows(pt.data.from_huggingface(table, **names), "validation")) == 17
    few = datasets.Dataset.from_dict({"x": [[-1.0]], "y": [0], "who": ["a"]})
    assert rows(pt.data.from_huggingface(table, **names, validation=few), "validation") == [-1]
    both = pt.data.from_huggingface(table, **names, validation="held", test=few)
    assert (len(rows(both, "validation")), rows(both, "test")) == (50, [-1])


@each("make", [
    lambda **given: pt.data.digits(8, seed=1, **given),
    lambda **given: pt.data.digits(8, shift=pt.data.noise(0.1), seed=1, **given),
    lambda **given: pt.data.digits(8, shift=pt.data.noise(0.1, classes=2), seed=1, **given),
    lambda **given: pt.data.synthetic(1, 1, clients=4, seed=1, **given),
    lambda **given: pt.data.synthetic_regression(3, features=9, seed=1, **given),
    lambda **given: pt.data.split(X, Y, 5, pt.data.dirichlet(1.0), seed=1, **given),
])  # fmt: skip
def test_every_builder_holds_out_a_tenth_and_leaves_the_test_samples(make: Any) -> None:
    data, without = make(), make(validation=0)
    n = without.sizes("train")
    assert np.allclose(data.sizes("validation"), n / 10, atol=0.5 + len(Y) * 0.01)
    assert (data.sizes("train") + data.sizes("validation")).tolist() == n.tolist()
    for i in range(data.clients):
        assert all(map(torch.equal, data.client(i, "test"), without.client(i, "test")))


def test_shakespeare_holds_out_the_end_of_what_is_trained_on(tmp_path: Path) -> None:
    text = np.frombuffer(bytes(range(97, 117)) * 20, dtype=np.uint8)
    np.savez(
        tmp_path / "shakespeare.npz",
        text=text,
        offset=np.array([0, 350, 400]),
        role=np.array(["KING", "PAGE"]),
        play=np.array([0, 0], dtype=np.int16),
        play_name=np.array(["hamlet"]),
        alphabet=np.unique(text),
    )
    given = {"folder": tmp_path, "min_characters": 0, "length": 10, "stride": 1}
    data, without = pt.data.real("shakespeare", **given), pt.data.real("shakespeare", **given, validation=0)
    assert data.sizes("train").tolist() == [
        252 - 10,
        30,
    ]  # PAGE's 4 characters would be no window: it keeps them
    assert data.sizes("validation").tolist() == [28 - 10, 0]
    assert torch.equal(data.client(0, "test")[0], without.client(0, "test")[0])
    assert torch.equal(data.client(0, "train")[0], without.client(0, "train")[0][:242])


def test_everything_about_data_knows_the_split() -> None:
    data, without = made(), made(validation=0)
    assert "validation 17 samples, per client min 0, median 3.5, max 10; 1 clients have none" in repr(data)
    assert "validation" not in repr(without)
    assert data.fingerprint() != without.fingerprint()
    assert data.population.n_validation.tolist() == data.sizes("validation").tolist() == [10, 5, 2, 0]
    assert data.population.subset([2, 0]).n_validation.tolist() == [2, 10]
    part = data.subset([1, 0])
    assert all(rows(part, split, 1) == rows(data, split, 0) for split in SPLITS)
    assert data.owner(int(data.validation[1, 0])) == "client 'b' (validation)"
    altered = data.altered([0], lambda x, y, _: (x + 1000, y))
    assert rows(altered, "validation") == rows(data, "validation")
    noisy = data.shift(pt.data.noise(1.0))
    assert rows(noisy, "validation") != rows(data, "validation")
    counts = Population.make([3, 4], n_validation=[1, 0])
    assert (counts.sizes("validation").tolist(), counts.n_test.tolist()) == ([1, 0], [0, 0])
    with pytest.raises(check.Refused) as refused:
        Population.make([3, 4], n_validation=[1])
    assert refused.value.field == "n_validation"
    with pytest.raises(check.Refused) as refused:
        FederatedData.make(X, Y, [(0, 5)], validation=[(0, 1), (0, 1)])
    assert refused.value.field == "clients in validation"


@each("capacity", [None, pt.capacity.depth({"strong": 0, "weak": 1})])
def test_runs_count_validation_samples_and_never_train_on_them(capacity: Any, tmp_path: Path) -> None:
    def trained(data: FederatedData, out: Path | None) -> pt.Run:
        settings = {"rounds": 2, "steps": 2, "batch": 8, "capacity": capacity, "out": out}
        quiet = {"baselines": False, "progress": False, "report": False}
        return pt.federate(pt.models.mlp(64, 16, 12, 10), data, pt.fedavg(lr=0.1), **settings, **quiet)

    data = pt.data.digits(6, seed=0)
    run = trained(data, tmp_path / "run")
    assert [row["n_validation"] for row in run.clients] == data.sizes("validation").tolist()
    header = (tmp_path / "run" / "clients.csv").read_text().splitlines()[0].split(",")
    assert header[:4] == ["client", "n_train", "n_validation", "n_test"]
    x = data.x.clone()
    for start, n in data.validation.tolist():
        x[start : start + n] = 7.0
    other = trained(FederatedData.make(x, data.y, data.train, data.test), None)
    assert all(torch.equal(v, other.shared[k]) for k, v in run.shared.items())
