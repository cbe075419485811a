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
    assemble,
    describe,
    from_arrays,
    held_out,
    owners,
    split,
)
from partita.data.federated import FederatedData
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

VARIABLE = "PARTITA_DATA"
SAMPLES = Form("numbers", "sample", axes=None)
COLOURED = Form("numbers", "sample", axes=4)
TABLE = Form("numbers", "sample", axes=2)
IDS = Form("whole numbers", "sample")


def real(name: str, *, folder: str | PathLike[str] | None = None, **options: Any) -> FederatedData:
    """A real dataset by name, from `folder` or the folder in the environment variable PARTITA_DATA.

    name                       clients    options besides `clients` and `seed`
    femnist                    writers    min_samples=0
    mnist                      writers    test=0.2; with partition=... the 70,000 digits dealt to `clients`
    cifar10                    none       partition=dirichlet(0.1), test=0.2 or "file"; `clients` is needed
    free_spoken_digits         speakers
    shakespeare                roles      min_characters=2000, length=80, stride=None (length), test=0.2
    imdb                       movies     min_samples=20, test=0.2; with partition=... all reviews dealt
    parkinsons_telemonitoring  patients   target="total_UPDRS" or "motor_UPDRS", test=0.2
    heart_disease              hospitals  test=0.2

    `clients` is the number of clients, for natural clients a random choice among them (None: all); `seed`
    draws that choice and the split.
    """
    reader = READERS[check.choice("name", name, READERS)]
    known = list(inspect.signature(reader).parameters)[1:]
    for option, value in options.items():
        if option not in known:
            reason = f"{name} has no such option{check.meant(option, known)}"
            raise check.fail(option, value, f"one of {', '.join(known)}", reason)
    check.integer("seed", options.get("seed", 0), low=0)
    place = os.environ.get(VARIABLE) if folder is None else folder
    if not place:
        raise check.fail(
            "folder", folder, f"the folder of {name}.npz, or the environment variable {VARIABLE} set to it"
        )
    path = path_of("folder", place) / f"{name}.npz"
    if not path.is_file():
        raise check.fail("folder", str(place), f"a folder with a file {path.name}")
    return reader(path, **options)


def _femnist(path: Path, *, min_samples: int = 0, clients: int | None = None, seed: int = 0) -> FederatedData:
    d = read_forms(
        path,
        x=SAMPLES,
        y=labels(),
        writer=Form("whole numbers", "sample", places="writer_name"),
        is_test=Form("True and False", "sample"),
        writer_name=Form("words", "writer"),
    )
    ids, rows = _natural(d["writer"], clients, min_samples, seed)
    source = {"name": "femnist", "min_samples": min_samples, "clients": clients, "seed": seed}
    x, y, writer, test = (d[key][rows] for key in ("x", "y", "writer", "is_test"))
    return from_arrays(x, y, writer, test=test, names=d["writer_name"][ids].tolist(), source=source)


def _mnist(
    path: Path,
    *,
    clients: int | None = None,
    partition: Partition | None = None,
    test: float = 0.2,
    seed: int = 0,
) -> FederatedData:
    if partition is not None:
        d = _train_and_test(path, SAMPLES)
        x, y = (np.concatenate([d[f"{key}_train"], d[f"{key}_test"]]) for key in "xy")
        return split(x, y, _needed(clients), partition, test=test, seed=seed, source={"name": "mnist"})
    d = read_forms(path, x_train=SAMPLES, y_train=labels(), writer_train=IDS)
    _, rows = _natural(d["writer_train"], clients, 0, seed)
    x, y, writer = (d[f"{key}_train"][rows] for key in ("x", "y", "writer"))
    return from_arrays(x, y, writer, test=test, seed=seed, source={"name": "mnist", "clients": clients})


def _cifar10(
    path: Path,
    *,
    clients: int | None = None,
    partition: Partition | None = None,
    test: float | str = 0.2,
    seed: int = 0,
) -> FederatedData:
    partition = dirichlet(0.1) if partition is None else partition
    count = _needed(clients)
    source = {"name": "cifar10"}
    if not isinstance(test, str):
        d = read_forms(path, x_train=COLOURED, y_train=labels())
        return split(
            _colours_first(d["x_train"]), d["y_train"], count, partition, test=test, seed=seed, source=source
        )
    check.choice("test", test, ("file",))
    d = _train_and_test(path, COLOURED)
    owner = owners(partition, arrays.targets(d["y_train"]), count, seed)
    owner_test = _follow(owner, d["y_train"], d["y_test"], count, seed)
    return assemble(
        _colours_first(np.concatenate([d["x_train"], d["x_test"]])),
        np.concatenate([d["y_train"], d["y_test"]]),
        np.concatenate([owner, owner_test]),
        [str(i) for i in range(count)],
        test=np.arange(len(owner) + len(owner_test)) >= len(owner),
        seed=seed,
        source={**source, "clients": count, "partition": describe(partition), "test": test, "seed": seed},
    )


