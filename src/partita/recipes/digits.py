"""Handwritten digits, a few classes for each client."""

from __future__ import annotations

from partita import data, models
from partita.algorithms import fedalt
from partita.recipes.experiment import Experiment


def digits(
    clients: int = 40, classes: int = 3, test: float = 0.4, seed: int = 0, validation: float = 0.1
) -> Experiment:
    """Scikit-learn's digits dealt to clients that see few classes each; the output layer is personal."""
    return Experiment(
        model=models.mlp(64, 64, 10, seed=seed),
        data=data.digits(clients, data.label_skew(classes), test=test, validation=validation, seed=seed),
        algorithm=fedalt(personal="output", lr=0.1, personal_lr=0.3),
        rounds=100,
        cohort=min(20, clients),
        steps=5,
        batch=16,
        seed=seed,
    )
