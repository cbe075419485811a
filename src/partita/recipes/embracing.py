"""What weak devices train: EmbracingFL, Lee et al. (2024), Tables 1 and 10.

memory = 2p + 2a,  capacity = (2p + 2a) / (2P + 2A)

Nothing is trained. Our models are the paper's, so the counts agree.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from partita import models
from partita.capacity.memory import Left, Memory, memory
from partita.recipes.sizes import by_size
from partita.recipes.study import Study
from partita.recipes.tables import Table

CLASSES = ("strong", "moderate", "weak")
WIDTHS = (1.0, 0.45, 0.2)
IMAGE, LETTER, WORDS = (3, 32, 32), (1, 28, 28), 256
RESNET = "ResNet-20 (CIFAR-10)"
PAPER = {  # parameters, activations and capacity of each class
    RESNET: (
        ("272,762", "6,947,136", "1.00"),
        ("257,994", "2,752,832", "0.42"),
        ("206,346", "917,824", "0.16"),
    ),
    "CNN (FEMNIST)": (
        ("6,603,710", "39,742", "1.00"),
        ("6,551,614", "2,110", "0.99"),
        ("127,038", "62", "0.02"),
    ),
    "BiLSTM (IMDB)": (
        ("3,611,137", "1,310,720", "1.00"),
        ("1,051,137", "1,310,720", "0.48"),
        ("1,051,137", "655,360", "0.35"),
    ),
}
PAPER_WIDTHS = (  # Table 10
    ("272,762", "6,947,136", "1.00"),
    ("52,874", "3,039,552", "0.43"),
    ("10,006", "1,302,848", "0.18"),
)
OURS = ("model", "class", "removed", "parameters", "activations", "capacity")
COLUMNS = (*OURS, "paper's p", "paper's a", "paper's capacity")


class Case(NamedTuple):
    """What the devices of one class train."""

    removed: str
    left: Left


def embracing_capacity(size: str = "paper", seed: int = 0) -> Study:
    """How much smaller is what a weak device trains? Parameters and activations, by depth and by width.

    Nothing is trained and no data are needed.

    size   paper (the paper's networks), or small (ResNet-20 with a quarter of its width)
    """
    width = by_size(size, 0.25, 1.0)
    return Study({}, tables=lambda runs: capacity_tables(seed, width))  # noqa: ARG005


def capacity_tables(seed: int, width: float = 1.0) -> list[Table]:
    """Return both tables, ours and the paper's side by side."""
    unknown = (("-",) * 3,) * len(CLASSES)  # of a network that the paper does not have
    theirs, theirs_narrow = ({**PAPER}, PAPER_WIDTHS) if width == 1 else ({**PAPER, RESNET: unknown}, unknown)
    deep = {
        RESNET: _cuts(memory(models.resnet20(width=width, seed=seed), IMAGE, batch=32), (0, 4, 7)),
        "CNN (FEMNIST)": _cuts(memory(models.leaf_cnn(seed=seed), LETTER), (0, 2, 3)),
        "BiLSTM (IMDB)": _words(seed),
    }
    return [
        Table(
            "What is left without the first blocks (Table 1)",
            COLUMNS,
            [row for name, cases in deep.items() for row in _rows(name, cases, theirs[name])],
            "Activations are the outputs of convolutions and linear layers, and 10 numbers for each word, "
            "direction and unit of an LSTM, for a batch of 32 (ResNet-20) and of 1 (the others). As in the "
            "paper, the one output of the BiLSTM is left out: it would be 1 activation more in each row.",
        ),
        Table(
            "What is left of narrower models (Table 10)",
            COLUMNS,
            _rows(RESNET, _widths(seed, width), theirs_narrow),
            "Of the C channels of each layer the first ⌊width · C⌋ are kept.",
        ),
    ]


def _cuts(model: Memory, cuts: tuple[int, ...]) -> list[Case]:
    return [Case(_removed(model, cut), model.after(cut)) for cut in cuts]


def _words(seed: int) -> list[Case]:
    """Weak devices train what follows the embedding, on the second half of the words."""
    model = models.bilstm(seed=seed)
    whole, half = (_without_output(memory(model, (n,))) for n in (WORDS, WORDS // 2))
    weak = Case(f"{_removed(half, 1)}, {WORDS // 2} of {WORDS} words", half.after(1))
    return [*_cuts(whole, (0, 1)), weak]


def _widths(seed: int, whole: float) -> list[Case]:
    return [
        Case(
            "-" if share == 1 else f"{1 - share:.0%} of channels",
            memory(models.resnet20(width=whole * share, seed=seed), IMAGE, batch=32).total,
        )
        for share in WIDTHS
    ]


def _without_output(model: Memory) -> Memory:
    """Leave out the activations of the last block."""
    *others, last = model.rows
    return replace(model, rows=(*others, last._replace(activations=0)))


def _removed(model: Memory, cut: int) -> str:
    names = [row.name for row in model.rows[:cut]]
    return f"{names[0]} to {names[-1]}" if len(names) > 1 else "".join(names) or "-"


def _rows(name: str, cases: list[Case], paper: tuple[tuple[str, ...], ...]) -> list[tuple[str, ...]]:
    """Return the rows of a model. The first case is the whole model, of which the others are a share."""
    whole = cases[0].left
    rows = []
    for kind, (removed, (p, a, _)), theirs in zip(CLASSES, cases, paper):
        share = (2 * p + 2 * a) / (2 * whole.parameters + 2 * whole.activations)
        rows.append((name, kind, removed, f"{p:,}", f"{a:,}", f"{share:.2f}", *theirs))
    return rows
