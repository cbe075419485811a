"""Real datasets with natural clients, read from a folder of NumPy archives."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.core import check, draws
from partita.data import arrays
from partita.data.arrays import IntArray
from partita.data.build import (
    Partition,
    Rows,
    assemble,
    describe,
    from_arrays,
    held_out,
    numbered,
    owners,
    split,
)
from partita.data.federated import SPLITS, FederatedData
from partita.data.forms import (
    Form,
    increasing,
    labels,
    read_forms,
    refuse,
    same_shape,
    within,
)
from partita.data.partitioners import deal, dirichlet
from partita.data.readers import path_of
from partita.data.validation import SHARE

VARIABLE = "PARTITA_DATA"
SAMPLES = Form("numbers", "sample", axes=None)
COLOURED = Form("numbers", "sample", axes=4)
TABLE = Form("numbers", "sample", axes=2)
IDS = Form("whole numbers", "sample")
Arrays = dict[str, NDArray[Any]]


def real(name: str, *, folder: str | PathLike[str] | None = None, **options: Any) -> FederatedData:
    """Return a real dataset by name, from `folder` (None: the environment variable PARTITA_DATA, or a cache).

    `partita data get NAME` brings it there, and `partita data list` tells what there is.

    name                       clients    options besides `clients`, `validation` and `seed`
    femnist                    writers    min_samples=0
    mnist                      writers    test=0.2; with partition=... the 70,000 digits dealt to `clients`
    cifar10                    none       partition=dirichlet(0.1), test=0.2 or "file"; `clients` is needed
    free_spoken_digits         speakers
    shakespeare                roles      min_characters=2000, length=80, stride=None (length), test=0.2
    imdb                       movies     min_samples=20, test=0.2; with partition=... all reviews dealt
    parkinsons_telemonitoring  patients   target="total_UPDRS" or "motor_UPDRS", test=0.2
    heart_disease              hospitals  test=0.2

    `clients` is the number of clients, for natural clients a random choice among them (None: all);
    `validation` is the share of each client's training samples that is held out (0.1; of shakespeare the last
    lines before those for testing); `seed` draws that choice and the splits.
    """
    reader = READERS[check.choice("name", name, READERS)]
    takes = list(inspect.signature(reader).parameters)[1:]
    for option, value in options.items():
        if option not in takes:
            reason = f"{name} has no such option{check.meant(option, takes)}"
            raise check.fail(option, value, f"one of {', '.join(takes)}", reason)
    check.integer("seed", options.get("seed", 0), low=0)
    place = data_folder(folder)
    path = place / f"{name}.npz"
    if not path.is_file():
        how = f"`partita data get {name}` brings it; the environment variable {VARIABLE} names another folder"
        raise check.fail("folder", str(place), f"a folder with a file {path.name}: {how}")
    return reader(path, **options)


def data_folder(folder: str | PathLike[str] | None = None) -> Path:
    """Return the folder of the archives: the one given, that of PARTITA_DATA, or partita in the cache."""
    if folder is not None:
        return path_of("folder", folder)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(VARIABLE) or Path(cache) / "partita")


def _femnist(
    path: Path,
    *,
    min_samples: int = 0,
    validation: float = SHARE,
    clients: int | None = None,
    seed: int = 0,
) -> FederatedData:
    d = _named(path, "writer", SAMPLES, is_test=Form("True and False", "sample"))
    d, names, _ = _natural(d, "writer", clients, seed, min_samples)
    source = {"name": "femnist", "min_samples": min_samples, "clients": clients, "seed": seed}
    given: dict[str, Any] = {"test": d["is_test"], "validation": validation, "seed": seed}
    return from_arrays(d["x"], d["y"], d["writer"], **given, names=names, source=source)


def _mnist(
    path: Path,
    *,
    clients: int | None = None,
    partition: Partition | None = None,
    test: float = 0.2,
    validation: float = SHARE,
    seed: int = 0,
) -> FederatedData:
    if partition is not None:
        d = _train_and_test(path, SAMPLES)
        x, y = (np.concatenate([d[f"{key}_train"], d[f"{key}_test"]]) for key in "xy")
        given: dict[str, Any] = {"test": test, "validation": validation, "seed": seed}
        return split(x, y, _needed(clients), partition, **given, source={"name": "mnist"})
    d = read_forms(path, x_train=SAMPLES, y_train=labels(), writer_train=IDS)
    d, _, _ = _natural(d, "writer_train", clients, seed)
    x, y, writer = (d[f"{key}_train"] for key in ("x", "y", "writer"))
    source = {"name": "mnist", "clients": clients}
    return from_arrays(x, y, writer, test=test, validation=validation, seed=seed, source=source)


def _cifar10(
    path: Path,
    *,
    clients: int | None = None,
    partition: Partition | None = None,
    test: float | str = 0.2,
    validation: float = SHARE,
    seed: int = 0,
) -> FederatedData:
    partition = dirichlet(0.1) if partition is None else partition
    count = _needed(clients)
    source = {"name": "cifar10"}
    if not isinstance(test, str):
        d = read_forms(path, x_train=COLOURED, y_train=labels())
        given: dict[str, Any] = {"test": test, "validation": validation, "seed": seed}
        return split(_colours_first(d["x_train"]), d["y_train"], count, partition, **given, source=source)
    check.choice("test", test, ("file",))
    d = _train_and_test(path, COLOURED)
    owner = owners(partition, arrays.targets(d["y_train"]), count, seed)
    owner_test = _follow(owner, d["y_train"], d["y_test"], count, seed)
    return assemble(
        _colours_first(np.concatenate([d["x_train"], d["x_test"]])),
        np.concatenate([d["y_train"], d["y_test"]]),
        np.concatenate([owner, owner_test]),
        numbered(count),
        test=np.arange(len(owner) + len(owner_test)) >= len(owner),
        validation=validation,
        seed=seed,
        source={**source, "clients": count, "partition": describe(partition), "test": test, "seed": seed},
    )


def _free_spoken_digits(
    path: Path, *, validation: float = SHARE, clients: int | None = None, seed: int = 0
) -> FederatedData:
    d = _named(path, "speaker", SAMPLES, repetition=IDS)
    d, names, _ = _natural(d, "speaker", clients, seed)
    source = {"name": "free_spoken_digits", "clients": clients, "seed": seed}
    given: dict[str, Any] = {"test": d["repetition"] < 5, "validation": validation, "seed": seed}
    return from_arrays(d["x"], d["y"], d["speaker"], **given, names=names, source=source)


def _shakespeare(
    path: Path,
    *,
    min_characters: int = 2000,
    length: int = 80,
    stride: int | None = None,
    test: float = 0.2,
    validation: float = SHARE,
    clients: int | None = None,
    seed: int = 0,
) -> FederatedData:
    length = check.integer("length", length, low=1)
    step = length if stride is None else check.integer("stride", stride, low=1)
    test = check.number("test", test, low=0, high=0.99)
    validation = check.number("validation", validation, low=0, high=0.99)
    check.integer("min_characters", min_characters, low=0)
    d = _roles(path)
    place = np.zeros(256, dtype=np.int32)
    place[d["alphabet"]] = np.arange(len(d["alphabet"]))
    text, offset = place[d["text"]], d["offset"]
    roles = _choose(
        "min_characters", np.arange(len(offset) - 1), np.diff(offset), clients, min_characters, seed
    )
    rows = Rows()
    for i, role in enumerate(roles):
        start, end = offset[role], offset[role + 1]
        cut = end - round(test * (end - start))  # by time, so that no character is in two parts
        held = round(validation * (cut - start))
        first = cut - held if held > length else cut  # a shorter end of the text would be lost
        for split_name, part in zip(SPLITS, (text[start:first], text[first:cut], text[cut:end])):
            if len(part) > length:
                windows = np.lib.stride_tricks.sliding_window_view(part, length + 1)[::step]
                rows.add(i, windows[:, :-1], windows[:, 1:], split_name)
    if not rows.x:
        raise check.fail("length", length, "shorter windows: no role has enough text")
    names = [f"{d['play_name'][d['play'][r]]}/{d['role'][r]}" for r in roles]
    source = {"name": "shakespeare", "min_characters": min_characters, "length": length, "stride": step}
    source |= {"test": test, "clients": clients, "seed": seed}
    source |= {"validation": validation} if validation else {}
    x, y = np.concatenate(rows.x), np.concatenate(rows.y)
    return rows.assembled(x, y, names, source, test=None, validation=None, seed=seed)


def _imdb(
    path: Path,
    *,
    min_samples: int = 20,
    clients: int | None = None,
    partition: Partition | None = None,
    test: float = 0.2,
    validation: float = SHARE,
    seed: int = 0,
) -> FederatedData:
    d = _named(path, "movie", SAMPLES, names="movie_imdb_id")
    given: dict[str, Any] = {"test": test, "validation": validation, "seed": seed}
    if partition is not None:
        return split(d["x"], d["y"], _needed(clients), partition, **given, source={"name": "imdb"})
    d, names, _ = _natural(d, "movie", clients, seed, min_samples, names="movie_imdb_id")
    source = {"name": "imdb", "min_samples": min_samples, "clients": clients}
    return from_arrays(d["x"], d["y"], d["movie"], **given, names=names, source=source)


def _parkinsons_telemonitoring(
    path: Path,
    *,
    target: str = "total_UPDRS",
    test: float = 0.2,
    validation: float = SHARE,
    clients: int | None = None,
    seed: int = 0,
) -> FederatedData:
    scores = ("motor_UPDRS", "total_UPDRS")
    column = scores.index(check.choice("target", target, scores))
    d = read_forms(path, x=TABLE, y=TABLE, subject=IDS)
    if d["y"].shape[1] != len(scores):
        raise refuse(path, f"the columns {' and '.join(scores)} of 'y', not {d['y'].shape[1]}")
    d, _, ids = _natural(d, "subject", clients, seed)
    mask = held_out(np.searchsorted(ids, d["subject"]), len(ids), test, seed)
    source: dict[str, Any] = {"name": "parkinsons_telemonitoring", "target": target}
    source |= {"clients": clients, "test": test, "seed": seed}
    y = d["y"][:, [column]]  # [n, 1] as the output of a linear layer: [n] would broadcast in a loss
    given: dict[str, Any] = {"test": mask, "validation": validation, "seed": seed}
    return from_arrays(_standard(d["x"], ~mask), y, d["subject"], **given, source=source)


def _heart_disease(
    path: Path,
    *,
    test: float = 0.2,
    validation: float = SHARE,
    clients: int | None = None,
    seed: int = 0,
) -> FederatedData:
    d = _named(path, "hospital", TABLE, feature_name=Form("words", "feature"))
    x, features = d["x"].astype(np.float32), d["feature_name"].tolist()
    if len(features) != x.shape[1] or "chol" not in features:
        raise refuse(path, f"a 'feature_name' for each of the {x.shape[1]} columns of 'x', 'chol' among them")
    cholesterol = x[:, features.index("chol")]
    cholesterol[cholesterol == 0] = np.nan
    affected = np.isnan(x).any(0)  # in the whole file, so that every choice of clients has the same columns
    d, names, ids = _natural({**d, "x": x}, "hospital", clients, seed)
    x, missing = d["x"], np.isnan(d["x"])
    mask = held_out(np.searchsorted(ids, d["hospital"]), len(ids), test, seed)
    for j in np.flatnonzero(affected):
        values = x[~mask & ~missing[:, j], j]
        x[missing[:, j], j] = np.median(values) if len(values) else 0.0
    x = np.concatenate([_standard(x, ~mask), missing[:, affected].astype(np.float32)], axis=1)
    features += [f"{features[j]} missing" for j in np.flatnonzero(affected)]
    source = {"name": "heart_disease", "clients": clients, "test": test, "seed": seed, "features": features}
    given: dict[str, Any] = {"test": mask, "validation": validation, "seed": seed}
    return from_arrays(x, d["y"], d["hospital"], **given, names=names, source=source)


def _named(path: Path, owner: str, samples: Form, names: str = "", **others: Form) -> Arrays:
    """Read labelled samples, whose each is, and the names of these owners."""
    names = names or f"{owner}_name"
    forms = {owner: Form("whole numbers", "sample", places=names), names: Form("words", owner), **others}
    return read_forms(path, x=samples, y=labels(), **forms)


def _train_and_test(path: Path, samples: Form) -> Arrays:
    """Read samples in two parts, of one shape."""
    tested = samples._replace(rows="test sample")
    d = read_forms(path, x_train=samples, y_train=labels(), x_test=tested, y_test=labels("test sample"))
    same_shape(path, d, "x_test", "x_train")
    return d


def _roles(path: Path) -> Arrays:
    """Read Shakespeare's text, and where in it each role speaks."""
    d = read_forms(
        path,
        text=Form("whole numbers", "character"),
        offset=Form("whole numbers", "end of a role"),
        role=Form("words", "role"),
        play=Form("whole numbers", "role", places="play_name"),
        play_name=Form("words", "play"),
        alphabet=Form("whole numbers", "letter"),
    )
    for key in ("text", "alphabet"):
        within(path, d, key, high=255)
    within(path, d, "offset", high=len(d["text"]))
    if len(d["offset"]) != len(d["role"]) + 1 or not increasing(d["offset"]):
        raise refuse(path, "an 'offset' where each role begins, and one where the last one ends")
    return d


