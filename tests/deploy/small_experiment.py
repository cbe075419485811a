"""An experiment of three clients as a user would write it: a file that is on all machines."""

import numpy as np

import partita as pt
from partita.recipes import Experiment

NAMES = ("a", "b", "c")
METHODS = {
    "fedalt": lambda: pt.fedalt(personal="output", lr=0.1, personal_lr=0.3),
    "fedavg": lambda: pt.fedavg(lr=0.1),
    "scaffold": lambda: pt.scaffold(lr=0.1),
    "ditto": lambda: pt.ditto(lr=0.1),
    "pfedme": lambda: pt.pfedme(lr=0.1),
}


def everyone() -> pt.data.FederatedData:
    """All samples, which no machine of a deployment has."""
    return pt.data.digits(len(NAMES), pt.data.label_skew(4), test=0.3, seed=0)


def experiment(method: str = "fedalt", rounds: int = 6, width: int = 64, seed: int = 0) -> Experiment:
    noise = np.random.default_rng(0).random((20, 8, 8), dtype=np.float32)
    return Experiment(
        model=pt.models.mlp(64, width, 10, seed=seed),
        data=pt.data.from_arrays(noise, np.arange(20) % 10, np.zeros(20, dtype=int), test=0.5),
        algorithm=METHODS[method](),
        rounds=rounds,
        steps=5,
        batch=16,
        evaluate_every=2,
        seed=seed,
    )


def data(name: str) -> pt.data.FederatedData:
    return everyone().subset([NAMES.index(name)])
