"""Robustness and personalization by regularization: Kundu et al., Fed+ (2022), Table 2 and Figures 1 to 4.

`fedplus-mnist` and `fedplus-regression` compare seven methods as Table 2 does, `fedplus-synthetic` the family
with the methods that it extends (Figure 4), and `fedplus-collapse` looks at what aggregation does to clients
(Figures 1 to 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from partita.core import check, draws
from partita.core.parts import Algorithm
from partita.data import FederatedData
from partita.engine.record import Record
from partita.measures import aggregation_change, line_loss
from partita.recipes.experiment import Experiment
from partita.recipes.study import Study, Table, Variant, mean_std

Runs = Mapping[str, Sequence[Record]]
SIZES = ("small", "paper")
NAMES = ("scaffold", "pfedme", "perfedavg", "apfl", "fedavg_plus", "fedgeomed_plus", "fedcomed_plus")
PAPER = {  # Table 2, in the order of NAMES
    "robust-N10": (81.4, 89.4, 87.3, 88.3, 87.0, 91.5, 80.5),
    "robust-N50": (82.3, 85.5, 85.7, 81.3, 86.7, 91.4, 79.4),
    "personal-N10": (72.0, 72.3, 70.6, 75.7, 71.9, 78.3, 66.7),
    "personal-N50": (63.8, 66.3, 68.9, 72.7, 69.4, 76.2, 52.3),
    "regression": (2764, 4268, 2780, 1606, 1966, 1048, 1074),
}
NOISE = 1.0  # scale of the Laplacian noise on pixels in [0, 1]; the paper does not say it


def table_methods(lr: float, sigma: float, delta: float = 0.1) -> dict[str, Algorithm]:
    """The seven of Table 2, and every client alone. What the paper leaves open is ours."""
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


def fedplus_mnist(
    size: str = "small", noise: float = NOISE, delta: float = 0.1, rounds: int | None = None, seed: int = 0
) -> Study:
    """Robust and personal MNIST, logistic regression: seven methods on four datasets (Table 2).

    size    small (10 parties, 40 rounds) or paper (10 and 50 parties, 500 rounds)
    noise   scale of the Laplacian noise on two classes of each party of the personal variants
    delta   δ of the Fed+ methods
    rounds  how many
    """
    few = check.choice("size", size, SIZES) == "small"
    variants = {}
    for name in [k for k in PAPER if k.startswith(("robust", "personal")) and not (few and "50" in k)]:
        kind, parties = name.split("-N")
        source = data.mnist_shifted(
            int(parties),
            negatives=0.1 if parties == "10" else 0.2,
            noise=noise if kind == "personal" else 0.0,
            seed=seed,
        )
        for method, rule in table_methods(0.02, 15.0, delta).items():
            variants[f"{name}-{method}"] = _variant(
                zeros(models.logistic(784, 10)), source, rule, rounds or (40 if few else 500), seed, batch=20
            )
    sets = list(dict.fromkeys(k.rsplit("-", 1)[0] for k in variants))
    return Study(variants, tables=lambda runs: [_table(runs, sets, "Test accuracy, % (Table 2)", 100, 1)])


def fedplus_regression(size: str = "small", rounds: int | None = None, seed: int = 0) -> Study:
    """Linear regression with one party unlike the others: seven methods (Table 2, last line).

    size    small (60 rounds) or paper (500 rounds)
    rounds  how many
    """
    check.choice("size", size, SIZES)
    source = data.synthetic_regression(seed=seed)
    count = rounds or (60 if size == "small" else 500)
    variants = {
        f"regression-{name}": _variant(
            zeros(nn.Linear(1000, 1)), source, rule, count, seed, batch=10, loss="mse", metric="mse"
        )
        for name, rule in table_methods(1e-4, 1.0).items()
    }
    title = "Test error (Table 2)"
    return Study(variants, tables=lambda runs: [_table(runs, ["regression"], title, 1, 0)])


def fedplus_synthetic(
    size: str = "small", rounds: int | None = None, epochs: int | None = None, seed: int = 0
) -> Study:
    """Very different softmax parties, most of them stragglers: Fed+ and what it extends (Figure 4).

    Nine of ten parties are stragglers, who do fewer than `epochs` passes, a number that is drawn once for
    each of them. The family also with 3 and 15 of the parties.

    size    small (40 rounds of up to 2 epochs) or paper (200 rounds of up to 20)
    rounds, epochs
            how many, in their place
    """
    few = check.choice("size", size, SIZES) == "small"
    most, count = epochs or (2 if few else 20), rounds or (40 if few else 200)
    everyone = data.synthetic(1000.0, 10.0, clients=30, seed=seed)
    plus = {
        "fedavg_plus": fedavg_plus(0.01, 0.01, 0.001),
        "fedgeomed_plus": fedgeomed_plus(0.01, 0.01, 0.1),
        "fedcomed_plus": fedcomed_plus(0.01, 0.01, 0.1),
    }
    rules = {
        "fedavg": fedavg(0.01),
        "fedprox": fedprox(0.01, mu=1.0),
        "rfa": rfa(0.01),
        "coordinate_median": coordinate_median_fedavg(0.01),
        **plus,
        "local": local(0.01),
    }
    variants = {}
    for parties, some in ((30, rules), (15, plus), (3, plus)):
        source = everyone if parties == 30 else data.synthetic(1000.0, 10.0, clients=parties, seed=seed)
        steps = stragglers(source, most, seed)
        for name, rule in some.items():
            variants[f"{name}-N{parties}"] = _variant(
                zeros(models.logistic(60, 10)), source, rule, count, seed, batch=10, steps=steps
            )
    return Study(variants, tables=lambda runs: [_scores(runs)])


def fedplus_collapse(size: str = "small", rounds: int | None = None, seed: int = 0) -> Study:
    """What does aggregation do to clients? Change of their weights, and the loss on the way (Figures 1-3).

    The paper trains portfolios by reinforcement learning; here ten parties have two digits each and take many
    large steps.

    size    small (30 rounds) or paper (200 rounds)
    rounds  how many
    """
    check.choice("size", size, SIZES)
    source = data.digits(10, data.label_skew(classes=2), seed=seed)
    rules = {
        "local": local(0.5),
        "fedavg": fedavg(0.5),
        "rfa": rfa(0.5),
        "coordinate_median": coordinate_median_fedavg(0.5),
        "fedprox": fedprox(0.5, mu=0.01),
        "fedavg_plus": fedavg_plus(0.5, 0.01),
    }
    count = rounds or (30 if size == "small" else 200)
    measures = [aggregation_change(), line_loss()]
    variants = {
        name: _variant(
            models.mlp(64, 64, 10, seed=seed),
            source,
            rule,
            count,
            seed,
            batch=16,
            steps=50,
            evaluate_every=1,
            measures=measures,
        )
        for name, rule in rules.items()
    }
    return Study(variants, tables=lambda runs: [_jumps(runs)])


def stragglers(source: FederatedData, epochs: int, seed: int, share: float = 0.9) -> tuple[int, ...]:
    """Steps of each party: `epochs` passes in batches of ten, or for stragglers 1 to epochs − 1 passes."""
    rng = draws.generator(seed, "stragglers")
    slow = rng.random(source.clients) < share
    passes = np.where(slow, rng.integers(1, max(epochs, 2), source.clients), epochs)
    return tuple(int(p * -(-n // 10)) for p, n in zip(passes, source.sizes()))


def zeros(model: nn.Module) -> nn.Module:
    """The model with all parameters zero, where a convex problem may begin."""
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    return model


def _variant(
    model: nn.Module, source: FederatedData, rule: Algorithm, rounds: int, seed: int, **more: Any
) -> Variant:
    given = {"steps": 20, "evaluate_every": rounds, **more}
    return Variant(
        Experiment(
            model=model,
            data=source,
            algorithm=rule,
            rounds=rounds,
            cohort=min(10, source.clients),
            seed=seed,
            baselines=False,
            checkpoint_every=0,
            **given,
        )
    )


# ---- tables


def _table(runs: Runs, sets: Sequence[str], title: str, scale: float, digits: int) -> Table:
    """Ours / the paper's, and beside them every party alone."""
    rows = []
    for name in sets:
        ours = {
            k: mean_std([r.summary()["test"]["personal"] for r in runs[f"{name}-{k}"]], scale, digits)
            for k in (*NAMES, "local")
        }
        cells = [f"{ours[k]} / {theirs:g}" for k, theirs in zip(NAMES, PAPER[name])]
        rows.append((name, *cells, ours["local"]))
    return Table(title, ("ours / the paper's", *NAMES, "alone"), rows)


