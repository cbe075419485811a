"""Models with several inputs: dictionaries and tuples of columns, from arrays, datasets and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import partita as pt
from partita.core import check
from partita.data import FederatedData, from_arrays, from_datasets, from_huggingface, from_npz, split
from support import each

ROWS = 12
IDS = np.arange(ROWS * 3, dtype=np.int32).reshape(ROWS, 3)
MASK = IDS % 2 == 0
NUMBERS = np.random.default_rng(0).normal(size=(ROWS, 2))
IMAGES = np.arange(ROWS * 4, dtype=np.uint8).reshape(ROWS, 2, 2)
Y = np.arange(ROWS) % 3
CLIENT = np.arange(ROWS) % 2


def named(**more: Any) -> FederatedData:
    x = {"ids": IDS, "mask": MASK, "numbers": NUMBERS, "image": IMAGES, "bytes": IDS.astype(np.uint8)}
    return from_arrays(x, Y, CLIENT, **more)


def test_a_row_holds_what_each_input_has_for_a_sample() -> None:
    data = named(test=0, validation=0)
    for client in (0, 1):
        x, y = data.client(client)
        rows = np.flatnonzero(client == CLIENT)
        assert isinstance(x, dict)
        assert torch.equal(x["ids"], torch.from_numpy(IDS[rows]).long())
        assert torch.equal(x["mask"], torch.from_numpy(MASK[rows]))
        assert torch.equal(x["numbers"], torch.from_numpy(NUMBERS[rows].astype(np.float32)))
        assert torch.equal(x["image"], torch.from_numpy(IMAGES[rows]).float() / 255)
        assert torch.equal(x["bytes"], torch.from_numpy(IDS[rows]).long())  # of two axes: no image
        assert torch.equal(y, torch.from_numpy(Y[rows]))


def test_a_tuple_of_arrays_is_several_inputs_and_a_list_of_arrays_is_rows() -> None:
    pair = from_arrays((IDS, NUMBERS), Y, CLIENT, test=0, validation=0)
    first, second = pair.client(1)[0]
    assert torch.equal(first, torch.from_numpy(IDS[1::2]).long())
    assert torch.equal(second, torch.from_numpy(NUMBERS[1::2].astype(np.float32)))
    rows = from_arrays([*IDS], Y, CLIENT, test=0, validation=0)
    assert torch.equal(rows.client(1)[0], first)
    numbers = from_arrays((1.0, 2.0), [0, 1], [0, 0], test=0, validation=0)
    assert torch.equal(numbers.client(0)[0], torch.tensor([1.0, 2.0]))


@each(
    ("x", "message"),
    [
        ({"ids": IDS, "mask": MASK[:-1]}, r"rows of x\['mask'\]=11: expected 12, as many as x\['ids'\]"),
        ((IDS, NUMBERS[:5]), r"rows of x\[1\]=5"),
        ({"ids": IDS, 3: MASK}, "a name of an input=3"),
        ({}, "at least one input"),
        ({"numbers": np.where(np.arange(ROWS) == 4, np.nan, 0.0)}, r"x\['numbers'\]\[4\] of client '0'=nan"),
        ({"words": np.array(["a"] * ROWS)}, r"dtype of x\['words'\]"),
    ],
)
def test_refusals_name_the_input(x: Any, message: str) -> None:
    with pytest.raises(check.Refused, match=message):
        from_arrays(x, Y, CLIENT)


def test_split_subset_and_hold_out_move_all_inputs_together() -> None:
    x = {"a": np.arange(ROWS), "b": 10.0 * np.arange(ROWS)}
    data = split(x, Y, 3, pt.data.iid(), validation=0, seed=1)
    for some in (data, data.subset([2, 0]), data.hold_out(0.3), data.subset([1]).hold_out(0.5)):
        for client in range(some.clients):
            for part in ("train", "validation", "test"):
                inputs, y = some.client(client, part)
                assert isinstance(inputs, dict)
                assert torch.equal(inputs["b"], 10.0 * inputs["a"])
                assert torch.equal(y, inputs["a"] % 3)


def test_labels_may_be_poisoned_and_inputs_may_not() -> None:
    data = named(test=0, validation=0)
    flipped = data.altered([1], pt.attack.label_flip().poison)
    for client in (0, 1):
        (x, y), (before, labels) = flipped.client(client), data.client(client)
        assert all(torch.equal(x[name], before[name]) for name in before)
        assert torch.equal(y, 2 - labels if client else labels)
    with pytest.raises(check.Refused, match="only other labels"):
        data.altered([0], lambda x, y, _: ({**x}, y))


def test_fingerprints_tell_names_and_values_of_inputs() -> None:
    data = named()
    assert data.fingerprint() == named().fingerprint()
    other = {"ids": IDS, "mask": MASK}
    prints = [
        data.fingerprint(),
        from_arrays(other, Y, CLIENT).fingerprint(),
        from_arrays({"ids": IDS, "masks": MASK}, Y, CLIENT).fingerprint(),
        from_arrays({"ids": IDS, "mask": ~MASK}, Y, CLIENT).fingerprint(),
        from_arrays((IDS, MASK), Y, CLIENT).fingerprint(),
    ]
    assert len(set(prints)) == len(prints)


def test_standardize_scales_real_numbers_and_images_or_one_of_them() -> None:
    data = named(test=0, validation=0)
    scaled = pt.data.standardize(data)
    pooled = torch.cat([scaled.client(i)[0]["numbers"] for i in (0, 1)])
    assert torch.allclose(pooled.mean(0), torch.zeros(2), atol=1e-6)
    assert torch.allclose(pooled.std(0, correction=0), torch.ones(2), atol=1e-6)
    assert torch.equal(scaled.client(0)[0]["ids"], data.client(0)[0]["ids"])
    image = torch.cat([scaled.client(i)[0]["image"] for i in (0, 1)])
    assert abs(float(image.mean())) < 1e-6
    only = pt.data.standardize(data, only="numbers")
    assert torch.equal(only.client(0)[0]["image"], data.client(0)[0]["image"])
    assert torch.equal(only.client(0)[0]["numbers"], scaled.client(0)[0]["numbers"])
    later = pt.data.standardize(data, like=scaled, only="numbers")
    assert torch.equal(later.client(1)[0]["numbers"], scaled.client(1)[0]["numbers"])
    with pytest.raises(check.Refused, match="not ids"):
        pt.data.standardize(data, only="ids")
    with pytest.raises(check.Refused, match=r"one of the inputs x\['ids'\]"):
        pt.data.standardize(data, only="number")


def test_shifts_refuse_several_inputs() -> None:
    with pytest.raises(check.Refused, match="one array in memory, for the shift negative"):
        named().shift(pt.data.negative(0.5))


def test_they_are_printed_one_by_one() -> None:
    text = repr(named())
    assert "x['mask']    bool, each [3]" in text
    assert "x['image']   uint8 (given as float32 in [0, 1]), each [2, 2]" in text


class Pairs(Dataset[Any]):
    """Samples of a client in one of the forms that datasets have."""

    def __init__(self, rows: np.ndarray, form: str) -> None:
        self.rows, self.form = rows, form

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        row = self.rows[i]
        ids, mask, label = torch.from_numpy(IDS[row]), MASK[row], int(Y[row])
        if self.form == "tuple":
            return (ids, mask), label
        inputs = {"ids": ids, "mask": mask}
        return {**inputs, "labels": label} if self.form == "huggingface" else (inputs, label)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("form", ["tuple", "dictionary", "huggingface"])
def test_datasets_have_samples_of_several_inputs(form: str) -> None:
    parts = {name: Pairs(np.flatnonzero(i == CLIENT), form) for i, name in enumerate(["ann", "bob"])}
    data = from_datasets(parts, test=0, validation=0)
    expected = from_arrays({"ids": IDS, "mask": MASK}, Y, CLIENT, test=0, validation=0)
    for client in (0, 1):
        (x, y), (inputs, labels) = data.client(client), expected.client(client)
        assert isinstance(inputs, dict)
        got = dict(zip(inputs, x)) if isinstance(x, tuple) else x
        assert all(torch.equal(got[name], inputs[name]) for name in inputs)
        assert torch.equal(y, labels)


def test_datasets_must_have_the_same_inputs() -> None:
    with pytest.raises(check.Refused, match="x of datasets"):
        from_datasets({"a": Pairs(np.arange(3), "tuple"), "b": Pairs(np.arange(3), "dictionary")})
    with pytest.raises(check.Refused, match="'labels' or 'label'"):
        from_datasets({"a": [{"ids": [1]}, {"ids": [2]}, {"ids": [3]}]})


def test_archives_give_several_arrays_under_their_own_names_or_those_of_arguments(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", ids=IDS, mask=MASK, y=Y, client=CLIENT)
    expected = from_arrays({"ids": IDS, "mask": MASK}, Y, CLIENT)
    data = from_npz(tmp_path / "data.npz", x=["ids", "mask"])
    assert data.fingerprint() == expected.fingerprint()
    renamed = from_npz(tmp_path / "data.npz", x={"input_ids": "ids"})
    assert list(renamed.x) == ["input_ids"]
    for wrong in (3, [], [1], {"a": 2}):
        with pytest.raises(check.Refused, match="a name, a list of names"):
            from_npz(tmp_path / "data.npz", x=wrong)


class Columns:
    """What `from_huggingface` needs of a datasets.Dataset."""

    features = None

    def __init__(self, **columns: Any) -> None:
        self.columns = columns
        self.column_names = list(columns)

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]


def test_tables_give_several_columns() -> None:
    sequences = [[1, 2, 3], [4], [5, 6], [7, 8]]
    table = Columns(input_ids=sequences, kind=[0, 1, 0, 1], labels=[0, 1, 1, 0], who=["a", "a", "b", "b"])
    data = from_huggingface(
        table, x=["input_ids", "kind"], y="labels", client="who", test=0, validation=0, pad={"input_ids": 9}
    )
    x, y = data.client(0)
    assert x["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert x["kind"].tolist() == [0, 1]
    assert y.tolist() == [0, 1]
    assert data.source["x"] == ["input_ids", "kind"]


class TwoTowers(torch.nn.Module):
    """A model with two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(40, 4)
        self.output = torch.nn.Linear(6, 3)

    def forward(self, ids: Tensor, numbers: Tensor, mask: Tensor | None = None) -> Tensor:
        words = self.embedding(ids) if mask is None else self.embedding(ids) * mask.unsqueeze(-1)
        return self.output(torch.cat([words.mean(-2), numbers], -1))


