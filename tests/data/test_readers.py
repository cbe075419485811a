"""Files and the Hugging Face library: round trips, and damaged files that are refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from partita.data import from_arrays, from_huggingface, from_leaf, from_npz
from support import each

X = np.arange(24, dtype=np.float32).reshape(8, 3)
Y = np.array([0, 1, 2, 0, 1, 2, 0, 1], dtype=np.uint8)
CLIENT = np.array(["b", "b", "a", "a", "a", "c", "b", "b"])
TEST = np.array([False, True, False, False, True, False, True, False])


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "data.npz"
    np.savez_compressed(path, x=X, label=Y, client=CLIENT, is_test=TEST)
    return path


def test_npz_equals_arrays(archive: Path) -> None:
    data = from_npz(archive, y="label", test="is_test")
    assert data.fingerprint() == from_arrays(X, Y, CLIENT, test=TEST).fingerprint()
    assert from_npz(archive, y="label", test=0.5).sizes("test").tolist() == [2, 2, 0]
    assert from_npz(archive, y="label").sizes("test").tolist() == [1, 1, 0]
    assert json.dumps(data.source)


def test_npz_names_missing_keys(archive: Path) -> None:
    with pytest.raises(ValueError, match="no key 'y'; it has x, label, client, is_test"):
        from_npz(archive)


def test_damaged_files_are_refused(archive: Path, tmp_path: Path) -> None:
    content = archive.read_bytes()
    cases = {
        "truncated": content[: len(content) // 2],
        "changed": content[:80] + bytes(40) + content[120:],
        "empty": b"",
        "text": b"a,b\n1,2\n",
        "pickle": pickle.dumps({"x": 1}),
    }
    for name, damaged in cases.items():
        path = tmp_path / f"{name}.npz"
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=name):
            from_npz(path, y="label")
    with pytest.raises(ValueError, match="expected a file that exists"):
        from_npz(tmp_path / "nowhere.npz")


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


def test_pickled_objects_are_never_opened(tmp_path: Path) -> None:
    path, mark = tmp_path / "pickled.npz", tmp_path / "mark"
    np.savez(path, x=np.array([Trap(mark)] * 2, dtype=object), y=[0, 1], client=[0, 1])
    with pytest.raises(ValueError, match="key 'x' is damaged or pickled"):
        from_npz(path)
    single = tmp_path / "single.npz"
    with single.open("wb") as file:
        np.save(file, X)
    with pytest.raises(ValueError, match="not a single array"):
        from_npz(single)
    assert not mark.exists()


def leaf(users: dict[str, tuple[list[Any], list[Any]]]) -> str:
    return json.dumps(
        {
            "users": list(users),
            "num_samples": [len(x) for x, _ in users.values()],
            "user_data": {name: {"x": x, "y": y} for name, (x, y) in users.items()},
        }
    )


def test_leaf_folders(tmp_path: Path) -> None:
    for split, n in (("train", 3), ("test", 1)):
        (tmp_path / split).mkdir()
        for part, user in enumerate(("w2", "w1")):
            x = [[part + 0.25] * 4] * n
            (tmp_path / split / f"{part}.json").write_text(leaf({user: (x, [part] * n)}))
    (tmp_path / "test" / "2.json").write_text(leaf({"w3": ([[9.0] * 4], [5])}))
    data = from_leaf(tmp_path / "train", tmp_path / "test", shape=(2, 2))
    assert data.names == ("w1", "w2", "w3")
    assert data.sizes().tolist() == [3, 3, 0]
    assert data.sizes("test").tolist() == [1, 1, 1]
    assert data.x.shape == (9, 2, 2)
    assert data.x.dtype == torch.float32
    assert data.client(0)[0][0, 0, 0] == 1.25
    assert data.client(2, "test")[1].tolist() == [5]


def test_leaf_file_with_a_fraction_and_an_empty_user(tmp_path: Path) -> None:
    file = tmp_path / "all.json"
    file.write_text(
        leaf({"a": ([[1.0], [2.0], [3.0], [4.0]], [0, 1, 0, 1]), "b": ([], []), "c": ([[5.0]], [1])})
    )
    data = from_leaf(file, 0.5)
    assert data.names == ("a", "b", "c")
    assert data.sizes().tolist() == [2, 0, 1]
    assert from_leaf(file).sizes("test").tolist() == [1, 0, 0]


def test_leaf_text(tmp_path: Path) -> None:
    file = tmp_path / "text.json"
    file.write_text(leaf({"a": (["abc", "bca"], ["a", "b"])}))
    data = from_leaf(file, 0, alphabet="abc")
    assert data.client(0)[0].tolist() == [[0, 1, 2], [1, 2, 0]]
    assert data.client(0)[1].tolist() == [0, 1]
    with pytest.raises(ValueError, match="text needs alphabet"):
        from_leaf(file)
    with pytest.raises(ValueError, match="x of user 'a'='c'"):
        from_leaf(file, alphabet="ab")


@each(
    ("text", "message"),
    [
        ("{", "LEAF's users"),
        ("[]", "LEAF's users"),
        ('{"users": ["a"], "user_data": {}}', "KeyError: 'a'"),
        (leaf({"a": ([[1.0]], [0, 1])}), "samples in y of user 'a'=2"),
        (leaf({"a": ([[1.0]], [0]), "b": ([[1.0, 2.0]], [0])}), "one shape for all users"),
        (leaf({"a": ([[1.0], [float("nan")]], [0, 1])}), r"x\[1\] of client 'a'=nan"),
        (leaf({}), "at least one sample"),
    ],
)
def test_leaf_refusals(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        from_leaf(file)
    with pytest.raises(ValueError, match="a folder of them"):
        from_leaf(tmp_path / "none")


def test_leaf_shape_must_fit(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(leaf({"a": ([[1.0, 2.0, 3.0]], [0])}))
    with pytest.raises(ValueError, match=r"shape=\(2, 2\): expected 3 numbers"):
        from_leaf(file, shape=(2, 2))


@pytest.fixture
def hub() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"features": X, "label": Y, "user": CLIENT, "held": TEST})


def test_huggingface_equals_arrays(hub: Any) -> None:
    data = from_huggingface(hub, x="features", y="label", client="user", test="held")
    assert data.fingerprint() == from_arrays(X, Y, CLIENT, test=TEST).fingerprint()
    formatted = from_huggingface(
        hub.with_format("torch"), x="features", y="label", client="user", test="held"
    )
    assert formatted.fingerprint() == data.fingerprint()
    both = from_huggingface(
        hub.select(np.flatnonzero(~TEST)),
        x="features",
        y="label",
        client="user",
        test=hub.select(np.flatnonzero(TEST)),
    )
    assert both.fingerprint() == data.fingerprint()
    assert from_huggingface(hub, x="features", y="label", client="user").sizes("test").tolist() == [1, 1, 0]


def test_huggingface_images_stay_uint8() -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "image": datasets.Array2D((2, 2), "uint8"),
            "y": datasets.ClassLabel(2),
            "c": datasets.Value("int32"),
        }
    )
    rows = {"image": np.full((4, 2, 2), 200, np.uint8), "y": [0, 1, 0, 1], "c": [7, 7, 3, 3]}
    dataset = datasets.Dataset.from_dict(rows, features=features)
    for form in (None, "numpy"):
        data = from_huggingface(dataset.with_format(form), x="image", y="y", client="c")
        assert data.x.dtype == torch.uint8
        assert data.x.shape == (4, 2, 2)
        assert data.names == ("3", "7")


def test_huggingface_refusals(hub: Any) -> None:
    with pytest.raises(ValueError, match=r"column='lable'.*did you mean 'label'"):
        from_huggingface(hub, x="features", y="lable", client="user")
    with pytest.raises(ValueError, match="of a DatasetDict, one split"):
        from_huggingface({"train": hub}, x="features", y="label", client="user")
    with pytest.raises(ValueError, match="dtype of column 'user'"):
        from_huggingface(hub, x="features", y="user", client="user")
