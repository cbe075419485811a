"""What cannot be stored as it is meant is refused, with the field, the value and what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import partita as pt
from partita.data import FederatedData
from support import each

CLIENT = [0, 0, 0, 1, 1, 1]
LABELS = [0, 1, 0, 1, 0, 1]
X = np.arange(12, dtype=np.float32).reshape(6, 2)
HIDDEN = np.zeros((6, 2), dtype=bool)
HIDDEN[4, 1] = True
BIG = 2**63 + 5


class Sparse:
    """What a matrix of SciPy looks like."""

    nnz = 2

    def toarray(self) -> np.ndarray:
        return X


class Items(torch.utils.data.Dataset):
    """Four times the same pair."""

    def __init__(self, x: Any, y: Any = 0) -> None:
        self.pair = x, y

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        return self.pair


WRONG: dict[str, tuple[Any, str]] = {
    "masked": (np.ma.masked_array(X, HIDDEN), r"^x='masked entries': expected all entries: fill them in"),
    "a masked row": ([*X[:5], np.ma.masked_array(X[5], [True, False])], r"^x='masked entries'"),
    "masked, deep": ([[[np.ma.masked, 1.0]]] * 6, r"^x='masked entries'"),
    "uint64": (np.full((6, 2), BIG, np.uint64), rf"^x\[0\]={BIG}: expected whole numbers up to {2**63 - 1}"),
    "uint64 tensor": (torch.from_numpy(np.array([[1]] * 5 + [[BIG]], np.uint64)), rf"^x\[5\]={BIG}: expect"),
    "large": ([[BIG]] * 6, rf"^x\[0\]={BIG}: expected whole numbers"),
    "large beside small": ([[BIG, -1]] * 6, rf"^x={BIG}: expected whole numbers up to"),
    "larger": ([[2**70, 1]] * 6, r"^dtype of x='object': expected numbers .* of one type"),
    "complex": (X.astype(complex), r"^dtype of x='complex128': expected real numbers"),
    "complex tensor": (
        torch.ones(6, 2, dtype=torch.complex64),
        r"^x='torch.complex64 .*expected real numbers",
    ),
    "loader": (
        torch.utils.data.DataLoader(Items(X[0])),
        r"^x='DataLoader': .*from_datasets.*loader\.dataset",
    ),
    "dataset": (Items(X[0]), r"^x='Items': expected an array .*from_datasets takes a Dataset"),
    "objects": (np.array([[1, None]] * 6), r"^dtype of x='object': .*fill in what is missing"),
    "structured": (np.zeros(6, [("a", float), ("b", int)]), r"^dtype of x=.*expected a plain array"),
    "dates": (np.zeros(6, "datetime64[D]"), r"^dtype of x='datetime64\[D\]': expected numbers: days"),
    "durations": (np.zeros(6, "timedelta64[s]"), r"^dtype of x='timedelta64\[s\]': expected numbers"),
    "bytes": (np.array([b"a"] * 6), r"^dtype of x='\|S1': expected numbers \(encode text"),
    "SciPy": (Sparse(), r"^x='Sparse': expected a dense array, such as its toarray\(\)"),
    "too large for float32": ([[1e300, 1.0]] * 6, r"^x\[0\]='1e\+300': expected numbers up to 3.4e\+38"),
    "one number": (np.array(3.0), r"^x='torch.float(32|64) with 0 axes'"),
    "meta": (torch.ones(6, 2, device="meta"), r"^x='a tensor without numbers"),
}


@each("name", WRONG)
def test_features_that_are_refused(name: str) -> None:
    values, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        pt.data.from_arrays(values, LABELS, CLIENT)
    with pytest.raises(ValueError, match=message):
        FederatedData.make(values, LABELS, [(0, 6)])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^x='a nested tensor': expected a dense tensor"):
        pt.data.from_arrays(torch.nested.nested_tensor([torch.ones(2)] * 6), LABELS, CLIENT)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^x='torch.qint8': expected a tensor with its numbers"):
        pt.data.from_arrays(torch.quantize_per_tensor(torch.ones(6, 2), 0.1, 0, torch.qint8), LABELS, CLIENT)


@pytest.mark.skipif(np.finfo(np.longdouble).maxexp <= 1024, reason="long doubles are doubles here")
def test_long_doubles() -> None:
    held = pt.data.from_arrays(X.astype(np.longdouble), LABELS, CLIENT)
    assert held.x.dtype == torch.float32
    with pytest.raises(ValueError, match=r"^x\[0\]='1e\+4000': expected numbers up to 3.4e\+38"):
        pt.data.from_arrays(np.full((6, 2), np.longdouble("1e4000")), LABELS, CLIENT)


@each(
    ("y", "message"),
    [
        (np.ma.masked_array(LABELS, [0, 0, 1, 0, 0, 0]), "^y='masked entries'"),
        ([0, 1, np.ma.masked, 1, 0, 1], "^y='masked entries'"),
        (np.full(6, BIG, np.uint64), rf"^y\[0\]={BIG}: expected whole numbers up to"),
        ([BIG] * 6, rf"^y\[0\]={BIG}: expected whole numbers up to"),
        (np.ones(6, complex), "^dtype of y='complex128': expected real numbers"),
        ([1e300] * 6, r"^y\[0\]='1e\+300': expected numbers up to 3.4e\+38"),
        (np.array([0, None] * 3), "^dtype of y='object'"),
        (torch.ones(6, device="meta"), "^y='a tensor without numbers"),
    ],
)
def test_targets_that_are_refused(y: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pt.data.from_arrays(X, y, CLIENT)


def test_labels_with_fractions_are_numbers_to_predict() -> None:
    data = pt.data.from_arrays(X, np.array([0.0, 1.5] * 3), CLIENT, test=0.0)
    assert data.y.tolist() == [0.0, 1.5] * 3
    with pytest.raises(ValueError, match=r"^dtype of y='torch.float32': expected whole numbers with loss"):
        pt.federate(pt.models.mlp(2, 3), data, pt.fedavg(lr=0.1), rounds=1, loss="cross_entropy")


@each(
    ("client", "message"),
    [
        (np.ma.masked_array(CLIENT, [0, 0, 1, 0, 0, 0]), "^client='masked entries'"),
        (["a", "b", float("nan")] * 2, "^client=nan: expected a whole number or a string"),
        (["a", "b", 1.5] * 2, r"^client=1.5: expected a whole number or a string"),
    ],
)
def test_clients_that_are_refused(client: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pt.data.from_arrays(X, LABELS, client)


def test_a_masked_choice_of_test_rows_is_refused() -> None:
    held = np.ma.masked_array([True, False] * 3, [0, 0, 1, 0, 0, 0])
    with pytest.raises(ValueError, match=r"^test='masked entries'"):
        pt.data.from_arrays(X, LABELS, CLIENT, test=held)


@each(
    ("items", "message"),
    [
        (Items(np.ma.masked_array([1.0, 2.0], [False, True])), r"^x of datasets\['a'\]='masked entries'"),
        (Items(X[0], np.ma.masked), r"^y of datasets\['a'\]='masked entries'"),
        (Items(np.array([BIG], np.uint64)), rf"^x of datasets\['a'\]\[0\]={BIG}: expected whole numbers"),
        (Items(np.array([1e300])), r"^x of datasets\['a'\]\[0\]='1e\+300': expected numbers up to"),
        (Items(X[0], 1j), r"^dtype of y of datasets\['a'\]='complex128': expected real numbers"),
        (Items(Sparse()), r"^x of datasets\['a'\]='Sparse': expected a dense array"),
        (Items(torch.ones(2, device="meta")), r"^x='a tensor without numbers"),
    ],
)
def test_samples_of_a_dataset_that_are_refused(items: Items, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pt.data.from_datasets({"a": items})


@each(
    ("arrays", "message"),
    [
        ({"x": np.full((6, 2), BIG, np.uint64)}, rf"^x\[0\]={BIG}: expected whole numbers"),
        ({"y": np.full(6, BIG, np.uint64)}, rf"^y\[0\]={BIG}: expected whole numbers"),
        ({"x": X.astype(complex)}, "^dtype of x='complex128'"),
        ({"x": np.zeros(6, [("a", float)])}, "^dtype of x=.*a plain array"),
    ],
)
def test_archives_that_are_refused(arrays: dict[str, Any], message: str, tmp_path) -> None:
    np.savez(tmp_path / "some.npz", **{"x": X, "y": np.array(LABELS), "client": np.array(CLIENT)} | arrays)
    with pytest.raises(ValueError, match=message):
        pt.data.from_npz(tmp_path / "some.npz")


@each(
    ("values", "stored"),
    [
        (np.ma.masked_array(X), torch.float32),  # nothing is masked
        (np.ma.masked_array(X, np.zeros((6, 2), bool)), torch.float32),
        ([np.ma.masked_array(row) for row in X], torch.float32),
        (X.astype(np.uint64), torch.int64),
        (X.astype(np.longlong), torch.int64),
        (X.astype(np.ulonglong), torch.int64),
        (np.full((6, 2), 2**63 - 1, np.uint64), torch.int64),
        (X.astype(">f8"), torch.float32),
        (X[::-1], torch.float32),
        (X > 3, torch.float32),
        (X.astype(np.float16), torch.float32),
        (torch.tensor(X).bfloat16(), torch.float32),
        (torch.full((6, 2), 1e300, dtype=torch.float64), torch.float64),
        ([[1e38, -1e38]] * 6, torch.float32),
        ([[float(BIG), 1.0]] * 6, torch.float32),  # numbers, not counts: as near as float32 comes
        (torch.ones(6, 2, dtype=torch.complex64).conj().imag, torch.float32),
        (torch.tensor(X, requires_grad=True), torch.float32),
    ],
)
def test_what_is_taken_keeps_its_values(values: Any, stored: torch.dtype) -> None:
    data = pt.data.from_arrays(values, LABELS, CLIENT, test=0.0)
    plain = (
        values.detach().resolve_neg().to(stored).numpy()
        if isinstance(values, torch.Tensor)
        else np.asarray(values)
    )
    assert data.x.dtype == stored
    np.testing.assert_array_equal(data.x.numpy(), plain.astype(data.x.numpy().dtype))