@pytest.mark.parametrize("form", ["tuple", "dictionary"])
def test_stacked_equals_alone_and_equals_plain_gradient_steps(form: str) -> None:
    torch.manual_seed(0)
    model = TwoTowers()
    inputs = {"ids": IDS, "numbers": NUMBERS, "mask": MASK}
    x = inputs if form == "dictionary" else tuple(inputs.values())
    data = from_arrays(x, Y, CLIENT, test=0, validation=0)
    runs = [
        pt.federate(model, data, pt.fedavg(lr=0.2), rounds=2, steps=2, executor=executor, progress=False)
        for executor in ("loop", "vmap", "graph")
    ]
    for run in runs[1:]:
        assert all(torch.allclose(run.shared[k], v, atol=1e-6) for k, v in runs[0].shared.items())
    now = {k: v.detach().clone() for k, v in model.named_parameters()}
    for _ in range(2):
        ends = []
        for client in (0, 1):
            tensors = [torch.from_numpy(a[client::2]) for a in (IDS, NUMBERS.astype(np.float32), MASK)]
            params = {k: v.clone().requires_grad_() for k, v in now.items()}
            for _ in range(2):
                output = torch.func.functional_call(model, params, (tensors[0].long(), *tensors[1:]))
                loss = torch.nn.functional.cross_entropy(output, torch.from_numpy(Y[client::2]))
                gradient = torch.autograd.grad(loss, list(params.values()))
                params = {
                    k: (v - 0.2 * g).detach().requires_grad_() for (k, v), g in zip(params.items(), gradient)
                }
            ends.append(params)
        now = {k: (ends[0][k] + ends[1][k]).detach() / 2 for k in now}
    assert all(torch.allclose(runs[0].shared[k], v, atol=1e-5) for k, v in now.items())
