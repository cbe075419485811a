"""Robustness and personalization by regularization: Kundu et al., Fed+ (2022), Table 2 and Figures 1 to 4.

`fedplus-mnist` and `fedplus-regression` compare seven methods as Table 2 does, `fedplus-synthetic` and
`fedplus-stragglers` the family with the methods that it extends (Figure 4), and `fedplus-collapse` looks at
what aggregation does to clients (Figures 1 to 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from partita import data, models
from partita.algorithms import (
    apfl,
    coordinate_median_fedavg,
    fedavg,
    fedavg_plus,
    fedcomed_plus,
    fedgeomed_plus,
    fedprox,
    perfedavg,
    pfedme,
    rfa,
    scaffold,
)
from partita.algorithms.alone import local
from partita.core import check
from partita.core.parts import Algorithm
from partita.data import FederatedData, columns
from partita.engine.record import Record, lookup, mean, numbers
from partita.measures import aggregation_change, line_loss
from partita.recipes.experiment import Experiment
from partita.recipes.sizes import by_size
from partita.recipes.study import Study, Variant, under
from partita.recipes.tables import Runs, Table, mean_std, score
from partita.report.charts import Chart, Panel, Series, curve
from partita.schedule import synchronous

PLUS = ("fedavg_plus", "fedgeomed_plus", "fedcomed_plus")
NAMES = ("scaffold", "pfedme", "perfedavg", "apfl", *PLUS)
PAPER = {  # Table 2, in the order of NAMES
    "robust-N10": (81.4, 89.4, 87.3, 88.3, 87.0, 91.5, 80.5),
    "robust-N50": (82.3, 85.5, 85.7, 81.3, 86.7, 91.4, 79.4),
    "personal-N10": (72.0, 72.3, 70.6, 75.7, 71.9, 78.3, 66.7),
    "personal-N50": (63.8, 66.3, 68.9, 72.7, 69.4, 76.2, 52.3),
    "regression": (2764, 4268, 2780, 1606, 1966, 1048, 1074),
}
PARTIES = {  # the accuracy of Fed+ by the number of parties, the mean of its three variants (section 5.2)
    "synthetic": {3: 70.22, 15: 90.73, 30: 98.03},
    "mnist": {100: 69.80, 500: 81.34, 1000: 83.36},
    "femnist": {20: 25.16, 100: 68.71, 200: 78.66},
}
STRAGGLERS = 0.9
FIRST_LETTER = 36  # the class of 'a' in FEMNIST
PART = "Over the parties that took part; one that never had a turn has nothing but its zero start."
NOISE = 1.0  # scale of the Laplacian noise on pixels in [0, 1]; the paper does not say it


def fedplus_mnist(
    size: str = "small", noise: float = NOISE, delta: float = 0.1, rounds: int | None = None, seed: int = 0
) -> Study:
    """Robust and personal MNIST, logistic regression: seven methods on four datasets (Table 2).

    size    small (10 parties, 40 rounds) or paper (10 and 50 parties, 500 rounds)
    noise   scale of the Laplacian noise on two classes of each party of the personal variants
    delta   δ of the Fed+ methods
    rounds  number of rounds; default: by size
    """
    count = rounds or by_size(size, 40, 500)
    datasets = [f"{kind}-N{n}" for kind in ("robust", "personal") for n in by_size(size, (10,), (10, 50))]
    variants: dict[str, Variant] = {}
    for name in datasets:
        kind, parties = name.split("-N")
        source = data.mnist_shifted(
            int(parties),
            negatives=0.1 if parties == "10" else 0.2,
            noise=noise if kind == "personal" else 0.0,
            validation=0,
            seed=seed,
        )
        base = _experiment(zeros(models.logistic(784, 10)), source, count, seed, batch=20)
        methods = table_methods(0.02, 15.0, delta)
        variants |= under(base, {f"{name}-{method}": rule for method, rule in methods.items()})
    title = "Test accuracy, % (Table 2)"
    return Study(variants, tables=lambda runs: [_table(runs, datasets, title, 100, 1)])


def fedplus_regression(size: str = "small", rounds: int | None = None, seed: int = 0) -> Study:
    """Linear regression with one party unlike the others: seven methods (Table 2, last line).

    size    small (60 rounds) or paper (500 rounds)
    rounds  number of rounds; default: by size
    """
    source, count = data.synthetic_regression(validation=0, seed=seed), rounds or by_size(size, 60, 500)
    base = _experiment(zeros(nn.Linear(1000, 1)), source, count, seed, batch=10, loss="mse", metric="mse")
    methods = {f"regression-{name}": method for name, method in table_methods(1e-4, 1.0).items()}
    title = "Test error (Table 2)"
    return Study(under(base, methods), tables=lambda runs: [_table(runs, ["regression"], title, 1, 0)])


def fedplus_synthetic(
    size: str = "small", rounds: int | None = None, epochs: int | None = None, seed: int = 0
) -> Study:
    """Very different softmax parties, most of them stragglers: Fed+ and what it extends (Figure 4).

    In each round nine of ten parties are stragglers, who do fewer than `epochs` passes. FedAvg drops them,
    the others use what they have done. The Fed+ methods also run with 3 and 15 parties.

    size    small (40 rounds of up to 2 epochs) or paper (200 rounds of up to 20)
    rounds  number of rounds; default: by size
    epochs  most epochs of a party; default: by size
    """
    source = data.synthetic(1000.0, 10.0, clients=30, validation=0, seed=seed)
    most, count = epochs or by_size(size, 2, 20), rounds or by_size(size, 40, 200)
    model = zeros(models.logistic(60, 10))
    return _figure_4("synthetic", source, (30, 15, 3), model, 0.01, count, most, seed)


def fedplus_stragglers(
    data: str = "mnist",
    size: str = "small",
    classes: int | None = None,
    letters: bool = False,
    rounds: int | None = None,
    epochs: int | None = None,
    seed: int = 0,
) -> Study:
    """Many parties with few classes, most of them stragglers: Fed+ and what it extends (Figure 4).

    As `fedplus-synthetic`, on handwriting: parties have samples of few classes, in numbers with a long tail.
    The Fed+ methods also run with a half and a tenth of the parties.

    data     mnist (1000 parties) or femnist (200)
    size     small (a tenth of the parties, up to 5 epochs) or paper (all of them, up to 20)
    classes  classes of each party; default: 1 for mnist, 5 for femnist
    letters  of femnist: the letters a to j, as the paper, of which there are 2,505; default: the ten digits
    rounds   number of rounds; default: 100 for mnist, 200 for femnist
    epochs   most epochs of a party; default: by size
    """
    check.choice("data", data, ("mnist", "femnist"))
    parties, held, count, lr = (1000, 1, 100, 0.03) if data == "mnist" else (200, 5, 200, 0.003)
    source = _handwriting(data, parties, classes or held, letters, seed)
    everyone = by_size(size, parties // 10, parties)
    numbers = (everyone, everyone // 2, everyone // 10)
    most, model = epochs or by_size(size, 5, 20), zeros(models.logistic(784, 10))
    return _figure_4(data, source, numbers, model, lr, rounds or count, most, seed)


def fedplus_collapse(size: str = "small", rounds: int | None = None, seed: int = 0) -> Study:
    """What does aggregation do to clients? Change of their weights, and the loss on the way (Figures 1-3).

    The paper trains portfolios by reinforcement learning; here ten parties have two digits each and take many
    large steps.

    size    small (30 rounds) or paper (200 rounds)
    rounds  number of rounds; default: by size
    """
    source = data.digits(10, data.label_skew(classes=2), validation=0, seed=seed)
    base = _experiment(
        models.mlp(64, 64, 10, seed=seed), source, rounds or by_size(size, 30, 200), seed, batch=16, steps=50
    )
    base = replace(base, evaluate_every=1, measures=[aggregation_change(), line_loss()])
    methods = {
        "local": local(0.5),
        "fedavg": fedavg(0.5),
        "rfa": rfa(0.5),
        "coordinate_median": coordinate_median_fedavg(0.5),
        "fedprox": fedprox(0.5, mu=0.01),
        "fedavg_plus": fedavg_plus(0.5, 0.01),
    }
    return Study(under(base, methods), tables=lambda runs: [_jumps(runs)], charts=_collapse)


def table_methods(lr: float, sigma: float, delta: float = 0.1) -> dict[str, Algorithm]:
    """Return the seven methods of Table 2, and every client alone. What the paper leaves open is ours."""
    return {
        "scaffold": scaffold(lr),
        "pfedme": pfedme(lr, lam=sigma, inner_lr=lr, inner_steps=5),
        "perfedavg": perfedavg(lr, alpha=lr),
        "apfl": apfl(lr),
        "fedavg_plus": fedavg_plus(lr, sigma, delta),
        "fedgeomed_plus": fedgeomed_plus(lr, sigma, delta),
        "fedcomed_plus": fedcomed_plus(lr, sigma, delta),
        "local": local(lr),
    }


def _figure_4(
    name: str,
    source: FederatedData,
    numbers: tuple[int, int, int],
    model: nn.Module,
    lr: float,
    rounds: int,
    epochs: int,
    seed: int,
) -> Study:
    """Return all methods on the most parties, and Fed+ on smaller numbers: the first of the same parties."""
    plus = {
        "fedavg_plus": fedavg_plus(lr, 0.01, 0.001),
        "fedgeomed_plus": fedgeomed_plus(lr, 0.01, 0.1),
        "fedcomed_plus": fedcomed_plus(lr, 0.01, 0.1),
    }
    others = {
        "fedprox": fedprox(lr, mu=1.0),
        "rfa": rfa(lr),
        "coordinate_median": coordinate_median_fedavg(lr),
        **plus,
        "local": local(lr),
    }
    variants: dict[str, Variant] = {}
    for parties in numbers:
        some = source if parties == source.clients else source.subset(range(parties))
        work = {"batch": 10, "steps": None, "epochs": epochs, "evaluate_every": max(1, rounds // 20)}
        schedule = synchronous(stragglers=STRAGGLERS, late="partial")
        base = _experiment(model, some, rounds, seed, **work, schedule=schedule)
        methods = plus
        if parties == numbers[0]:
            dropping = replace(base, algorithm=fedavg(lr), schedule=synchronous(stragglers=STRAGGLERS))
            variants[f"fedavg-N{parties}"], methods = Variant(dropping), others
        variants |= under(base, {f"{method}-N{parties}": rule for method, rule in methods.items()})
    return Study(
        variants,
        tables=lambda runs: [_scores(runs), _by_parties(runs, name, numbers)],
        charts=lambda runs: [_learning(runs, name, numbers)],
    )


def _handwriting(name: str, parties: int, classes: int, letters: bool, seed: int) -> FederatedData:
    """Return images dealt to parties with few classes each, in numbers with a long tail (Li et al., 2020)."""
    partition = data.label_skew(classes, sigma=2.0, minimum=1 if letters else 5)
    if name == "mnist":
        return data.real("mnist", clients=parties, partition=partition, test=0.2, validation=0, seed=seed)
    writers = data.real("femnist", validation=0)
    first = FIRST_LETTER if letters else 0
    rows = (writers.y >= first) & (writers.y < first + 10)
    source = {"name": "femnist", "first": first}
    x, y = columns.in_memory(writers.x, name)[rows].numpy(), (writers.y[rows] - first).numpy()
    return data.split(x, y, parties, partition, test=0.2, validation=0, seed=seed, source=source)


def zeros(model: nn.Module) -> nn.Module:
    """Return the model with all parameters zero, where a convex problem may begin."""
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    return model


def _experiment(
    model: nn.Module, source: FederatedData, rounds: int, seed: int, **settings: Any
) -> Experiment:
    """Return an experiment that is evaluated at the end; `settings` are others, or in place of these."""
    return Experiment(
        model=model,
        data=source,
        algorithm=fedavg(0.01),
        rounds=rounds,
        cohort=min(10, source.clients),
        seed=seed,
        baselines=False,
        checkpoint_every=0,
        **{"steps": 20, "evaluate_every": rounds, **settings},
    )


# ---- tables


def _table(runs: Runs, datasets: Sequence[str], title: str, scale: float, digits: int) -> Table:
    """Return ours / the paper's, and beside them every party alone."""
    rows = []
    for name in datasets:
        *ours, alone = (
            score(runs[f"{name}-{method}"], scale=scale, digits=digits) for method in (*NAMES, "local")
        )
        rows.append((name, *(f"{a} / {b:g}" for a, b in zip(ours, PAPER[name])), alone))
    return Table(title, ("ours / the paper's", *NAMES, "alone"), rows)


