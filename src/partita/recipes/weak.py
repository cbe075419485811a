"""Weak devices in training: EmbracingFL, Lee et al. (2024), Tables 2 to 7 and 9 and Figure 4.

128 clients with label-skewed images (Dirichlet, α = 0.1), ResNet-20, 10 local steps of 32 images a round,
momentum 0.9, weight decay 1e-4, and a step size that falls to a tenth after 80 % and 90 % of the rounds.
A weak device trains the last part of the model only (`depth`), or a narrow form of all of it (`width`: the
first channels, an average over the holders of each coordinate).

Equations (4) and (5): every client counts alike, y is averaged over the s strong ones, z over all m.

    p_y = 1/s for a strong client and 0 for a weak one,  p_z = 1/m
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple, TypedDict, Unpack

import numpy as np
from torch import nn

from partita import capacity, data, models
from partita.algorithms import fedavg
from partita.algorithms.base import WEIGHTINGS
from partita.core import check
from partita.core.options import Option, checked
from partita.core.parts import Capacity
from partita.data import FederatedData, columns
from partita.engine.record import Record
from partita.optim import rates
from partita.recipes.experiment import Experiment
from partita.recipes.sizes import by_size
from partita.recipes.study import Study, Variant
from partita.recipes.tables import Runs, Table, score
from partita.report.charts import Chart, Panel, Series, curve

CLIENTS, TAU, BATCH = 128, 10, 32
POINTS = 25  # evaluations in a run
ROUNDING = 1e-9  # 100 · 0.29 is below 29
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
PAPER_ROUNDS = {  # Table 7: rounds to a target accuracy in %, of narrow models and of the last blocks
    1: (80, 890, 890),
    2: (76, 867, 817),
    3: (67, 982, 801),
    4: (59, 836, 483),
    5: (72, 813, 811),
    6: (69, 806, 629),
    7: (54, 939, 572),
}
PAPER_ADDED = {"depth": (60.15, 66.62, 72.60, 74.79, 77.34), "width": (60.15, 61.34, 62.09, 63.68, 65.01)}
PAPER_NORM = {"width-static": 64.01, "width-global": 19.21, "depth-static": 74.49, "depth-global": 77.34}
NOTE = "Numbers of clients are the paper's, of 128; with fewer clients there are as many times fewer of each."
WIDTHS = {"strong": 1.0, "moderate": 0.45, "weak": 0.2}
SGD: dict[str, Any] = {"momentum": 0.9, "weight_decay": 1e-4}
NORMS = {"width": "static", "depth": "global"}  # as in the paper: narrow models diverge with another


class Options(TypedDict, total=False):
    """The arguments of all recipes that train; those that are not given are the size's."""

    size: Annotated[
        str,
        Option(
            "small (16 clients, a quarter of the width, few rounds) or paper (128 clients, all of ResNet-20, "
            "the paper's rounds and step sizes)",
            choices=("small", "paper"),
            default="small",
        ),
    ]
    clients: Annotated[
        int | None,
        Option(
            "number of clients; with fewer than the paper's 128, as many times fewer of each class "
            "(default: 16 or 128 by size)"
        ),
    ]
    width: Annotated[float | None, Option("width of ResNet-20 (default: 0.25 or 1 by size)")]
    rounds: Annotated[
        int | None,
        Option(
            "number of rounds (default: by size 30, or the paper's 1000, 200 and 400 for cifar10, femnist "
            "and imdb; for the similarity of layers 10 or 100)",
            low=1,
        ),
    ]
    lr: Annotated[
        float | None,
        Option(
            "initial step size (default: 0.1 or the paper's 0.4 by size for cifar10, 0.04 for femnist, 0.1 "
            "for imdb)"
        ),
    ]
    weighting: Annotated[
        str,
        Option(
            "how clients count: all alike, as in the paper, or by their samples",
            choices=WEIGHTINGS,
            default="uniform",
        ),
    ]


class Task(NamedTuple):
    """A dataset of the paper.

    cuts    the blocks that each class of devices leaves out
    rounds  of the paper
    lr      initial step size, small and of the paper
    falls   the shares of the rounds after which it falls to a tenth
    """

    cuts: dict[str, int]
    rounds: int
    lr: tuple[float, float]
    falls: tuple[float, ...]


TASKS = {
    "cifar10": Task({"strong": 0, "moderate": 4, "weak": 7}, 1000, (0.1, 0.4), (0.8, 0.9)),
    "femnist": Task({"strong": 0, "moderate": 2, "weak": 3}, 200, (0.04, 0.04), ()),
    "imdb": Task({"strong": 0, "moderate": 1, "weak": 1}, 400, (0.1, 0.1), (0.5, 0.75)),
}
FEW = 30  # rounds of the small size


class Setup(NamedTuple):
    """The options with nothing left open."""

    task: str
    clients: int
    width: float
    rounds: int
    lr: float
    weighting: str

    @property
    def fewer(self) -> int:
        """How many times fewer clients there are than in the paper."""
        return CLIENTS // self.clients


