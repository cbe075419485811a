"""What uploads cost: accuracy against the bytes that clients send, under each compressor and some chains.

FedAvg among the writers of FEMNIST. No paper has this table: the compressors are those of the literature
(`partita.transforms`), and the bytes are those that `partita.core.codec` writes of what a client sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
from torch import nn

from partita import data, models, transforms
from partita.algorithms import fedavg
from partita.core.options import Option, checked
from partita.core.parts import Transform
from partita.engine.record import Record
from partita.recipes.experiment import Experiment
from partita.recipes.sizes import SIZES, by_size
from partita.recipes.study import Study, Variant
from partita.recipes.tables import Runs, Table, mean_std
from partita.report.charts import Chart, Panel, Series

DENSE = "dense"
FEWER, POINTS = 10, 1.0
"""How many times fewer bytes a compressor is to send, and how many points of accuracy it may lose."""
Chain = tuple[Transform, ...]


@checked()
def bytes_utility(
    size: Annotated[
        str,
        Option("small: minutes on one core, medium: minutes on a GPU, paper: all writers", choices=SIZES),
    ] = "small",
    clients: Annotated[int | None, Option("number of writers; default: that of the size", low=1)] = None,
    rounds: Annotated[int | None, Option("number of rounds; default: that of the size", low=1)] = None,
    data_seed: Annotated[
        int, Option("draws the writers and their splits, the same for all seeds of a study", low=0)
    ] = 0,
    seed: int = 0,
) -> Study:
    """How much accuracy do smaller uploads cost? FedAvg on FEMNIST under every compressor."""
    writers = clients or by_size(size, 60, 200, None)
    least = by_size(size, 100, 100, 0)
    samples = data.real("femnist", clients=writers, min_samples=least, validation=0, seed=data_seed)
    length = rounds or by_size(size, 150, 400, 1500)
    dense = Experiment(
        model=network(size, seed),
        data=samples,
        algorithm=fedavg(by_size(size, 0.3, 0.1, 0.1)),
        rounds=length,
        cohort=min(by_size(size, 20, 20, 50), samples.clients),
        epochs=1,
        batch=32,
        seed=seed,
        baselines=False,
        evaluate_every=max(1, length // 5),
        checkpoint_every=0,
    )
    variants = {DENSE: Variant(dense)}
    for strengths in families().values():
        variants |= {name: Variant(replace(dense, uploads=chain)) for name, chain in strengths.items()}
    return Study(variants, tables=lambda runs: [utility(runs)], charts=lambda runs: [frontier(runs)])


def network(size: str, seed: int) -> nn.Module:
    """Return a perceptron, or from medium on a convolutional network: that of LEAF at size paper."""
    if size == "small":
        return models.mlp(784, 64, 62, seed=seed)
    return models.mnist_cnn(62, dropout=0.0, seed=seed) if size == "medium" else models.leaf_cnn(seed=seed)


def families() -> dict[str, dict[str, Chain]]:
    """Return the compressors by kind, each at several strengths, from many bytes to few."""
    t = transforms
    return {
        "16 bits": {"half": (t.half(),)},
        "quantize": {f"quantize-{b}": (t.quantize(b),) for b in (8, 3, 1)},
        "nearest, with feedback": {"nearest-2": (t.quantize(2, stochastic=False, feedback=True),)},
        "topk": {f"topk-{share:g}": (t.topk(share),) for share in (0.1, 0.05, 0.01)},
        "randk": {f"randk-{share:g}": (t.randk(share),) for share in (0.3, 0.1)},
        "low rank": {f"low_rank-{r}": (t.low_rank(r),) for r in (8, 5, 2)},
        "topk > quantize": {
            f"topk-{share:g}-quantize-8": (t.topk(share), t.quantize(8)) for share in (0.1, 0.02)
        },
        "randk > quantize": {"randk-0.3-quantize-8": (t.randk(0.3), t.quantize(8))},
        "low rank > quantize": {"low_rank-8-quantize-8": (t.low_rank(8), t.quantize(8))},
    }


# ---- the table and the figure


def utility(runs: Runs) -> Table:
    """Return bytes and accuracy of each variant, and what it loses against dense uploads of the same seed."""
    dense = runs[DENSE]
    rows: list[tuple[str, ...]] = [
        (DENSE, f"{_kilobytes(dense):.1f}", f"{_megabytes(dense):.2f}", "1", _score(dense), "", "")
    ]
    for name in [name for strengths in families().values() for name in strengths]:
        fewer, change = _bytes(dense) / _bytes(runs[name]), _changes(runs[name], dense)
        lost = -float(np.mean(change))
        within = "-" if fewer < FEWER else "yes" if lost <= POINTS else "no"
        cells = (f"{_kilobytes(runs[name]):.1f}", f"{_megabytes(runs[name]):.2f}", f"{fewer:.1f}")
        rows.append((name, *cells, _score(runs[name]), mean_std(change, 1, 1), within))
    columns = ("uploads", "kB each", "MB per client", "times fewer", "accuracy, %", "against dense, points")
    note = (
        f"Test accuracy of the global model after {dense[0].summary()['rounds']} rounds. The last column is "
        f"of those that send at least {FEWER} times fewer bytes than dense uploads."
    )
    return Table("Accuracy against bytes", (*columns, f"loses at most {POINTS:g} point"), rows, note)


def frontier(runs: Runs) -> Chart:
    """Return accuracy against megabytes per client, a line for each kind of compressor."""
    lines = [_line(DENSE, [runs[DENSE]])]
    lines += [_line(kind, [runs[name] for name in strengths]) for kind, strengths in families().items()]
    panel = Panel("", "MB uploaded per client", "test accuracy, %", lines, log="x")
    return Chart("Accuracy against bytes", [panel], "Up and to the left is better; bands are over the seeds.")


def _line(name: str, variants: Sequence[Sequence[Record]]) -> Series:
    scores = [np.array([100 * s for s in _scores(seeds)]) for seeds in variants]
    spread = [float(s.std(ddof=1)) if len(s) > 1 else 0.0 for s in scores]
    return Series(name, list(map(_megabytes, variants)), [float(s.mean()) for s in scores], spread)


def _scores(seeds: Sequence[Record]) -> list[float]:
    return [float(run.summary()["test"]["global"]) for run in seeds]


def _score(seeds: Sequence[Record]) -> str:
    return mean_std(_scores(seeds), 100, 1)


def _changes(seeds: Sequence[Record], dense: Sequence[Record]) -> list[float]:
    """Return by how many points of accuracy each seed differs from the same seed with dense uploads."""
    return [100 * (a - b) for a, b in zip(_scores(seeds), _scores(dense))]


def _bytes(seeds: Sequence[Record]) -> float:
    return float(np.mean([run.summary()["bytes_up"] for run in seeds]))


def _megabytes(seeds: Sequence[Record]) -> float:
    """Return the megabytes that a client has uploaded over the run, on average."""
    return _bytes(seeds) / len(seeds[0].clients) / 1e6


def _kilobytes(seeds: Sequence[Record]) -> float:
    """Return the kilobytes of an upload."""
    uploads = sum(int(row["reports"]) for row in seeds[0].clients)
    return float(seeds[0].summary()["bytes_up"]) / uploads / 1e3
