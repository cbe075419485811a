"""What privacy costs whom: personal parts, on which no noise falls, against one model for all.

Each writer of FEMNIST is hidden by (ε, δ)-differential privacy: uploads are clipped, and their sum has noise.
What is shared shrinks from the whole model to what is left beside adapters or an output layer, and with Ditto
every writer has a whole model of its own. FedAvg has no personal part, FedAlt none that is a whole model, and
Ditto no other one; where adapters are personal, FedAvg and Ditto with the same adapters are beside it. Each
method under each ε is tried with the same number of clips, larger ones where there is less noise, and has the
one that is best on validation samples of all seeds. No paper has this table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np

from partita import data, models
from partita.algorithms import ditto, fedalt, fedavg
from partita.algorithms.alone import local
from partita.core.options import Option, checked
from partita.core.parts import Algorithm
from partita.engine.record import Record
from partita.models import Blocks
from partita.privacy import gaussian
from partita.recipes.experiment import Experiment
from partita.recipes.sizes import SIZES, by_size
from partita.recipes.study import Study, Variant
from partita.recipes.tables import Runs, Table, mean_std
from partita.report.charts import Chart, Panel, Series

EPSILONS = (0.5, 2.0, 8.0)
DELTA = 1e-3  # below one of 300 writers
RATE = 0.4
CLIPS = {0.5: (0.03, 0.1, 0.3), 2.0: (0.1, 0.3, 1.0), 8.0: (0.3, 1.0, 3.0)}
RATES = (0.1, 0.4, 0.8, 1.6)
"""Without noise there is nothing to be clipped, and rates are tried; alone, too."""
NONE = "none"
ALONE = "local"
TITLES = {
    "fedavg": "FedAvg, all shared",
    "fedavg-adapter": "FedAvg, all shared, with adapters",
    "fedalt-output": "FedAlt, output personal",
    "fedalt-adapter": "FedAlt, adapters personal",
    "ditto": "Ditto, all personal",
    "ditto-adapter": "Ditto, all personal, with adapters",
}


@checked()
def privacy_utility(
    size: Annotated[
        str,
        Option(
            "small: half an hour on two cores; medium, paper: a convolutional network, minutes on a GPU",
            choices=SIZES,
        ),
    ] = "small",
    clients: Annotated[int | None, Option("number of writers; default: all 300", low=10)] = None,
    rounds: Annotated[int | None, Option("rounds; default: 100, 200 or 500 by size", low=1)] = None,
    seed: int = 0,
) -> Study:
    """What does privacy cost, and whom? Shared and personal parts under ε from 0.5 to none."""
    source = data.real("femnist", clients=clients, min_samples=0, seed=0, validation=0.15)
    rounds = rounds or by_size(size, 100, 200, 500)
    model = network(size, seed)
    base = Experiment(
        model=model,
        data=source,
        algorithm=fedavg(RATE),
        rounds=rounds,
        cohort=max(1, source.clients // 3),
        steps=5,
        batch=20,
        seed=seed,
        baselines=False,
        evaluate_every=rounds,
        checkpoint_every=0,
    )
    kind, where = by_size(size, ("bottleneck", "hidden*"), ("residual", None), ("residual", None))
    adapted = replace(base, model=models.add_adapters(model, kind, where=where, seed=seed))
    variants = {f"{ALONE}-{NONE}-{r:g}": Variant(replace(base, algorithm=local(r))) for r in RATES}
    for name in TITLES:
        own = adapted if name.endswith("-adapter") else base
        for rate in RATES:
            method = _method(name, rate)
            variants[f"{name}-{NONE}-{rate:g}"] = Variant(replace(own, algorithm=method))
        for epsilon in EPSILONS:
            for clip in CLIPS[epsilon]:
                uploads = [gaussian(epsilon=epsilon, delta=DELTA, clip=clip)]
                experiment = replace(own, algorithm=_method(name, RATE), uploads=uploads)
                variants[f"{name}-{epsilon:g}-{clip:g}"] = Variant(experiment)
    return Study(variants, tables=tables, charts=charts)


def network(size: str, seed: int) -> Blocks:
    """Return a perceptron, or from medium on a small convolutional network."""
    if size == "small":
        return models.mlp(784, 32, 62, seed=seed)
    return models.mnist_cnn(62, dropout=0.0, seed=seed)


def _method(name: str, rate: float) -> Algorithm:
    """Return a method whose clients count alike: what each may change is bounded."""
    kind, _, part = name.partition("-")
    if kind == "fedavg":
        return fedavg(rate, weighting="uniform")
    if kind == "ditto":
        return ditto(rate, lam=0.1, weighting="uniform")
    return fedalt(part, rate, weighting="uniform")


# ---- what is shown


def best(runs: Runs, name: str, epsilon: str) -> tuple[str, Sequence[Record]]:
    """Return the clip (or the rate) that is best on validation samples over all seeds, and its runs."""
    prefix = f"{name}-{epsilon}-"
    tried = {n.removeprefix(prefix): seeds for n, seeds in runs.items() if n.startswith(prefix)}
    chosen = max(tried, key=lambda k: np.mean([_validation(run) for run in tried[k]]))
    return chosen, tried[chosen]


def _validation(run: Record) -> float:
    return float(run.metrics[-1]["validation.personal"])


def _levels() -> tuple[str, ...]:
    return (*(f"{e:g}" for e in EPSILONS), NONE)


def tables(runs: Runs) -> list[Table]:
    """Return the scores by ε, what it costs small and large clients, and how many would rather be alone."""
    found = {name: {e: best(runs, name, e) for e in _levels()} for name in TITLES}
    columns = (*(f"ε = {e}" if e != NONE else "no noise" for e in _levels()),)
    _, by_themselves = best(runs, ALONE, NONE)
    alone = mean_std((run.summary()["test"]["personal"] for run in by_themselves), 100, 1)
    scores = [
        (TITLES[name], *(_score(seeds) for _, seeds in by_epsilon.values()))
        for name, by_epsilon in found.items()
    ]
    note = (
        f"δ = {DELTA:g}; each writer counts alike in what is shared. Training alone: {alone}. Of each cell "
        f"the best of three clips (without noise: of {len(RATES)} rates) on validation samples."
    )
    chosen = [(TITLES[n], *(clip for clip, _ in by_epsilon.values())) for n, by_epsilon in found.items()]
    losing = [
        (TITLES[n], *(mean_std((_losing(r, a) for r, a in zip(seeds, by_themselves)), 100, 0)
                      for _, seeds in by_epsilon.values()))
        for n, by_epsilon in found.items()
    ]  # fmt: skip
    return [
        Table("Test accuracy of the clients' models, %", ("method", *columns), scores, note),
        Table(
            "Clients whose model is worse than the one that they would train alone, %",
            ("method", *columns),
            losing,
            "On test samples, of which a writer has few: a part of these differences is chance.",
        ),
        _by_size_table(found),
        Table("Clip that was chosen (without noise: rate)", ("method", *columns), chosen),
    ]


def _score(seeds: Sequence[Record]) -> str:
    return mean_std((run.summary()["test"]["personal"] for run in seeds), 100, 1)


def _losing(run: Record, alone: Record) -> float:
    """Return the share of the clients with test samples that training alone would serve better."""
    change = run.scores("personal") - alone.scores("personal")
    return float(np.mean(change[~np.isnan(change)] < 0))


def _by_size_table(found: Mapping[str, Mapping[str, tuple[str, Sequence[Record]]]]) -> Table:
    """Return what ε costs the third of the clients with the fewest samples, and that with the most."""
    rows = []
    for name, by_epsilon in found.items():
        free = by_epsilon[NONE][1]
        for third, title in ((0, "smallest"), (2, "largest")):
            costs = [
                mean_std((cost(run, plain, third) for run, plain in zip(by_epsilon[e][1], free)), 100, 1)
                for e in _levels()[:-1]
            ]
            rows.append((f"{TITLES[name]}: {title} third", *costs))
    columns = ("clients", *(f"ε = {e}" for e in _levels()[:-1]))
    note = "Change of the mean accuracy, each client counting once, against the method without noise."
    return Table("What privacy costs small and large clients, points", columns, rows, note)


def cost(run: Record, plain: Record, third: int) -> float:
    """Return the mean change of a third of the clients by their number of training samples."""
    order = np.argsort(run.table.numbers("n_train"), kind="stable")
    chosen = np.array_split(order, 3)[third]
    change = (run.scores("personal") - plain.scores("personal"))[chosen]
    return float(np.nanmean(change))


def charts(runs: Runs) -> list[Chart]:
    """Return accuracy against ε, and what ε costs small and large clients."""
    levels = _levels()
    places = [*EPSILONS, EPSILONS[-1] * 4]
    utility, costs = [], {0: list[Series](), 2: list[Series]()}
    for name, title in TITLES.items():
        by_epsilon = [best(runs, name, e)[1] for e in levels]
        points = [[100 * run.summary()["test"]["personal"] for run in seeds] for seeds in by_epsilon]
        utility.append(Series(title, places, *_mean_and_spread(points)))
        for third, series in costs.items():
            pairs = [
                [100 * cost(r, p, third) for r, p in zip(seeds, by_epsilon[-1])] for seeds in by_epsilon[:-1]
            ]
            series.append(Series(title, list(EPSILONS), *_mean_and_spread(pairs)))
    alone = float(np.mean([100 * run.summary()["test"]["personal"] for run in best(runs, ALONE, NONE)[1]]))
    utility.append(Series("alone", [places[0], places[-1]], [alone, alone]))
    change = "change of accuracy, points"
    return [
        Chart(
            "What privacy costs",
            [Panel("", "ε", "test accuracy, %", utility, log="x")],
            f"The last points, drawn at ε = {places[-1]:g}, are without noise. Bands: a standard deviation.",
        ),
        Chart(
            "What privacy costs small and large clients",
            [
                Panel("the third with the fewest samples", "ε", change, costs[0], log="x"),
                Panel("the third with the most samples", "ε", change, costs[2], log="x"),
            ],
            "Each client counts once; against the same method without noise.",
            columns=2,
        ),
    ]


def _mean_and_spread(points: Sequence[Sequence[float]]) -> tuple[list[float | None], list[float]]:
    means: list[float | None] = [float(np.mean(p)) for p in points]
    return means, [float(np.std(p, ddof=1)) if len(p) > 1 else 0.0 for p in points]
