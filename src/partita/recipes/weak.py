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
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn

from partita import capacity, data, models
from partita.algorithms import fedavg
from partita.core import check
from partita.core.parts import Capacity, Share
from partita.data import FederatedData
from partita.engine.record import Record
from partita.optim import rates
from partita.recipes.experiment import Experiment
from partita.recipes.study import Study, Table, Variant, mean_std

Runs = Mapping[str, Sequence[Record]]
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


class Task(NamedTuple):
    """A dataset of the paper: its model, what is cut off it, the step size and the rounds."""

    cuts: dict[str, int]
    lr: float
    rounds: int
    norm: str | None = None
    falls: tuple[float, ...] = (0.8, 0.9)


TASKS = {
    "cifar10": Task({"strong": 0, "moderate": 4, "weak": 7}, 0.4, 1000, "global"),
    "femnist": Task({"strong": 0, "moderate": 2, "weak": 3}, 0.04, 200, falls=()),
    "imdb": Task({"strong": 0, "moderate": 1, "weak": 1}, 0.1, 400, falls=(0.5, 0.75)),
}


def embracing_scaling(
    rounds: int = 30, width: float = 0.25, lr: float = 0.1, clients: int = 16, seed: int = 0
) -> Study:
    """Do weak clients help? 16 strong ones and 0 to 112 weak ones, all in every round (Table 2).

    rounds   the paper has 1000
    width    of ResNet-20; the paper's is 1
    lr       the step size to begin with; the paper's is 0.4
    clients  in all; the paper has 128. With fewer, as many times fewer of each class
    """
    few = share_of(clients)
    whole = cifar(clients, seed)
    variants = {}
    for added in ADDED:
        strong, weak = 16 // few, added // few
        there = _absent(whole, strong + weak)
        names = ["strong"] * strong + ["weak"] * (clients - strong)
        for kind in ("depth", "width") if added else ("depth",):
            held = _capacity("cifar10", kind, names)
            name = f"{kind}-{added}" if added else "strong-only"
            variants[name] = _variant(_resnet(width, seed), there, held, rounds, None, lr, _norm(kind), seed)
    return Study(variants, tables=lambda runs: [_scaling(runs)])


