"""Publishers' files as archives: small ones of the same forms, and that `real` reads what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import published
import pytest

import partita as pt
from partita.core import check
from partita.data import convert
from partita.data.sources import SOURCES, get
from support import each


class Characters:
    """A Hugging Face dataset as far as it is used: columns by name; ink is dark."""

    def __getitem__(self, name: str) -> Any:
        images = np.full((30, 28, 28), 255, np.uint8)
        images[:, 10:15, 10:15] = np.arange(30)[:, None, None]
        columns = {
            "image": [*images],
            "writer_id": [f"f{i % 3:04d}_00" for i in range(30)],
            "character": [i % 62 for i in range(30)],
        }
        return columns[name]


def converted(name: str, folder: Path) -> convert.Arrays:
    getattr(published, name)(folder)
    return SOURCES[name].convert({file.name: folder / file.name for file in SOURCES[name].files})


def test_mnist_has_its_writers(tmp_path: Path) -> None:
    arrays = converted("mnist", tmp_path)
    assert arrays["x_train"].shape == (40, 28, 28)
    assert arrays["x_test"].shape == (6, 28, 28)
    assert arrays["writer_train"].tolist() == [300 + i // 10 for i in range(40)]
    assert arrays["y_test"].tolist() == [0, 1, 2, 3, 4, 5]
    published.idx(tmp_path / "qmnist-train-labels-idx2-int.gz", np.ones((40, 8), np.int32))
    with pytest.raises(check.Refused, match="the labels of MNIST"):
        SOURCES["mnist"].convert({file.name: tmp_path / file.name for file in SOURCES["mnist"].files})


def test_cifar_has_its_batches_in_order_and_colours_last(tmp_path: Path) -> None:
    arrays = converted("cifar10", tmp_path)
    assert arrays["x_train"].shape == (40, 32, 32, 3)
    assert arrays["y_train"].tolist() == [i % 10 for i in range(20)] * 2
    assert arrays["class_name"].tolist() == ["airplane", "automobile"]
    blocks = dict(convert._members(tmp_path / "cifar-10-binary.tar.gz"))
    first = np.frombuffer(blocks["cifar-10-batches-bin/data_batch_1.bin"], np.uint8)[1:3073]
    np.testing.assert_array_equal(arrays["x_train"][0].transpose(2, 0, 1).reshape(-1), first)


def test_characters_have_bright_ink_and_a_test_part_for_each_writer() -> None:
    arrays = convert.femnist(Characters())
    assert arrays["x"][:, 0, 0].tolist() == [0] * 30
    assert arrays["x"][1, 12, 12] == 255 - 3
    assert arrays["writer"].tolist() == [i // 10 for i in range(30)]
    assert [int(arrays["is_test"][arrays["writer"] == i].sum()) for i in range(3)] == [1, 1, 1]
    assert arrays["writer_name"].tolist() == ["f0000_00", "f0001_00", "f0002_00"]


def test_speech_is_an_image_of_its_pitch_over_time(tmp_path: Path) -> None:
    arrays = converted("free_spoken_digits", tmp_path)
    x, y, long = arrays["x"], arrays["y"], arrays["speaker"] == 0
    assert (x.shape, x.dtype) == ((42, 32, 32), np.uint8)
    assert arrays["speaker_name"].tolist() == ["jackson", "theo"]
    bands = [int(x[y == digit].sum((0, 2), dtype=np.int64).argmax()) for digit in range(3)]
    assert bands[0] < bands[1] < bands[2]  # 400, 800 and 1600 Hz
    assert (x[long].max(1) > 0).all()  # 1.2 seconds fill all frames
    short = x[~long].max((0, 1)) > 0
    assert short.sum() == 11
    assert not short[:10].any()
    assert not short[-10:].any()


def test_lines_of_a_role_come_in_their_order(tmp_path: Path) -> None:
    arrays = converted("shakespeare", tmp_path)
    assert arrays["role"].tolist() == ["KING", "KING"]  # a page says too little, and ALL are nobody
    assert arrays["play_name"].tolist() == ["hamlet", "lear"]
    first = bytes(arrays["text"][: arrays["offset"][1]]).decode()
    assert first.splitlines() == [f"Line {i} of the king & his court," for i in range(40)]


def test_reviews_are_words_of_the_training_part(tmp_path: Path) -> None:
    arrays = converted("imdb", tmp_path)
    vocabulary = arrays["vocab"].tolist()
    assert vocabulary[:3] == ["<pad>", "<unk>", "the"]
    assert {"it's", "good", "movie"} < set(vocabulary)
    assert "test" not in vocabulary
    words = [vocabulary[i] for i in arrays["x"][arrays["is_test"]][0] if i]
    assert words == ["it's", "a", "neg", "movie", "<unk>"]
    assert arrays["x"].shape == (24, 128)
    assert arrays["y"].tolist() == ([0] * 6 + [1] * 6) * 2
    assert arrays["rating"].tolist() == ([2] * 6 + [9] * 6) * 2
    assert arrays["movie_imdb_id"].tolist() == ["tt0000000", "tt0000001"]
    assert arrays["movie"][:6].tolist() == [0, 0, 0, 1, 1, 1]


def test_tables_of_patients(tmp_path: Path) -> None:
    voice = converted("parkinsons_telemonitoring", tmp_path)
    assert voice["feature_name"].tolist() == ["age", "sex", "test_time", "Jitter(%)"]
    assert voice["x"][1].tolist() == pytest.approx([61, 1, 1.5, 0.001])
    assert voice["y"][1].tolist() == [21.25, 31.5]
    assert voice["subject"].tolist() == [1 + i // 5 for i in range(15)]
    heart = converted("heart_disease", tmp_path)
    assert heart["hospital"].tolist() == [0] * 5 + [1] * 6 + [2] * 7 + [3] * 8
    assert heart["y"][:5].tolist() == [0, 1, 1, 1, 1]
    assert np.isnan(heart["x"][:, [5, 11]]).all()
    assert heart["x"][0, :3].tolist() == [60, 1, 0]


NEEDED: dict[str, dict[str, Any]] = {
    "cifar10": {"clients": 2, "partition": pt.data.iid()},
    "shakespeare": {"min_characters": 0, "length": 20},
    "imdb": {"min_samples": 0},
}


@each("name", SOURCES)
def test_what_is_written_can_be_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, out = tmp_path / "files", tmp_path / "out"
    files.mkdir()
    monkeypatch.setattr("partita.data.sources._loaded", lambda *_: Characters())
    monkeypatch.setattr("partita.data.sources._check", lambda *_: None)  # they are no published files
    if name != "femnist":
        getattr(published, name)(files)
    path = get(name, out, files=files)
    assert [p.name for p in out.iterdir()] == [path.name] == [f"{name}.npz"]
    data = pt.data.real(name, folder=out, **NEEDED.get(name, {}))
    assert data.clients >= 2
    assert data.sizes("train").min() > 0
    assert data.sizes("test").sum() > 0


@each("name", [name for name in SOURCES if name != "femnist"])
def test_other_files_are_refused(name: str, tmp_path: Path) -> None:
    files = {file.name: tmp_path / file.name for file in SOURCES[name].files}
    for path in files.values():
        published.zipped(path, {"readme": "nothing else"})
    with pytest.raises((check.Refused, OSError)):
        SOURCES[name].convert(files)


@pytest.mark.skipif(not pt.data.real.__globals__["data_folder"]().is_dir(), reason="no real data are here")
@each("name", SOURCES)
def test_archives_that_are_here_have_the_same_arrays(name: str, tmp_path: Path) -> None:
    here = pt.data.real.__globals__["data_folder"]() / f"{name}.npz"
    if not here.is_file():
        return
    made = convert.femnist(Characters()) if name == "femnist" else converted(name, tmp_path)
    with np.load(here) as archive:
        for key in made.keys() & set(archive.files):
            assert made[key].dtype.kind == archive[key].dtype.kind, key
            assert made[key].ndim == archive[key].ndim, key
