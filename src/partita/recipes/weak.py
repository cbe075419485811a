"""Weak devices in training: EmbracingFL, Lee et al. (2024), Tables 2 to 6 and 9.

128 clients with label-skewed images (Dirichlet, α = 0.1), ResNet-20, 10 local steps of 32 images a round,
momentum 0.9, weight decay 1e-4, and a step size that falls to a tenth after 80 % and 90 % of the rounds.
A weak device trains the last part of the model only (`depth`), or a narrow form of all of it (`width`: the
first channels, an average over the holders of each coordinate).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, NamedTuple, TypedDict, Unpack

import numpy as np
from torch import Tensor, nn

from partita import capacity, data, models
from partita.algorithms import fedavg
from partita.core import check
from partita.core.options import Option, checked
from partita.core.parts import Capacity, Share
from partita.data import FederatedData
from partita.optim import rates
from partita.recipes.experiment import Experiment
from partita.recipes.study import Study, Variant
from partita.recipes.tables import Runs, Table, score

CLIENTS, TAU, BATCH = 128, 10, 32
ADDED = (0, 16, 32, 64, 112)
CASES = {  # strong, moderate, weak
    1: (128, 0, 0),
    2: (64, 64, 0),
    3: (32, 96, 0),
    4: (16, 112, 0),
    5: (64, 0, 64),
    6: (32, 0, 96),
    7: (16, 0, 112),
    8: (32, 32, 64),
    9: (16, 32, 80),
    10: (16, 16, 96),
}
PAPER = {  # Tables 3, 4 and 5, and 6 for the narrow models
    "cifar10": (80.45, 80.20, 79.78, 79.72, 80.08, 78.91, 76.98, 80.33, 79.63, 77.63),
    "femnist": (81.27, 81.80, 81.55, 80.44, 80.80, 80.78, 79.63, 81.29, 81.18, 81.17),
    "imdb": (82.15, 82.21, 82.09, 82.55, 80.38, 77.09, 74.89, 79.09, 79.41, 77.32),
    "width": (80.45, 76.77, 67.92, 59.03, 72.97, 69.70, 54.53, 67.93, 59.59, 58.17),
}
PAPER_ADDED = {"depth": (60.15, 66.62, 72.60, 74.79, 77.34), "width": (60.15, 61.34, 62.09, 63.68, 65.01)}
PAPER_NORM = {"width-static": 64.01, "width-global": 19.21, "depth-static": 74.49, "depth-global": 77.34}
NOTE = "Numbers of clients are the paper's, of 128; with fewer clients there are as many times fewer of each."
WIDTHS = {"strong": 1.0, "moderate": 0.45, "weak": 0.2}
NORMS = {"width": "static", "depth": "global"}  # as in the paper: narrow models diverge with another


class Options(TypedDict, total=False):
    """The arguments of all recipes on CIFAR-10."""

    width: Annotated[float, Option("width of ResNet-20; the paper uses 1", default=0.25)]
    clients: Annotated[
        int,
        Option(
            "number of clients; the paper uses 128; with fewer, as many times fewer of each class", default=16
        ),
    ]


class Training(Options, total=False):
    """Those that train as long as Table 2."""

    rounds: Annotated[int, Option("number of rounds; the paper uses 1000", low=1, default=30)]
    lr: Annotated[float, Option("initial step size; the paper uses 0.4", default=0.1)]


class Task(NamedTuple):
    """A dataset of the paper: the blocks that are cut off its model, the step size, and when it falls."""

    cuts: dict[str, int]
    lr: float
    falls: tuple[float, ...] = (0.8, 0.9)


TASKS = {
    "cifar10": Task({"strong": 0, "moderate": 4, "weak": 7}, 0.1),
    "femnist": Task({"strong": 0, "moderate": 2, "weak": 3}, 0.04, falls=()),
    "imdb": Task({"strong": 0, "moderate": 1, "weak": 1}, 0.1, falls=(0.5, 0.75)),
}


@checked()
def embracing_scaling(seed: int = 0, **options: Unpack[Training]) -> Study:
    """Do weak clients help? 16 strong ones and 0 to 112 weak ones, all in every round (Table 2)."""
    base = _on_cifar(seed, **options)
    clients, shrink = options["clients"], share_of(options["clients"])
    variants = {}
    for added in ADDED:
        present = replace(base, data=_first(base.data, (16 + added) // shrink))
        for kind in ("depth", "width") if added else ("depth",):
            held = _capacity("cifar10", kind, _sixteen_strong(clients))
            name = f"{kind}-{added}" if added else "strong-only"
            variants[name] = Variant(replace(present, capacity=held, norm=NORMS[kind]))
    return Study(variants, tables=lambda runs: [_scaling(runs)])


@checked()
def embracing_mix(
    task: str = "cifar10",
    cases: Sequence[int] = (1, 5, 7, 8),
    narrow: Sequence[int] = (5, 7),
    rounds: int | None = None,
    lr: float | None = None,
    seed: int = 0,
    **options: Unpack[Options],
) -> Study:
    """How many clients may be weak? Mixes of devices, a quarter of the clients in each round (Tables 3 to 6).

    task     cifar10 (ResNet-20), femnist (two writers for each client) or imdb (bidirectional LSTM)
    cases    of the paper's ten mixes, for the last blocks
    narrow   of them, for narrow models (cifar10 only)
    rounds   default 30; the paper uses 1000, 200 and 400
    lr       initial step size; default 0.1, 0.04, 0.1; the paper uses 0.4, 0.04, 0.1
    """
    check.choice("task", task, TASKS)
    clients, shrink = options["clients"], share_of(options["clients"])
    chosen = TASKS[task]
    model, source = _model_and_data(task, clients, options["width"], seed)
    step = chosen.lr if lr is None else lr
    base = _experiment(model, source, rounds or 30, step, seed, chosen.falls)
    base = replace(base, cohort=max(1, clients // 4))
    variants = {}
    for kind, numbers in (("depth", cases), ("width", narrow if task == "cifar10" else ())):
        for case in numbers:
            check.choice("case", str(case), [str(c) for c in CASES])
            counts = {k: n // shrink for k, n in zip(WIDTHS, CASES[case]) if n // shrink}
            norm = NORMS[kind] if task == "cifar10" else None  # the other models have no BatchNorm
            held = _capacity(task, kind, counts)
            variants[f"{kind}-{case}"] = Variant(replace(base, capacity=held, norm=norm))
    return Study(variants, tables=lambda runs: [_mix(runs, task)])


@checked()
def embracing_norm(seed: int = 0, **options: Unpack[Training]) -> Study:
    """Does BatchNorm work when devices train different parts of the model? 16 strong, 112 weak (Table 9).

    Its statistics are averaged (global) or measured once after training (static).
    """
    base = _on_cifar(seed, **options)
    variants = {}
    for kind in ("width", "depth"):
        held = _capacity("cifar10", kind, _sixteen_strong(options["clients"]))
        for norm in ("static", "global"):
            variants[f"{kind}-{norm}"] = Variant(replace(base, capacity=held, norm=norm))
    return Study(variants, tables=lambda runs: [_norms(runs)])


# ---- experiments


def _on_cifar(seed: int, **options: Unpack[Training]) -> Experiment:
    share_of(options["clients"])
    model, source = _model_and_data("cifar10", options["clients"], options["width"], seed)
    return _experiment(model, source, options["rounds"], options["lr"], seed)


def _experiment(
    model: nn.Module,
    source: FederatedData,
    rounds: int,
    lr: float,
    seed: int,
    falls: Sequence[float] = (0.8, 0.9),
) -> Experiment:
    """Return fedavg with a step size that falls to a tenth after these shares of the rounds."""
    check.integer("rounds", rounds, low=1)
    at = sorted({max(1, round(share * rounds)) for share in falls})
    rate = rates.stepped(lr, at=at, factor=0.1) if at else rates.constant(lr)
    return Experiment(
        model=model,
        data=source,
        algorithm=fedavg(rate, momentum=0.9, weight_decay=1e-4),
        rounds=rounds,
        steps=TAU,
        batch=BATCH,
        seed=seed,
        baselines=False,
        checkpoint_every=0,
    )


def share_of(clients: int) -> int:
    """Return how many times fewer clients there are than in the paper."""
    if clients not in (128, 64, 32, 16, 8):
        raise check.fail("clients", clients, "128, 64, 32, 16 or 8")
    return CLIENTS // clients


def _sixteen_strong(clients: int) -> list[str]:
    """Return the classes of the clients: 16 of 128 are strong, all others weak."""
    strong = 16 // share_of(clients)
    return ["strong"] * strong + ["weak"] * (clients - strong)


def _capacity(task: str, kind: str, assign: Mapping[str, int] | Sequence[str]) -> Capacity:
    if kind == "width":
        return capacity.width({k: w for k, w in WIDTHS.items() if k in assign}, assign)
    held = capacity.depth({k: c for k, c in TASKS[task].cuts.items() if k in assign}, assign)
    return held if task != "imdb" else _half_of_the_words(held)


class SecondHalf(nn.Module):
    """Pass on the second half of the words."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the second half."""
        return x[:, x.shape[1] // 2 :]


def _half_of_the_words(held: Capacity) -> Capacity:
    """Let weak devices read the second half of the words only, as in the last row of Table 1."""

    def shares(model: nn.Module, x: Tensor) -> tuple[Share, ...]:
        return tuple(
            share._replace(pieces=(*share.pieces, SecondHalf())) if share.name == "weak" else share
            for share in held.shares(model, x)
        )

    return held._replace(shares=shares, options={**held.options, "words": "half for weak"})


# ---- data


def cifar(clients: int, seed: int) -> FederatedData:
    """Return the images of the file, standardized; its test images follow the labels of the clients."""
    with warnings.catch_warnings():  # one or two clients that would have none receive a sample of others
        warnings.filterwarnings("ignore", "dirichlet")
        dealt = data.real(
            "cifar10", clients=CLIENTS, partition=data.dirichlet(0.1), test="file", validation=0, seed=seed
        )
    dealt = _only(dealt, clients)
    return replace(dealt, x=(dealt.x.float() / 255 - 0.473) / 0.252)


def _only(dealt: FederatedData, clients: int) -> FederatedData:
    return dealt if clients == CLIENTS else dealt.subset(range(clients))


def _model_and_data(task: str, clients: int, width: float, seed: int) -> tuple[nn.Module, FederatedData]:
    if task == "cifar10":
        return models.resnet20(10, width=width, seed=seed), cifar(clients, seed)
    if task == "femnist":
        writers = data.real("femnist", clients=2 * clients, validation=0, seed=seed)
        return models.leaf_cnn(seed=seed), _paired(writers, clients)
    reviews = data.real("imdb", clients=CLIENTS, partition=data.dirichlet(0.1), validation=0, seed=seed)
    source = _only(reviews, clients)
    return models.bilstm(int(source.x.max()) + 1, seed=seed), source


def _paired(writers: FederatedData, clients: int) -> FederatedData:
    """Give two writers to each client."""
    ranges, rows, at = {}, [], 0
    for split in ("train", "test"):
        starts = [at]
        for i in range(clients):
            for start, length in writers.ranges(split)[[2 * i, 2 * i + 1]].tolist():
                rows.append(np.arange(start, start + length))
                at += length
            starts.append(at)
        ranges[split] = np.stack([starts[:-1], np.diff(starts)], axis=1)
    order = np.concatenate(rows)
    names = [f"{a}+{b}" for a, b in zip(writers.names[::2], writers.names[1::2])]
    source = {**writers.source, "writers": 2}
    return FederatedData.make(
        writers.x[order], writers.y[order], ranges["train"], ranges["test"], names=names, source=source
    )


def _first(dealt: FederatedData, present: int) -> FederatedData:
    """Leave training samples to the first clients only; the test samples of all stay."""
    train = dealt.train.copy()
    train[present:, 1] = 0
    return replace(dealt, train=train, source={**dealt.source, "present": present})


# ---- tables


def _scaling(runs: Runs) -> Table:
    rows = []
    for i, added in enumerate(ADDED):
        cells: list[str] = []
        for kind in ("width", "depth"):
            name = f"{kind}-{added}" if added else "strong-only"
            cells += [score(runs[name], "global"), f"{PAPER_ADDED[kind][i]}"]
        rows.append(("16", str(added), *cells))
    columns = ("strong", "weak", "width", "paper", "depth", "paper")
    return Table("Test accuracy of the global model, %, with weak clients (Table 2)", columns, rows, NOTE)


def _mix(runs: Runs, task: str) -> Table:
    rows = []
    for case, counts in CASES.items():
        names = (f"depth-{case}", f"width-{case}")
        if not any(name in runs for name in names):
            continue
        deep, narrow = (score(runs[name], "global") if name in runs else "-" for name in names)
        paper = f"{PAPER['width'][case - 1]}" if task == "cifar10" else "-"
        rows.append((str(case), *map(str, counts), deep, f"{PAPER[task][case - 1]}", narrow, paper))
    columns = ("case", "strong", "moderate", "weak", "depth", "paper", "width", "paper")
    title = "Test accuracy of the global model, %, in mixes of devices (Tables 3 to 6)"
    return Table(title, columns, rows, NOTE)


def _norms(runs: Runs) -> Table:
    rows = [(name, score(runs[name], "global"), f"{paper}") for name, paper in PAPER_NORM.items()]
    title = "Test accuracy, %, by what becomes of BatchNorm (Table 9)"
    return Table(title, ("variant", "ours", "paper"), list(rows))