def _free_spoken_digits(path: Path, *, clients: int | None = None, seed: int = 0) -> FederatedData:
    d = read_forms(
        path,
        x=SAMPLES,
        y=labels(),
        speaker=Form("whole numbers", "sample", places="speaker_name"),
        repetition=Form("whole numbers", "sample"),
        speaker_name=Form("words", "speaker"),
    )
    ids, rows = _natural(d["speaker"], clients, 0, seed)
    x, y, speaker, repetition = (d[key][rows] for key in ("x", "y", "speaker", "repetition"))
    source = {"name": "free_spoken_digits", "clients": clients, "seed": seed}
    return from_arrays(
        x, y, speaker, test=repetition < 5, names=d["speaker_name"][ids].tolist(), source=source
    )


def _shakespeare(
    path: Path,
    *,
    min_characters: int = 2000,
    length: int = 80,
    stride: int | None = None,
    test: float = 0.2,
    clients: int | None = None,
    seed: int = 0,
) -> FederatedData:
    length = check.integer("length", length, low=1)
    step = length if stride is None else check.integer("stride", stride, low=1)
    test = check.number("test", test, low=0, high=0.99)
    check.integer("min_characters", min_characters, low=0)
    d = _roles(path)
    place = np.zeros(256, dtype=np.int32)
    place[d["alphabet"]] = np.arange(len(d["alphabet"]))
    text, offset = place[d["text"]], d["offset"]
    roles = _choose(
        "min_characters", np.arange(len(offset) - 1), np.diff(offset), clients, min_characters, seed
    )
    windows: list[NDArray[np.int32]] = []
    owner: list[int] = []
    tests: list[bool] = []
    for i, role in enumerate(roles):
        start, end = offset[role], offset[role + 1]
        cut = end - round(test * (end - start))  # by time, so that no character is in both parts
        for is_test, part in ((False, text[start:cut]), (True, text[cut:end])):
            if len(part) > length:
                windows.append(np.lib.stride_tricks.sliding_window_view(part, length + 1)[::step])
                owner += [i] * len(windows[-1])
                tests += [is_test] * len(windows[-1])
    if not windows:
        raise check.fail("length", length, "shorter windows: no role has enough text")
    rows = np.concatenate(windows)
    return assemble(
        rows[:, :-1],
        rows[:, 1:],
        np.array(owner),
        [f"{d['play_name'][d['play'][r]]}/{d['role'][r]}" for r in roles],
        test=np.array(tests),
        seed=seed,
        source={
            "name": "shakespeare",
            "min_characters": min_characters,
            "length": length,
            "stride": step,
            "test": test,
            "clients": clients,
            "seed": seed,
        },
    )


def _imdb(
    path: Path,
    *,
    min_samples: int = 20,
    clients: int | None = None,
    partition: Partition | None = None,
    test: float = 0.2,
    seed: int = 0,
) -> FederatedData:
    d = read_forms(
        path,
        x=SAMPLES,
        y=labels(),
        movie=Form("whole numbers", "sample", places="movie_imdb_id"),
        movie_imdb_id=Form("words", "movie"),
    )
    if partition is not None:
        return split(
            d["x"], d["y"], _needed(clients), partition, test=test, seed=seed, source={"name": "imdb"}
        )
    ids, rows = _natural(d["movie"], clients, min_samples, seed)
    x, y, movie = (d[key][rows] for key in ("x", "y", "movie"))
    source = {"name": "imdb", "min_samples": min_samples, "clients": clients}
    return from_arrays(
        x, y, movie, test=test, names=d["movie_imdb_id"][ids].tolist(), seed=seed, source=source
    )


def _parkinsons_telemonitoring(
    path: Path, *, target: str = "total_UPDRS", test: float = 0.2, clients: int | None = None, seed: int = 0
) -> FederatedData:
    scores = ("motor_UPDRS", "total_UPDRS")
    column = scores.index(check.choice("target", target, scores))
    d = read_forms(path, x=TABLE, y=TABLE, subject=IDS)
    if d["y"].shape[1] != len(scores):
        raise refuse(path, f"the columns {' and '.join(scores)} of 'y', not {d['y'].shape[1]}")
    ids, rows = _natural(d["subject"], clients, 0, seed)
    x, y, subject = (d[key][rows] for key in ("x", "y", "subject"))
    mask = held_out(np.searchsorted(ids, subject), len(ids), test, seed)
    source = {
        "name": "parkinsons_telemonitoring",
        "target": target,
        "clients": clients,
        "test": test,
        "seed": seed,
    }
    y = y[:, column : column + 1]  # [n, 1] as the output of a linear layer: [n] would broadcast in a loss
    return from_arrays(_standard(x, ~mask), y, subject, test=mask, source=source)