def settled(task: str, options: Options, rounds: tuple[int, int] | None = None) -> Setup:
    """Return the options of a task with those of the size where none is given; `rounds` are small, paper."""
    size, chosen = options["size"], TASKS[task]
    sizes = {
        "clients": by_size(size, 16, CLIENTS),
        "width": by_size(size, 0.25, 1.0),
        "rounds": by_size(size, *(rounds or (FEW, chosen.rounds))),
        "lr": by_size(size, *chosen.lr),
    }
    given = {name: value for name, value in options.items() if name in sizes and value is not None}
    made = Setup(task=task, weighting=options["weighting"], **{**sizes, **given})  # type: ignore[arg-type]
    if made.clients not in (128, 64, 32, 16, 8):
        raise check.fail("clients", made.clients, "128, 64, 32, 16 or 8")
    return made


TaskName = Annotated[
    str,
    Option(
        "cifar10 (ResNet-20), femnist (two writers for each client) or imdb (bidirectional LSTM)",
        choices=tuple(TASKS),
    ),
]


def _cases(field: str, value: Any) -> tuple[int, ...]:
    """Return numbers of the paper's mixes; one alone need not be a list."""
    numbers = tuple(value) if isinstance(value, list | tuple) else (value,)
    return tuple(check.integer(field, number, low=1, high=len(CASES)) for number in numbers)


