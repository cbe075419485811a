"""Byzantine clients: which aggregator withstands which attack, with a personal part.

A quarter of the FEMNIST writers sends false updates of the shared part; every writer keeps its own output
layer. No paper has this table: the attacks and aggregators are those of the literature, the split that of
Pillutla et al.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import nn

from partita import aggregate, attack, data, models
from partita.algorithms import fedalt
from partita.core.parts import Aggregator, Attack
from partita.engine.record import Record
from partita.recipes.experiment import Experiment
from partita.recipes.sizes import by_size
from partita.recipes.study import Study, Variant
from partita.recipes.tables import Runs, Table, mean_std

SHARE = 0.25  # of Byzantine clients


def byzantine(
    size: str = "small", clients: int | None = None, rounds: int | None = None, seed: int = 0
) -> Study:
    """Which aggregator withstands which attack? A quarter of the writers attacks; the output is personal.

    size     small (minutes on two cores), medium or paper (minutes on a GPU)
    clients  number of writers; default: 16, 60 or 100 by size
    rounds   number of rounds, with all clients in each; default: 20, 150 or 300 by size
    """
    source = data.real(
        "femnist", min_samples=100, clients=clients or by_size(size, 16, 60, 100), validation=0, seed=seed
    )
    rounds = rounds or by_size(size, 20, 150, 300)
    base = Experiment(
        model=network(size, seed),
        data=source,
        algorithm=fedalt("output", 0.1, weighting="uniform"),
        rounds=rounds,
        steps=by_size(size, 5, 5, 10),
        batch=32,
        seed=seed,
        baselines=False,
        evaluate_every=rounds,
        checkpoint_every=0,
    )
    variants = {}
    for name, attacking in attacks().items():
        attacked = base if attacking is None else replace(base, attack=attacking, byzantine=SHARE)
        for rule, aggregator in aggregators(round(SHARE * source.clients)).items():
            method = fedalt("output", 0.1, aggregate=aggregator, weighting="uniform")
            variants[f"{rule}-{name}"] = Variant(replace(attacked, algorithm=method))
    return Study(variants, tables=lambda runs: [robustness(runs)])


def network(size: str, seed: int) -> nn.Module:
    """Return a perceptron, or from medium on a small convolutional network."""
    if size == "small":
        return models.mlp(784, 64, 62, seed=seed)
    return models.mnist_cnn(62, dropout=0.0, seed=seed)


def attacks() -> dict[str, Attack | None]:
    """Return the attacks by name, after none."""
    return {
        "none": None,
        "sign_flip": attack.sign_flip(scale=5.0),
        "alie": attack.alie(),
        "ipm": attack.ipm(epsilon=5.0),
        "mimic": attack.mimic(),
        "gaussian": attack.gaussian(sigma=1.0),
        "nonfinite": attack.nonfinite(),
        "label_flip": attack.label_flip(),
    }


def aggregators(faulty: int) -> dict[str, Aggregator]:
    """Return the aggregators by name, for this many Byzantine clients."""
    median = aggregate.coordinate_median()
    return {
        "mean": aggregate.mean(),
        "coordinate_median": median,
        "trimmed_mean": aggregate.trimmed_mean(faulty),
        "geometric_median": aggregate.geometric_median(),
        "krum": aggregate.krum(faulty),
        "multi_krum": aggregate.multi_krum(faulty, 3 * faulty),
        "centered_clipping": aggregate.centered_clipping(1.0),
        "bucketing": aggregate.bucketing(2, median),
        "nnm": aggregate.nnm(faulty, aggregate.trimmed_mean(faulty)),
    }


def robustness(runs: Runs) -> Table:
    """Return the accuracy of the honest clients by aggregator and attack."""
    names = list(attacks())
    honest = [np.array([not row["byzantine"] for row in run.clients]) for run in runs[f"mean-{names[1]}"]]

    def cell(rule: str, name: str) -> str:
        return mean_std([_accuracy(*pair) for pair in zip(runs[f"{rule}-{name}"], honest)], 100, 1)

    rows = [(rule, *(cell(rule, name) for name in names)) for rule in aggregators(1)]
    note = (
        f"A quarter of the clients ({int((~honest[0]).sum())} of {len(honest[0])}) is Byzantine. Scores are "
        "of the honest ones, also where nobody attacks; personal output layer, all clients in every round."
    )
    return Table("Test accuracy of the honest clients, %", ("aggregator", *names), rows, note)


def _accuracy(run: Record, clients: np.ndarray) -> float:
    """Return the accuracy over the test samples of these clients."""
    scores = run.scores("personal")
    weight = np.array([row["n_test"] for row in run.clients]) * (clients & ~np.isnan(scores))
    return float((np.nan_to_num(scores) * weight).sum() / weight.sum())