READERS: dict[str, Callable[..., FederatedData]] = {
    "femnist": _femnist,
    "mnist": _mnist,
    "cifar10": _cifar10,
    "free_spoken_digits": _free_spoken_digits,
    "shakespeare": _shakespeare,
    "imdb": _imdb,
    "parkinsons_telemonitoring": _parkinsons_telemonitoring,
    "heart_disease": _heart_disease,
}


def _needed(clients: int | None) -> int:
    return check.integer("clients", clients, low=1)


def _natural(
    d: Arrays, owner: str, clients: int | None, seed: int, min_samples: int = 0, names: str = ""
) -> tuple[Arrays, list[str] | None, IntArray]:
    """Return the rows of the clients that take part, their names (None: there are none) and sorted ids."""
    check.integer("min_samples", min_samples, low=0)
    ids, sizes = np.unique(d[owner], return_counts=True)
    ids = _choose("min_samples", ids, sizes, clients, min_samples, seed)
    taken, samples = np.isin(d[owner], ids), len(d[owner])
    named = d.get(names or f"{owner}_name")
    rows = {key: values[taken] for key, values in d.items() if len(values) == samples}
    return rows, None if named is None else named[ids].tolist(), ids


def _choose(
    field: str, ids: NDArray[Any], sizes: NDArray[Any], clients: int | None, minimum: int, seed: int
) -> IntArray:
    """Return the ids with enough samples, or a number of them drawn at random."""
    large = ids[sizes >= minimum].astype(np.int64)
    if len(large) == 0:
        raise check.fail(field, minimum, f"at most {sizes.max()}, the size of the largest client")
    if clients is None:
        return large
    check.integer("clients", clients, low=1, high=len(large))
    return np.sort(draws.generator(seed, "real-clients").choice(large, clients, replace=False))


def _follow(owner: IntArray, y: NDArray[Any], y_test: NDArray[Any], clients: int, seed: int) -> IntArray:
    """Deal test rows to clients in proportion to the training rows of the same label that each has."""
    followers = np.full(len(y_test), -1, dtype=np.int64)
    rng = draws.generator(seed, "test-follow")
    for label in np.unique(y_test):
        held = np.bincount(owner[(y == label) & (owner >= 0)], minlength=clients)
        if held.any():
            rows = rng.permutation(np.flatnonzero(y_test == label))
            followers[rows] = deal(len(rows), held / held.sum())
    return followers


def _standard(x: NDArray[np.float32], train: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return columns with mean 0 and deviation 1 over all clients' rows that are not for testing."""
    mean, deviation = x[train].mean(0, dtype=np.float64), x[train].std(0, dtype=np.float64)
    standard: NDArray[np.float32] = ((x - mean) / np.where(deviation > 0, deviation, 1)).astype(np.float32)
    return standard


def _colours_first(x: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(np.moveaxis(x, -1, 1))
