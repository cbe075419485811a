"""Wards that predict from vital signs: an experiment among machines that keep their own records.

This file is on the server and on every client, and must be the same there: `partita deploy check` prints a
digest of it. `experiment` says what is trained and the form of a sample; `data` is called at a client alone.
"""

from pathlib import Path

import numpy as np

import partita as pt
from partita.recipes import Experiment

FEATURES, CLASSES = 12, 2


def experiment(seed: int = 0) -> Experiment:
    """Return what all machines have in common. Its data are noise in the form of real samples."""
    noise = np.random.default_rng(0).normal(size=(20, FEATURES)).astype("float32")
    form = pt.data.from_arrays(noise, np.arange(20) % CLASSES, np.zeros(20, dtype=int), test=0.5)
    return Experiment(
        model=pt.models.mlp(FEATURES, 32, CLASSES, seed=seed),
        data=form,
        algorithm=pt.fedalt(personal="output", lr=0.1),
        rounds=50,
        epochs=1,
        batch=32,
        evaluate_every=10,
        seed=seed,
    )


def data(name: str, folder: str = "records", made_up: int = 0) -> pt.data.FederatedData:
    """Return the samples of one ward, from FOLDER/NAME.npz with x and y; `made_up` invents so many."""
    if made_up:
        draws = np.random.default_rng(sum(name.encode()))
        x = draws.normal(size=(made_up, FEATURES)).astype("float32")
        y = (x @ draws.normal(size=FEATURES) > 0).astype("int64")
    else:
        file = np.load(Path(folder) / f"{name}.npz")
        x, y = file["x"].astype("float32"), file["y"].astype("int64")
    return pt.data.from_arrays(x, y, np.full(len(y), name), test=0.3)
