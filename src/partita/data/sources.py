"""Where the datasets of `real` come from, and getting them: download, check, convert, write one archive."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from partita.core import check
from partita.data import convert
from partita.data.readers import path_of
from partita.data.real import data_folder

Progress = Callable[[str, int, int | None], None]
"""Hears the name of a file, how many bytes of it are here, and of how many (None: unknown)."""
HUB = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
_PIECE, _PATIENCE = 1 << 18, 60.0  # bytes read at a time; seconds without an answer


class File(NamedTuple):
    """A file of a publisher, and its MD5 where one is published."""

    url: str
    md5: str = ""

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.url.rpartition("/")[2]


class Source(NamedTuple):
    """A dataset that anyone can get.

    about    what it is; `clients` and `samples` say how many there are
    page     where its publishers describe it
    convert  files by name, or a loaded dataset -> the arrays of the archive
    files    what is downloaded, or
    hub      the dataset of the Hugging Face hub that is loaded
    """

    about: str
    clients: str
    samples: str
    page: str
    convert: Callable[[Any], convert.Arrays]
    files: tuple[File, ...] = ()
    hub: str = ""


_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_QMNIST = "https://raw.githubusercontent.com/facebookresearch/qmnist/master/"
_UCI = "https://archive.ics.uci.edu/static/public/"
_GITHUB = "https://github.com/{}/archive/refs/heads/master.zip"

SOURCES: dict[str, Source] = {
    "femnist": Source(
        "handwritten characters, 62 classes",
        "3,597 writers",
        "814,277 images of 28 × 28",
        "https://huggingface.co/datasets/flwrlabs/femnist",
        convert.femnist,
        hub="flwrlabs/femnist",
    ),
    "mnist": Source(
        "handwritten digits with their writers",
        "539 writers",
        "70,000 images of 28 × 28",
        "https://github.com/facebookresearch/qmnist",
        convert.mnist,
        (
            File(_MNIST + "train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            File(_MNIST + "train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
            File(_MNIST + "t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
            File(_MNIST + "t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
            File(_QMNIST + "qmnist-train-labels-idx2-int.gz", "0058f8dd561b90ffdd0f734c6a30e5e4"),
            File(_QMNIST + "qmnist-test-labels-idx2-int.gz", "5b5b05890a5e13444e108efe57b788aa"),
        ),
    ),
    "cifar10": Source(
        "photographs, 10 classes",
        "clients by a partitioner",
        "60,000 images of 32 × 32 × 3",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        convert.cifar10,
        (
            File(
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"
            ),
        ),
    ),
    "free_spoken_digits": Source(
        "spoken digits as log-mel images",
        "6 speakers",
        "3,000 images of 32 × 32",
        "https://github.com/Jakobovski/free-spoken-digit-dataset",
        convert.free_spoken_digits,
        (File(_GITHUB.format("Jakobovski/free-spoken-digit-dataset")),),
    ),
    "shakespeare": Source(
        "lines of every role in 37 plays, to predict the next character",
        "about 1,000 roles",
        "4.3 million characters",
        "https://github.com/TheMITTech/shakespeare",
        convert.shakespeare,
        (File(_GITHUB.format("TheMITTech/shakespeare")),),
    ),
    "imdb": Source(
        "movie reviews as the ids of 128 words, positive or negative",
        "7,036 movies",
        "50,000 reviews",
        "https://ai.stanford.edu/~amaas/data/sentiment/",
        convert.imdb,
        (
            File(
                "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
                "7c2ac02c03563afcf9b574c7e56c153a",
            ),
        ),
    ),
    "parkinsons_telemonitoring": Source(
        "voice measurements, to predict a score of Parkinson's disease",
        "42 patients",
        "5,875 recordings of 19 features",
        "https://archive.ics.uci.edu/dataset/189/parkinsons+telemonitoring",
        convert.parkinsons_telemonitoring,
        (File(_UCI + "189/parkinsons+telemonitoring.zip"),),
    ),
    "heart_disease": Source(
        "clinical attributes, heart disease or not",
        "4 hospitals",
        "920 patients of 13 features",
        "https://archive.ics.uci.edu/dataset/45/heart+disease",
        convert.heart_disease,
        (File(_UCI + "45/heart+disease.zip"),),
    ),
}


def get(
    name: str,
    folder: str | PathLike[str] | None = None,
    *,
    files: str | PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Download a dataset, write it as NAME.npz to the folder where `real` looks, and return that file.

    folder    another folder
    files     a folder with the publishers' files, where they were downloaded by other means
    progress  hears how far a download is
    """
    source = SOURCES[check.choice("name", name, SOURCES)]
    target = data_folder(folder) / f"{name}.npz"
    target.parent.mkdir(parents=True, exist_ok=True)
    raw = target.parent / f".{name}" if files is None else path_of("files", files)
    if files is not None and not raw.is_dir():
        raise check.fail("files", str(files), "a folder that exists")
    if source.hub:
        arrays: dict[str, Any] = source.convert(_loaded(name, source.hub, None if files is None else raw))
    else:
        for file in source.files:
            if files is None:
                _download(name, file, raw, progress)
            elif not (raw / file.name).is_file():
                raise check.fail("files", str(files), f"a folder with {file.name}, from {file.url}")
            _check(raw / file.name, file)
        arrays = source.convert({file.name: raw / file.name for file in source.files})
    partial = target.with_suffix(".partial.npz")
    np.savez_compressed(partial, **arrays)
    os.replace(partial, target)
    if files is None and raw.is_dir():
        shutil.rmtree(raw)
    return target