def _scores(runs: Runs) -> Table:
    """Return the accuracy over samples, and the mean over parties, of those that took part."""
    rows: list[tuple[str, ...]] = []
    for name, seeds in runs.items():
        accuracies = (map(_accuracy, seeds), map(_by_party, seeds), map(_share, seeds))
        rows.append((name, *(mean_std(of, 100, 1) for of in accuracies)))
    columns = ("method", "over samples", "mean over parties", "took part, %")
    return Table("Test accuracy, % (Figure 4)", columns, rows, PART)


def _by_parties(runs: Runs, name: str, numbers: Sequence[int]) -> Table:
    """Return the accuracy of Fed+ by the number of parties, as section 5.2 does: the mean of the three."""
    rows: list[tuple[str, ...]] = []
    for parties in sorted(numbers):
        three = zip(*(runs[f"{method}-N{parties}"] for method in PLUS))
        means = [float(np.mean([_accuracy(run) for run in of])) for of in three]
        share = mean_std(map(_share, runs[f"{PLUS[0]}-N{parties}"]), 100, 1)
        paper = PARTIES[name].get(parties)
        rows.append((str(parties), mean_std(means, 100, 1), "-" if paper is None else f"{paper:.1f}", share))
    columns = ("parties", "ours", "the paper's", "took part, %")
    return Table("Accuracy of Fed+ by number of parties, %", columns, rows, PART)


