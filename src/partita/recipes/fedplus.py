"""Robustness and personalization by regularization: Kundu et al., Fed+ (2022), Table 2 and Figures 1 to 4.

`fedplus-mnist` and `fedplus-regression` compare seven methods as Table 2 does, `fedplus-synthetic` and
`fedplus-stragglers` the family with the methods that it extends (Figure 4), and `fedplus-collapse` looks at
what aggregation does to clients (Figures 1 to 3).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
from partita.measures import aggregation_change, line_loss
from partita.recipes.experiment import Experiment
from partita.recipes.fedplus_figures import (
    figure_4,
    figures_1_to_3,
    jumps_table,
    parties_table,
    scores_table,
    table_2,
)
from partita.recipes.sizes import by_size
from partita.recipes.study import Study, Variant, under
from partita.schedule import synchronous

STRAGGLERS = 0.9
FIRST_LETTER = 36  # the class of 'a' in FEMNIST
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
    return Study(variants, tables=lambda runs: [table_2(runs, datasets, title, 100, 1)])


def fedplus_regression(size: str = "small", rounds: int | None = None, seed: int = 0) -> Study:
    """Linear regression with one party unlike the others: seven methods (Table 2, last line).

    size    small (60 rounds) or paper (500 rounds)
    rounds  number of rounds; default: by size
    """
    source, count = data.synthetic_regression(validation=0, seed=seed), rounds or by_size(size, 60, 500)
    base = _experiment(zeros(nn.Linear(1000, 1)), source, count, seed, batch=10, loss="mse", metric="mse")
    methods = {f"regression-{name}": method for name, method in table_methods(1e-4, 1.0).items()}
    title = "Test error (Table 2)"
    return Study(under(base, methods), tables=lambda runs: [table_2(runs, ["regression"], title, 1, 0)])


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
    return _with_stragglers("synthetic", source, (30, 15, 3), model, 0.01, count, most, seed)


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
    return _with_stragglers(data, source, numbers, model, lr, rounds or count, most, seed)


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
    return Study(under(base, methods), tables=lambda runs: [jumps_table(runs)], charts=figures_1_to_3)


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


def _with_stragglers(
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
        tables=lambda runs: [scores_table(runs), parties_table(runs, name, numbers)],
        charts=lambda runs: [figure_4(runs, name, numbers)],
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