def _scores(runs: Runs) -> Table:
    """Accuracy over samples, and the mean over parties."""

    def parties(run: Record) -> float:
        return float(np.nanmean(run.scores("personal")))

    rows: list[tuple[str, ...]] = []
    for name, seeds in runs.items():
        pooled = [r.summary()["test"]["personal"] for r in seeds]
        rows.append((name, mean_std(pooled, 100, 1), mean_std(map(parties, seeds), 100, 1)))
    return Table("Test accuracy, % (Figure 4)", ("method", "over samples", "mean over parties"), rows)


def _jumps(runs: Runs) -> Table:
    """Figures 1 to 3 in figures; the report has the pictures."""
    rows: list[tuple[str, ...]] = []
    for name, seeds in runs.items():
        found = np.array([_aggregation(run) for run in seeds])  # seeds × figures
        score = mean_std([r.summary()["test"]["personal"] for r in seeds], 100, 1)
        rows.append((name, *(mean_std(column, digits=3) for column in found.T), score))
    titles = ("method", "change, mean", "change, largest", "loss before", "loss after", "test accuracy, %")
    note = "Change of weights at aggregation; training loss of the cohort before (λ = 0) and after (λ = 1)."
    return Table("What aggregation does (Figures 1 to 3), over all rounds", titles, rows, note)


def _aggregation(run: Record) -> tuple[float, float, float, float]:
    """Mean and largest change, mean loss before and after."""
    change = [row["measures"]["aggregation_change"]["mean"] for row in run.metrics]
    line = np.array([row["measures"]["line_loss"]["loss"] for row in run.metrics]).mean(0)
    return float(np.mean(change)), float(np.max(change)), float(line[0]), float(line[-1])
