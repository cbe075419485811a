"""Five offices that read handwritten digits, each sees four of the ten: what `partita deploy demo` runs.

A file like this one is on all machines. `experiment` says what is trained and the form of a sample; `data` is
called at a client alone, and returns its own samples.
"""

import numpy as np

from partita import models
from partita.algorithms import fedalt
from partita.data import FederatedData, digits, from_arrays, label_skew
from partita.recipes import Experiment

OFFICES = ("amber", "birch", "cedar", "delta", "elm")


def experiment(seed: int = 0) -> Experiment:
    """Return what server and clients have in common; its data are noise in the form of real samples."""
    noise = np.random.default_rng(0).random((20, 8, 8), dtype=np.float32)
    form = from_arrays(noise, np.arange(20) % 10, np.zeros(20, dtype=int), test=0.5)
    return Experiment(
        model=models.mlp(64, 64, 10, seed=seed),
        data=form,
        algorithm=fedalt(personal="output", lr=0.1, personal_lr=0.3),
        rounds=30,
        steps=5,
        batch=16,
        evaluate_every=10,
        seed=seed,
    )


def data(name: str) -> FederatedData:
    """Return the samples of one office. A real one would read its own files here."""
    everyone = digits(len(OFFICES), label_skew(4), test=0.3, seed=0)
    return everyone.subset([OFFICES.index(name)])