def embracing_mix(
    task: str = "cifar10",
    cases: Sequence[int] = (1, 5, 7, 8),
    narrow: Sequence[int] = (5, 7),
    rounds: int | None = None,
    width: float = 0.25,
    lr: float | None = None,
    clients: int = 16,
    seed: int = 0,
) -> Study:
    """How many clients may be weak? Mixes of devices, a quarter of the clients in each round (Tables 3 to 6).

    task     cifar10 (ResNet-20), femnist (two writers for each client) or imdb (bidirectional LSTM)
    cases    of the paper's ten mixes, for the last blocks
    narrow   of them, for narrow models (cifar10 only)
    rounds   the paper has 1000, 200 and 400; without a word 30
    width    of ResNet-20; the paper's is 1
    lr       the step size to begin with (None: 0.1, 0.04, 0.1; the paper's: 0.4, 0.04, 0.1)
    clients  in all; the paper has 128. With fewer, as many times fewer of each class
    """
    check.choice("task", task, TASKS)
    few = share_of(clients)
    model, source = _task(task, clients, width, seed)
    step = lr if lr is not None else (0.1 if task == "cifar10" else TASKS[task].lr)
    variants = {}
    for kind, chosen in (("depth", cases), ("width", narrow if task == "cifar10" else ())):
        for case in chosen:
            check.choice("case", str(case), [str(c) for c in CASES])
            counts = dict(zip(WIDTHS, (n // few for n in CASES[case])))
            held = _capacity(task, kind, {k: n for k, n in counts.items() if n})
            norm = None if TASKS[task].norm is None else _norm(kind)
            variants[f"{kind}-{case}"] = _variant(
                model, source, held, rounds or 30, max(1, clients // 4), step, norm, seed, TASKS[task].falls
            )
    return Study(variants, tables=lambda runs: [_mix(runs, task)])


def embracing_norm(
    rounds: int = 30, width: float = 0.25, lr: float = 0.1, clients: int = 16, seed: int = 0
) -> Study:
    """Does BatchNorm bear different devices? Averaged or static statistics, 16 strong and 112 weak (Table 9).

    rounds   the paper has 1000
    width    of ResNet-20; the paper's is 1
    lr       the step size to begin with; the paper's is 0.4
    clients  in all; the paper has 128. With fewer, as many times fewer of each class
    """
    strong = 16 // share_of(clients)
    source = cifar(clients, seed)
    names = ["strong"] * strong + ["weak"] * (clients - strong)
    variants = {
        f"{kind}-{norm}": _variant(
            _resnet(width, seed), source, _capacity("cifar10", kind, names), rounds, None, lr, norm, seed
        )
        for kind in ("width", "depth")
        for norm in ("static", "global")
    }
    return Study(variants, tables=lambda runs: [_norms(runs)])


# ---- what runs


def _variant(
    model: nn.Module,
    source: FederatedData,
    held: Capacity,
    rounds: int,
    cohort: int | None,
    lr: float,
    norm: str | None,
    seed: int,
    falls: Sequence[float] = (0.8, 0.9),
) -> Variant:
    check.integer("rounds", rounds, low=1)
    at = sorted({max(1, round(share * rounds)) for share in falls})
    rate = rates.stepped(lr, at=at, factor=0.1) if at else rates.constant(lr)
    return Variant(
        Experiment(
            model=model,
            data=source,
            algorithm=fedavg(rate, momentum=0.9, weight_decay=1e-4),
            rounds=rounds,
            cohort=cohort,
            steps=TAU,
            batch=BATCH,
            seed=seed,
            capacity=held,
            norm=norm,
            baselines=False,
            checkpoint_every=0,
        )
    )


def _capacity(task: str, kind: str, assign: Mapping[str, int] | Sequence[str]) -> Capacity:
    used = set(assign)
    if kind == "width":
        return capacity.width({k: w for k, w in WIDTHS.items() if k in used}, assign)
    held = capacity.depth({k: c for k, c in TASKS[task].cuts.items() if k in used}, assign)
    return held if task != "imdb" else _half(held)


class Last(nn.Module):
    """The second half of the words."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, x.shape[1] // 2 :]


def _half(held: Capacity) -> Capacity:
    """Weak devices read the second half of the words only, as in the last row of Table 1."""

    def shares(model: nn.Module, x: Tensor) -> tuple[Share, ...]:
        found = held.shares(model, x)
        return tuple(s._replace(pieces=(*s.pieces, Last())) if s.name == "weak" else s for s in found)

    return held._replace(shares=shares, options={**held.options, "words": "half for weak"})


def _norm(kind: str) -> str:
    """As in the paper: static for narrow models, which bear nothing else."""
    return "static" if kind == "width" else "global"


def share_of(clients: int) -> int:
    """By how much everything is smaller than in the paper."""
    if clients not in (128, 64, 32, 16, 8):
        raise check.fail("clients", clients, "128, 64, 32, 16 or 8")
    return CLIENTS // clients


def _resnet(width: float, seed: int) -> nn.Module:
    return models.resnet20(10, width=width, seed=seed)


def cifar(clients: int, seed: int) -> FederatedData:
    """The images of the file, standardized; its test images follow the labels of the clients."""
    with warnings.catch_warnings():  # one or two clients that would have none receive a sample of others
        warnings.filterwarnings("ignore", "dirichlet")
        whole = data.real("cifar10", clients=CLIENTS, partition=data.dirichlet(0.1), test="file", seed=seed)
    found = whole if clients == CLIENTS else whole.subset(range(clients))
    return replace(found, x=(found.x.float() / 255 - 0.473) / 0.252)


def _task(task: str, clients: int, width: float, seed: int) -> tuple[nn.Module, FederatedData]:
    if task == "cifar10":
        return _resnet(width, seed), cifar(clients, seed)
    if task == "femnist":
        writers = data.real("femnist", clients=2 * clients, seed=seed)
        return models.leaf_cnn(seed=seed), _paired(writers, clients)
    reviews = data.real("imdb", clients=CLIENTS, partition=data.dirichlet(0.1), seed=seed)
    source = reviews if clients == CLIENTS else reviews.subset(range(clients))
    return models.bilstm(int(source.x.max()) + 1, seed=seed), source


def _paired(writers: FederatedData, clients: int) -> FederatedData:
    """Two writers to each client."""
    ranges = {}
    rows, at = [], 0
    for split in ("train", "test"):
        found = np.zeros((clients, 2), dtype=np.int64)
        for i in range(clients):
            found[i, 0] = at
            for start, length in writers.ranges(split)[[2 * i, 2 * i + 1]].tolist():
                rows.append(np.arange(start, start + length))
                at += length
            found[i, 1] = at - found[i, 0]
        ranges[split] = found
    order = np.concatenate(rows)
    names = [f"{a}+{b}" for a, b in zip(writers.names[::2], writers.names[1::2])]
    source = {**writers.source, "writers": 2}
    return FederatedData.make(
        writers.x[order], writers.y[order], ranges["train"], ranges["test"], names=names, source=source
    )


def _absent(whole: FederatedData, present: int) -> FederatedData:
    """Only the first clients have samples to train on; the test samples of all stay."""
    train = whole.train.copy()
    train[present:, 1] = 0
    return replace(whole, train=train, source={**whole.source, "present": present})


# ---- what is shown


def _accuracy(runs: Runs, name: str) -> str:
    found = [run.summary()["test"]["global"] for run in runs[name]]
    return mean_std(found, 100, 1)


def _scaling(runs: Runs) -> Table:
    rows = []
    for i, added in enumerate(ADDED):
        names = [f"{kind}-{added}" if added else "strong-only" for kind in ("width", "depth")]
        cells = [
            x
            for n, kind in zip(names, ("width", "depth"))
            for x in (_accuracy(runs, n), f"{PAPER_ADDED[kind][i]}")
        ]
        rows.append(("16", str(added), *cells))
    columns = ("strong", "weak", "width", "paper", "depth", "paper")
    return Table("Test accuracy of the global model, %, with weak clients (Table 2)", columns, rows, NOTE)


def _mix(runs: Runs, task: str) -> Table:
    rows = []
    for case, counts in CASES.items():
        deep, narrow = f"depth-{case}", f"width-{case}"
        if deep in runs or narrow in runs:
            rows.append(
                (
                    str(case),
                    *map(str, counts),
                    _accuracy(runs, deep) if deep in runs else "-",
                    f"{PAPER[task][case - 1]}",
                    _accuracy(runs, narrow) if narrow in runs else "-",
                    f"{PAPER['width'][case - 1]}" if task == "cifar10" else "-",
                )
            )
    columns = ("case", "strong", "moderate", "weak", "depth", "paper", "width", "paper")
    return Table(
        "Test accuracy of the global model, %, in mixes of devices (Tables 3 to 6)", columns, rows, NOTE
    )


def _norms(runs: Runs) -> Table:
    rows: list[tuple[str, ...]] = [
        (name, _accuracy(runs, name), f"{PAPER_NORM[name]}") for name in PAPER_NORM
    ]
    return Table(
        "Test accuracy, %, by what becomes of BatchNorm (Table 9)", ("variant", "ours", "paper"), rows
    )