def _learning(runs: Runs, name: str, numbers: Sequence[int]) -> Chart:
    """Return test accuracy over rounds, a curve for each method (Figure 4), and Fed+ by number of parties."""

    def accuracy(row: Mapping[str, Any]) -> Any:
        return row["test.personal"]

    most, ordered = f"-N{numbers[0]}", sorted(numbers)
    curves = [
        curve(variant.removesuffix(most), seeds, accuracy, scale=100)
        for variant, seeds in runs.items()
        if variant.endswith(most)
    ]
    bars = []
    for method in PLUS:
        ends = [np.array([100 * _accuracy(run) for run in runs[f"{method}-N{n}"]]) for n in ordered]
        spreads = [float(of.std(ddof=1)) if len(of) > 1 else 0.0 for of in ends]
        bars.append(Series(method, [str(n) for n in ordered], [of.mean() for of in ends], spreads, "bar"))
    return Chart(
        f"Methods with 90 % stragglers: {name} (Figure 4)",
        [
            Panel(f"{name}, {numbers[0]} parties", "round", "test accuracy, %", curves),
            Panel("Fed+ by number of parties", "parties", "test accuracy, %", bars),
        ],
        "Left: over all parties, also those without a turn until then, who still have their zero start. "
        "Right: at the end, over the parties that took part.",
    )