def _download(name: str, file: File, folder: Path, progress: Progress | None) -> None:
    """Bring a file into the folder, whole or not at all; one that is there already stays."""
    target = folder / file.name
    if target.is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    request = urllib.request.Request(file.url, headers={"User-Agent": "partita"})
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE) as answer, partial.open("wb") as out:
            length = answer.headers.get("Content-Length")
            total, done = int(length) if length else None, 0
            while piece := answer.read(_PIECE):
                out.write(piece)
                done += len(piece)
                if progress:
                    progress(file.name, done, total)
        if total is not None and done != total:
            raise OSError(f"only {done} of {total} bytes came")
    except OSError as error:  # of urllib too: no network, no such file, too slow
        partial.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()  # where nothing else has come
        raise _offline(name, file.url, getattr(error, "reason", error)) from error
    os.replace(partial, target)


def _check(path: Path, file: File) -> None:
    """Refuse a file that is not the one that was published, and remove a download so that it comes anew."""
    if not file.md5:
        return
    with path.open("rb") as opened:
        found = hashlib.file_digest(opened, "md5").hexdigest()
    if found != file.md5:
        if path.parent.name.startswith("."):
            path.unlink()
        raise check.fail("file", str(path), f"the file of {file.url}: its MD5 is {file.md5}, not {found}")


def _loaded(name: str, hub: str, folder: Path | None) -> Any:
    if folder is None and not _reachable(HUB):
        os.environ["HF_HUB_OFFLINE"] = "1"  # its cache may have it; it would try again and again
    try:
        import datasets
    except ImportError:
        reason = f"{name} comes from the Hugging Face hub"
        raise check.fail("name", name, "the package datasets: pip install 'partita[hf]'", reason) from None
    try:
        return datasets.load_dataset(hub if folder is None else str(folder), split="train")
    except Exception as error:  # the libraries below have many kinds of their own
        address = f"{HUB}/datasets/{hub}"
        raise _offline(name, address if folder is None else str(folder), check.reason(error)) from error


def _reachable(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=_PATIENCE):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def _offline(name: str, address: str, reason: object) -> OSError:
    return OSError(
        f"{name}: could not read {address} ({reason}); where there is no network, bring the files of "
        f"`partita data list {name}` to a folder and use `partita data get {name} --from FOLDER`"
    )