@checked()
def embracing_scaling(seed: int = 0, **options: Unpack[Options]) -> Study:
    """Do weak clients help? 16 strong ones and 0 to 112 weak ones, all in every round (Table 2, Figure 4)."""
    setup = settled("cifar10", options)
    base = _experiment(setup, seed)
    variants = {}
    for added in ADDED:
        present = replace(base, data=_first(base.data, (16 + added) // setup.fewer))
        for kind in ("depth", "width") if added else ("depth",):
            held = _capacity("cifar10", kind, _sixteen_strong(setup))
            name = f"{kind}-{added}" if added else "strong-only"
            variants[name] = Variant(replace(present, capacity=held, norm=NORMS[kind]))
    return Study(variants, tables=lambda runs: [_scaling(runs)], charts=lambda runs: [_curves(runs)])


@checked()
def embracing_mix(
    task: TaskName = "cifar10",
    cases: Annotated[
        Sequence[int] | None,
        Option(
            "of the paper's ten mixes, for the last blocks (default: 1, 5, 7, 8, or all by size)",
            check=_cases,
        ),
    ] = None,
    narrow: Annotated[
        Sequence[int] | None,
        Option(
            "of them, for narrow models, cifar10 only (default: 5 and 7, or 2 to 10 by size)", check=_cases
        ),
    ] = None,
    seed: int = 0,
    **options: Unpack[Options],
) -> Study:
    """How many clients may be weak? Mixes of devices, a quarter of all in each round (Tables 3 to 7)."""
    setup = settled(task, options)
    deep = by_size(options["size"], (1, 5, 7, 8), tuple(CASES)) if cases is None else cases
    if task != "cifar10":
        narrow = ()
    elif narrow is None:
        narrow = by_size(options["size"], (5, 7), tuple(CASES)[1:])
    base = replace(_experiment(setup, seed), cohort=max(1, setup.clients // 4))
    variants = {}
    for kind, numbers in (("depth", deep), ("width", narrow)):
        for case in numbers:
            counts = {k: n // setup.fewer for k, n in zip(WIDTHS, CASES[case]) if n // setup.fewer}
            norm = NORMS[kind] if task == "cifar10" else None  # the other models have no BatchNorm
            held = _capacity(task, kind, counts)
            variants[f"{kind}-{case}"] = Variant(replace(base, capacity=held, norm=norm))
    targets = [_targets] if task == "cifar10" else []
    return Study(variants, tables=lambda runs: [_mix(runs, task), *(table(runs) for table in targets)])


@checked()
def embracing_norm(seed: int = 0, **options: Unpack[Options]) -> Study:
    """Does BatchNorm work when devices train different parts of the model? 16 strong, 112 weak (Table 9).

    Its statistics are averaged (global) or measured once after training (static).
    """
    setup = settled("cifar10", options)
    base = _experiment(setup, seed)
    variants = {}
    for kind in ("width", "depth"):
        held = _capacity("cifar10", kind, _sixteen_strong(setup))
        for norm in ("static", "global"):
            variants[f"{kind}-{norm}"] = Variant(replace(base, capacity=held, norm=norm))
    return Study(variants, tables=lambda runs: [_norms(runs)])


# ---- experiments


def _experiment(setup: Setup, seed: int) -> Experiment:
    """Return fedavg with a step size that falls to a tenth after some shares of the rounds."""
    model, source = model_and_data(setup, seed)
    at = sorted({max(1, round(share * setup.rounds)) for share in TASKS[setup.task].falls})
    rate = rates.stepped(setup.lr, at=at, factor=0.1) if at else rates.constant(setup.lr)
    return Experiment(
        model=model,
        data=source,
        algorithm=fedavg(rate, weighting=setup.weighting, **SGD),
        rounds=setup.rounds,
        steps=TAU,
        batch=BATCH,
        seed=seed,
        evaluate_every=max(1, setup.rounds // POINTS),
        baselines=False,
        checkpoint_every=0,
    )


def _sixteen_strong(setup: Setup) -> list[str]:
    """Return the classes of the clients: 16 of 128 are strong, all others weak."""
    strong = 16 // setup.fewer
    return ["strong"] * strong + ["weak"] * (setup.clients - strong)


def _capacity(task: str, kind: str, assign: Mapping[str, int] | Sequence[str]) -> Capacity:
    if kind == "width":
        return capacity.width({k: w for k, w in WIDTHS.items() if k in assign}, assign)
    words = {"weak": 0.5} if task == "imdb" and "weak" in assign else None  # the last row of Table 1
    return capacity.depth({k: c for k, c in TASKS[task].cuts.items() if k in assign}, assign, words=words)


# ---- data


def cifar(clients: int, seed: int) -> FederatedData:
    """Return the images of the file, standardized; its test images follow the labels of the clients."""
    with warnings.catch_warnings():  # one or two clients that would have none receive a sample of others
        warnings.filterwarnings("ignore", "dirichlet")
        dealt = data.real(
            "cifar10", clients=CLIENTS, partition=data.dirichlet(0.1), test="file", validation=0, seed=seed
        )
    dealt = _only(dealt, clients)
    images = columns.in_memory(dealt.x, "CIFAR-10")
    return replace(dealt, x=(images.float() / 255 - 0.473) / 0.252)


def _only(dealt: FederatedData, clients: int) -> FederatedData:
    return dealt if clients == CLIENTS else dealt.subset(range(clients))


def model_and_data(setup: Setup, seed: int) -> tuple[nn.Module, FederatedData]:
    """Return the model of a task and the samples of the clients."""
    clients = setup.clients
    if setup.task == "cifar10":
        return models.resnet20(10, width=setup.width, seed=seed), cifar(clients, seed)
    if setup.task == "femnist":
        writers = data.real("femnist", clients=2 * clients, validation=0, seed=seed)
        return models.leaf_cnn(seed=seed), _paired(writers, clients)
    reviews = data.real("imdb", clients=CLIENTS, partition=data.dirichlet(0.1), validation=0, seed=seed)
    source = _only(reviews, clients)
    return models.bilstm(
        int(columns.in_memory(source.x, "reviews").max()) + 1, pool="mean", seed=seed
    ), source


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
    x = columns.in_memory(writers.x, "FEMNIST")[order]
    return FederatedData.make(
        x, writers.y[order], ranges["train"], ranges["test"], names=names, source=source
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


def _targets(runs: Runs) -> Table:
    """Return the rounds to a target, which is what narrow models reach in the end, as in the paper."""
    rows = []
    for case, counts in CASES.items():
        narrow, deep = (_accuracy("", runs.get(name, ())) for name in (f"width-{case}", f"depth-{case}"))
        slower = deep if case == 1 else narrow  # without weak devices there is but one model
        if not (slower.y and deep.y):
            continue
        target = math.floor((slower.y[-1] or 0.0) + ROUNDING)
        ours = (str(target), _rounds_to(slower, target), _rounds_to(deep, target))
        paper = map(str, PAPER_ROUNDS[case]) if case in PAPER_ROUNDS else ("-",) * 3
        rows.append((str(case), "/".join(map(str, counts)), *ours, *paper))
    columns = ("case", "mix", "target", "width", "depth", "paper's", "width", "depth")
    note = (
        "Mix: strong, moderate and weak clients. The target is the accuracy of narrow models after the last "
        "round, rounded down, as the paper's; rounds are those of the first evaluation at which the mean "
        "over the seeds reaches it."
    )
    return Table("Rounds to a target accuracy, % (Table 7)", columns, rows, note)


def _accuracy(name: str, seeds: Sequence[Record]) -> Series:
    """Return the accuracy of the global model over the rounds, %."""
    return curve(name, seeds, lambda row: row.get("test.global"), scale=100)


def _rounds_to(accuracy: Series, target: float) -> str:
    reached = (r for r, y in zip(accuracy.x, accuracy.y) if y is not None and y + ROUNDING >= target)
    return next((f"{r:.0f}" for r in reached), "not reached")


def _norms(runs: Runs) -> Table:
    rows = [(name, score(runs[name], "global"), f"{paper}") for name, paper in PAPER_NORM.items()]
    title = "Test accuracy, %, by what becomes of BatchNorm (Table 9)"
    return Table(title, ("variant", "ours", "paper"), list(rows))


# ---- charts


def _curves(runs: Runs) -> Chart:
    """Return the accuracy over the rounds, a panel for each number of weak clients."""
    panels = []
    for added in ADDED[1:]:
        names = {"EmbracingFL": f"depth-{added}", "width reduction": f"width-{added}"}
        lines = [_accuracy(label, runs[name]) for label, name in names.items()]
        panels.append(Panel(f"16 strong, {added} weak", "rounds", "test accuracy, %", lines))
    return Chart("Accuracy with more and more weak clients (Figure 4)", panels, NOTE)