def _took_part(run: Record) -> np.ndarray:
    """Return for each party whether it has had a turn, be it one that was dropped; others have their start.

    Cohorts are drawn alike under all methods, so that these are the same parties for each of them.
    """
    taken: np.ndarray = run.table.numbers("reports") + run.table.numbers("late") > 0
    return taken


def _accuracy(run: Record) -> float:
    """Return the test accuracy over all samples of the parties that took part; NaN where there is none."""
    scores, samples = run.scores(), run.table.numbers("n_test")
    known = _took_part(run) & np.isfinite(scores) & (samples > 0)
    return float(np.average(scores[known], weights=samples[known])) if known.any() else np.nan


def _by_party(run: Record) -> float | None:
    """Return the mean test accuracy of the parties that took part; None where there is none."""
    return mean(run.scores()[_took_part(run)])


def _share(run: Record) -> float:
    return float(_took_part(run).mean())


def _jumps(runs: Runs) -> Table:
    """Return Figures 1 to 3 in figures; the report has the pictures."""
    rows: list[tuple[str, ...]] = []
    for name, seeds in runs.items():
        columns = zip(*map(_aggregation, seeds))  # figures × seeds
        rows.append((name, *(mean_std(column, digits=3) for column in columns), score(seeds)))
    titles = ("method", "change, mean", "change, largest", "loss before", "loss after", "test accuracy, %")
    note = "Change of weights at aggregation; training loss of the cohort before (λ = 0) and after (λ = 1)."
    return Table("What aggregation does (Figures 1 to 3), over all rounds", titles, rows, note)