def _heart_disease(
    path: Path, *, test: float = 0.2, clients: int | None = None, seed: int = 0
) -> FederatedData:
    d = read_forms(
        path,
        x=TABLE,
        y=labels(),
        hospital=Form("whole numbers", "sample", places="hospital_name"),
        hospital_name=Form("words", "hospital"),
        feature_name=Form("words", "feature"),
    )
    x, names = d["x"].astype(np.float32), d["feature_name"].tolist()
    if len(names) != x.shape[1] or "chol" not in names:
        raise refuse(path, f"a 'feature_name' for each of the {x.shape[1]} columns of 'x', 'chol' among them")
    cholesterol = x[:, names.index("chol")]
    cholesterol[cholesterol == 0] = np.nan
    missing = np.isnan(x)
    affected = missing.any(0)  # in the whole file, so that every choice of clients has the same columns
    ids, rows = _natural(d["hospital"], clients, 0, seed)
    x, missing, y, hospital = x[rows], missing[rows], d["y"][rows], d["hospital"][rows]
    mask = held_out(np.searchsorted(ids, hospital), len(ids), test, seed)
    for j in np.flatnonzero(affected):
        known = x[~mask & ~missing[:, j], j]
        x[missing[:, j], j] = np.median(known) if len(known) else 0.0
    x = np.concatenate([_standard(x, ~mask), missing[:, affected].astype(np.float32)], axis=1)
    features = names + [f"{names[j]} missing" for j in np.flatnonzero(affected)]
    source = {
        "name": "heart_disease",
        "clients": clients,
        "test": test,
        "seed": seed,
        "features": features,
    }
    return from_arrays(x, y, hospital, test=mask, names=d["hospital_name"][ids].tolist(), source=source)


def _train_and_test(path: Path, samples: Form) -> dict[str, NDArray[Any]]:
    """Samples in two parts, of one shape."""
    tested = samples._replace(rows="test sample")
    found = read_forms(path, x_train=samples, y_train=labels(), x_test=tested, y_test=labels("test sample"))
    same_shape(path, found, "x_test", "x_train")
    return found


def _roles(path: Path) -> dict[str, NDArray[Any]]:
    """Shakespeare's text, and where in it each role speaks."""
    found = read_forms(
        path,
        text=Form("whole numbers", "character"),
        offset=Form("whole numbers", "end of a role"),
        role=Form("words", "role"),
        play=Form("whole numbers", "role", places="play_name"),
        play_name=Form("words", "play"),
        alphabet=Form("whole numbers", "letter"),
    )
    for key in ("text", "alphabet"):
        within(path, found, key, high=255)
    within(path, found, "offset", high=len(found["text"]))
    if len(found["offset"]) != len(found["role"]) + 1 or not increasing(found["offset"]):
        raise refuse(path, "an 'offset' where each role begins, and one where the last one ends")
    return found


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
    owner: NDArray[Any], clients: int | None, min_samples: int, seed: int
) -> tuple[IntArray, NDArray[np.bool_]]:
    """The ids of the clients that take part, sorted, and which rows are theirs."""
    check.integer("min_samples", min_samples, low=0)
    ids, sizes = np.unique(owner, return_counts=True)
    ids = _choose("min_samples", ids, sizes, clients, min_samples, seed)
    return ids, np.isin(owner, ids)


def _choose(
    field: str, ids: NDArray[Any], sizes: NDArray[Any], clients: int | None, minimum: int, seed: int
) -> IntArray:
    """The ids with enough samples, or a number of them drawn at random."""
    large = ids[sizes >= minimum].astype(np.int64)
    if len(large) == 0:
        raise check.fail(field, minimum, f"at most {sizes.max()}, the size of the largest client")
    if clients is None:
        return large
    check.integer("clients", clients, low=1, high=len(large))
    return np.sort(draws.generator(seed, "real-clients").choice(large, clients, replace=False))


def _follow(owner: IntArray, y: NDArray[Any], y_test: NDArray[Any], clients: int, seed: int) -> IntArray:
    """Test rows to clients in proportion to the training rows of the same label that each client has."""
    followers = np.full(len(y_test), -1, dtype=np.int64)
    rng = draws.generator(seed, "test-follow")
    for label in np.unique(y_test):
        held = np.bincount(owner[(y == label) & (owner >= 0)], minlength=clients)
        if held.any():
            rows = rng.permutation(np.flatnonzero(y_test == label))
            followers[rows] = deal(len(rows), held / held.sum())
    return followers


def _standard(x: NDArray[np.float32], train: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Columns with mean 0 and deviation 1 over the training rows of all clients."""
    mean, deviation = x[train].mean(0, dtype=np.float64), x[train].std(0, dtype=np.float64)
    standard: NDArray[np.float32] = ((x - mean) / np.where(deviation > 0, deviation, 1)).astype(np.float32)
    return standard


def _colours_first(x: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(np.moveaxis(x, -1, 1))
