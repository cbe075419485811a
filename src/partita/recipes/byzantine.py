"""Liars among the clients: which aggregator holds under which attack, with a personal part.

A quarter of the FEMNIST writers lies about the shared part; every writer keeps its own output layer. No paper
has this table: the attacks and aggregators are those of the literature, the split that of Pillutla et al.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import nn

from partita import aggregate, attack, data, models
from partita.algorithms import fedalt
from partita.core import check
from partita.core.parts import Aggregator, Attack
from partita.engine.record import Record
from partita.recipes.experiment import Experiment
from partita.recipes.study import Study, Table, Variant, mean_std
from partita.recipes.tasks import SIZES

SHARE = 0.25
CLEAN = "none"


def byzantine(
    size: str = "small",
    clients: int | None = None,
    rounds: int | None = None,
    seed: int = 0,
) -> Study:
    """Which aggregator holds under which attack? A quarter of the writers lies; the output layer is personal.

    size     small (minutes on two cores), medium or paper (minutes on a GPU)
    clients  how many writers
    rounds   how many rounds; all clients take part in each
    """
    i = SIZES.index(check.choice("size", size, SIZES))
    source = data.real("femnist", min_samples=100, clients=clients or (16, 60, 100)[i], seed=seed)
    liars = round(SHARE * source.clients)
    variants = {}
    for name, how in attacks().items():
        for rule, combine in aggregators(liars).items():
            experiment = Experiment(
                model=network(size, seed),
                data=source,
                algorithm=fedalt("output", 0.1, aggregate=combine, weighting="uniform"),
                rounds=rounds or (20, 150, 300)[i],
                steps=(5, 5, 10)[i],
                batch=32,
                seed=seed,
                baselines=False,
                attack=how,
                byzantine=() if how is None else SHARE,
                evaluate_every=rounds or (20, 150, 300)[i],
                checkpoint_every=0,
            )
            variants[f"{rule}-{name}"] = Variant(experiment)
    return Study(variants, tables=lambda runs: [robustness(runs)])


def network(size: str, seed: int) -> nn.Module:
    """A perceptron, or from medium on a small convolutional network."""
    return (
        models.mlp(784, 64, 62, seed=seed)
        if size == "small"
        else models.mnist_cnn(62, dropout=0.0, seed=seed)
    )


def attacks() -> dict[str, Attack | None]:
    """Without one first: all are honest then."""
    return {
        CLEAN: None,
        "sign_flip": attack.sign_flip(scale=5.0),
        "alie": attack.alie(),
        "ipm": attack.ipm(epsilon=5.0),
        "mimic": attack.mimic(),
        "gaussian": attack.gaussian(sigma=1.0),
        "nonfinite": attack.nonfinite(),
        "label_flip": attack.label_flip(),
    }


def aggregators(liars: int) -> dict[str, Aggregator]:
    """Each told how many liars there are where it wants to know."""
    median = aggregate.coordinate_median()
    return {
        "mean": aggregate.mean(),
        "coordinate_median": median,
        "trimmed_mean": aggregate.trimmed_mean(liars),
        "geometric_median": aggregate.geometric_median(),
        "krum": aggregate.krum(liars),
        "multi_krum": aggregate.multi_krum(liars, 3 * liars),
        "centered_clipping": aggregate.centered_clipping(1.0),
        "bucketing": aggregate.bucketing(2, median),
        "nnm": aggregate.nnm(liars, aggregate.trimmed_mean(liars)),
    }


def robustness(runs: Mapping[str, Sequence[Record]]) -> Table:
    """Accuracy of the honest clients by aggregator and attack; clean is the mean without one."""
    names, rules = list(attacks()), list(aggregators(1))
    honest = [_honest(found) for found in runs[f"mean-{names[1]}"]]
    rows = []
    for rule in rules:
        cells = []
        for name in names:
            scores = [_accuracy(run, who) for run, who in zip(runs[f"{rule}-{name}"], honest)]
            cells.append(mean_std(scores, 100, 1))
        rows.append((rule, *cells))
    note = (
        f"A quarter of the clients ({int((~honest[0]).sum())} of {len(honest[0])}) lies. Scores are of the "
        "honest ones, also where nobody lies; personal output layer, all clients in every round."
    )
    return Table("Test accuracy of the honest clients, %", ("aggregator", *names), rows, note)


def _honest(run: Record) -> np.ndarray:
    return np.array([not row["byzantine"] for row in run.clients])


def _accuracy(run: Record, who: np.ndarray) -> float:
    """By test samples, over these clients."""
    scores = run.scores("personal")
    weight = np.array([row["n_test"] for row in run.clients]) * (who & ~np.isnan(scores))
    return float((np.nan_to_num(scores) * weight).sum() / weight.sum())