def _aggregation(run: Record) -> tuple[float | None, ...]:
    """Return the mean and the largest change, and the mean loss before and after; None where there is none.

    Rounds without a finite value, as after training has diverged, do not count.
    """
    change = numbers(map(_measured("aggregation_change", "mean"), run.metrics))
    lines = [line for line in map(_measured("line_loss", "loss"), run.metrics) if line]
    return mean(change), max(change, default=None), *(mean(line[end] for line in lines) for end in (0, -1))


# ---- Figures 1 to 3


def _collapse(runs: Runs) -> list[Chart]:
    """Return Figures 1 to 3, each with a panel for each method."""
    changes, scores, lines = [], [], []
    for name, seeds in runs.items():
        mean, deviation = (curve(name, seeds, _measured("aggregation_change", k)) for k in ("mean", "std"))
        spread = [v or 0.0 for v in deviation.y] if len(deviation.y) == len(mean.y) else ()
        changes.append(Panel(name, "round", "change of weights", [mean._replace(spread=spread)]))
        accuracy = curve(name, seeds, lambda row: row["test.personal"], scale=100)
        scores.append(Panel(name, "round", "test accuracy, %", [accuracy]))
        lines.append(Panel(name, "λ", "training loss", _way(name, seeds)))
    return [
        Chart(
            "Change of weights at aggregation (Figure 1)",
            changes,
            "Mean over the cohort, with one deviation.",
        ),
        Chart("Training over rounds (Figure 2)", scores),
        Chart(
            "The way from the local to the aggregated model (Figure 3)",
            lines,
            "Loss of the cohort in the last round, from its own models (λ = 0) to the aggregate (λ = 1), and "
            "at the aggregate of the round before. A right end above the left one: the full step hurts.",
        ),
    ]


def _measured(measure: str, key: str) -> Callable[[Mapping[str, Any]], Any]:
    """Return what reads a number of a measure from a row of metrics; None where it has none."""
    return lambda row: lookup(row, "measures", measure, key)


def _way(name: str, seeds: Sequence[Record]) -> list[Series]:
    """Return the loss along λ after the last round, and where the round before ended: means over seeds."""
    read = _measured("line_loss", "loss")
    ways = [[read(row) for row in run.metrics if read(row)] for run in seeds]
    ways = [way for way in ways if len(way) > 1]
    if not ways:
        return []
    last = np.array([way[-1] for way in ways], dtype=float)  # seeds × values of λ
    before = float(np.mean(np.array([way[-2][-1] for way in ways], dtype=float)))
    lam = np.linspace(0, 1, last.shape[1]).tolist()
    spread = last.std(0, ddof=1).tolist() if len(last) > 1 else ()
    return [
        Series(name, lam, last.mean(0).tolist(), spread),
        Series("the aggregate before", [0.0, 1.0], [before, before]),
    ]
