"""What NumPy and pandas hand over: float64, objects, words as labels, numbers as ids, tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import partita as pt
from partita.core import check
from partita.data import FederatedData
from support import each

X = np.arange(12.0).reshape(6, 2) / 3
Y = np.array([0, 1, 0, 1, 1, 0])
CLIENT = np.array([1, 1, 1, 20, 20, 3])
FRAME = pd.DataFrame({"a": X[:, 0], "b": X[:, 1]}, index=[9, 8, 7, 6, 5, 4])


def made(x: Any = X, y: Any = Y, client: Any = CLIENT) -> FederatedData:
    return pt.data.from_arrays(x, y, client, test=0.0, validation=0)


@each("x", [
    X,
    X.astype(object),
    X.astype(">f8"),
    X.tolist(),
    FRAME,
    FRAME.astype("float32"),
    FRAME.astype("Float64"),
    FRAME.astype(object),
    FRAME.to_numpy(),
])  # fmt: skip
def test_doubles_become_float32(x: Any) -> None:
    data = made(x)
    assert data.x.dtype == torch.float32
    order = np.argsort(CLIENT, kind="stable")
    np.testing.assert_array_equal(data.x.numpy(), X[order].astype(np.float32))


def test_tables_of_several_types_and_single_columns() -> None:
    frame = pd.DataFrame({"age": [50, 60, 70, 80, 90, 40], "smokes": Y == 1, "dose": X[:, 0]})
    data = made(frame, frame["smokes"], frame["age"])
    assert data.x.dtype == torch.float32
    assert data.client(0)[0].tolist() == [[40, 0, pytest.approx(10 / 3)]]
    assert data.names == ("40", "50", "60", "70", "80", "90")
    assert made(frame["dose"]).x.shape == (6,)
    assert made(X, frame[["smokes"]]).y.tolist() == made(X, Y).y.tolist()
    assert made(X, frame[["dose"]]).y.shape == (6, 1)  # numbers, as the output of a linear layer
    assert made(X, Y, frame[["age"]]).clients == 6


def test_a_tensor_of_float64_stays() -> None:
    assert made(torch.from_numpy(X)).x.dtype == torch.float64


@each("y", [
    np.array(["no", "yes", "no", "yes", "yes", "no"]),
    ["no", "yes", "no", "yes", "yes", "no"],
    np.array(["no", "yes", "no", "yes", "yes", "no"], object),
    np.array([b"no", b"yes", b"no", b"yes", b"yes", b"no"]),
    pd.Series(["no", "yes", "no", "yes", "yes", "no"]),
    pd.Series(["no", "yes", "no", "yes", "yes", "no"], dtype="category"),
    pd.Series(["no", "yes", "no", "yes", "yes", "no"], dtype="string"),
    pd.DataFrame({"ill": ["no", "yes", "no", "yes", "yes", "no"]}),
])  # fmt: skip
def test_words_become_classes_in_sorted_order(y: Any) -> None:
    data = made(X, y)
    assert data.y.tolist() == made(X, Y).y.tolist()
    assert data.y.dtype == torch.int64
    assert data.source["classes"] == ["no", "yes"]
    assert "2 classes, 0 to 1: 0 no, 1 yes" in repr(data)


def test_words_are_dealt_and_many_of_them_shortened() -> None:
    words = [f"word {i:02d}" for i in range(20)]
    data = pt.data.split(np.ones((40, 1)), words * 2, 2, pt.data.label_skew(10))
    assert data.source["classes"] == words
    assert repr(data).splitlines()[-1].endswith("7 word 07, ...")
    assert pt.data.digits(2).source.get("classes") is None


@each("y", [
    Y == 1,
    (Y == 1).tolist(),
    pd.Series(Y == 1),
    pd.Series(Y == 1, dtype="boolean"),
    (Y == 1).astype(object),
    pd.Series(Y, dtype="Int64"),
    pd.Categorical(Y),
    Y.astype(np.int8),
])  # fmt: skip
def test_booleans_and_whole_numbers_are_labels(y: Any) -> None:
    data = made(X, y)
    assert (data.y.dtype, data.y.tolist()) == (torch.int64, made().y.tolist())
    assert "classes" not in data.source


@each("client", [
    CLIENT,
    CLIENT.astype(np.uint8),
    CLIENT.astype(float),
    CLIENT.astype(np.float32),
    CLIENT.astype(object),
    CLIENT.tolist(),
    [float(i) for i in CLIENT],
    [np.int64(i) for i in CLIENT],
    pd.Series(CLIENT),
    pd.Series(CLIENT, dtype="Int64"),
    pd.Series(CLIENT, dtype="Float64"),
    pd.Categorical(CLIENT),
    torch.from_numpy(CLIENT),
])  # fmt: skip
def test_numbers_are_ids_in_their_order(client: Any) -> None:
    data = made(client=client)
    assert data.names == ("1", "3", "20")
    assert data.sizes().tolist() == [3, 1, 2]


@each("client", [
    np.array(["b", "b", "b", "a", "a", "c"]),
    pd.Series(["b", "b", "b", "a", "a", "c"]),
    pd.Series(["b", "b", "b", "a", "a", "c"], dtype="category"),
    np.array([b"b", b"b", b"b", b"a", b"a", b"c"]),
])  # fmt: skip
def test_words_are_ids(client: Any) -> None:
    assert made(client=client).names == ("a", "b", "c")


@each("field, given", [
    ("client", {"client": [1.0, 1.5, 1, 1, 2, 2]}),
    ("client", {"client": np.array([1.0, np.nan, 1, 1, 2, 2])}),
    ("client", {"client": pd.Series(["a", None, "a", "b", "b", "b"])}),
    ("dtype of y", {"y": pd.Series(["a", None, "a", "b", "b", "b"])}),
    ("y", {"y": ["a", 1, "a", "b", "b", "b"]}),
    ("dtype of x", {"x": FRAME.assign(b="words")}),
    ("x[1] of client '1'", {"x": FRAME.assign(b=[1, None, 3, 4, 5, 6])}),
    ("x[0]", {"x": X + 1e300}),
])  # fmt: skip
def test_what_is_missing_or_mixed_is_refused(field: str, given: dict[str, Any]) -> None:
    with pytest.raises(check.Refused) as refused:
        made(**given)
    assert refused.value.field == field


def test_masks_of_pandas_are_masks() -> None:
    held = pd.Series([True, False, False, True, False, False])
    for mask in (held, held.astype("boolean"), held.astype(object)):
        data = pt.data.from_arrays(X, Y, CLIENT, test=mask, validation=0)
        assert data.sizes("test").tolist() == [1, 0, 1]
