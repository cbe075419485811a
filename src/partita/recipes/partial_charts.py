"""The figures of partial personalization: Pillutla et al. (2022), Figures 4 to 11.

All seeds of a study have the same clients, so that a client's change is the mean over the seeds. It is
against the global model of stage (a), in percentage points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from partita.engine.record import Record
from partita.recipes.partial_tables import changes, mean_change
from partita.recipes.tables import Runs
from partita.report.charts import Chart, Panel, Series

SAMPLES, CHANGE = "training samples", "change of accuracy, points"
CHANGES = {"train": "change of training accuracy, points", "test": "change of test accuracy, points"}
FULL, PLAIN = "finetune", {"Finetune": "finetune", "Output": "fedalt-output", "Adapter": "fedalt-adapter"}
PULL, DROPOUT = "fedalt-adapter-l2-", "fedalt-output-dropout-"


def splits_charts(runs: Runs) -> list[Chart]:
    """Return Figure 4."""
    names = {"Finetune": FULL} | {
        n.removeprefix("fedalt-").capitalize(): n
        for n in runs
        if n.startswith("fedalt-") and not n.endswith("-stateless")
    }
    points = [
        Series(
            title,
            [runs[name][0].facts["personal_part"]["parameters"]],
            [_ahead(runs[name], runs["fedavg"])],
            kind="points",
        )
        for title, name in names.items()
        if name in runs
    ]
    panel = Panel("", "personal parameters", CHANGE, points, log="x")
    return [Chart("What personal parameters bring (Figure 4)", [panel])]


def _ahead(runs: Sequence[Record], reference: Sequence[Record]) -> float | None:
    pairs = [(a.facts["test"]["personal"], b.facts["test"]["personal"]) for a, b in zip(runs, reference)]
    gains = [100 * (a - b) for a, b in pairs if a is not None and b is not None]
    return float(np.mean(gains)) if gains else None


def harm_charts(runs: Runs) -> list[Chart]:
    """Return Figures 5 to 11."""
    pulls, dropouts = _by_strength(runs, PULL), _by_strength(runs, DROPOUT)
    plain = {title: runs[name] for title, name in PLAIN.items()}
    adapters = {"No reg.": plain["Adapter"], **{f"μ = {k}": v for k, v in pulls.items()}}
    outputs = {"No d/o": plain["Output"], **{f"d/o {k}": v for k, v in dropouts.items()}}
    return [
        Chart(
            "Each client's change against its data (Figures 5, 8 and 9)",
            [
                _scatter(f"{title}, {split}", seeds, split)
                for split in ("train", "test")
                for title, seeds in plain.items()
            ],
            "Above on training samples, below on test samples.",
            columns=len(plain),
        ),
        Chart("Training samples of a client (Figure 6)", [_sizes(plain["Finetune"][0])]),
        Chart(
            "Distribution of the clients' changes (Figure 7)",
            [
                _violins("Train", plain, "train"),
                _violins("Test", plain, "test"),
                _violins("Test, adapters with a pull", adapters, "test"),
                _violins("Test, output with dropout", outputs, "test"),
            ],
            columns=4,
        ),
        Chart(
            "Each client's change under regularization (Figure 10)",
            [_scatter(title, seeds, "test") for title, seeds in {**adapters, **outputs}.items()],
            "Adapters with a pull of strength μ on them, and the output part with dropout in it.",
            columns=len(adapters),
        ),
        Chart(
            "Each client's change over the seeds (Figure 11)",
            [_sorted(title, seeds) for title, seeds in plain.items()],
            "Clients in the order of their mean change; the band goes from the worst to the best seed. "
            "A client whose band has 0 in it is helped or hurt by chance.",
            columns=len(plain),
        ),
    ]


def _by_strength(runs: Runs, prefix: str) -> Mapping[str, Sequence[Record]]:
    return {name.removeprefix(prefix): seeds for name, seeds in runs.items() if name.startswith(prefix)}


def _scatter(title: str, seeds: Sequence[Record], split: str) -> Panel:
    """Return a point for each client."""
    x, y = seeds[0].table.numbers("n_train"), mean_change(seeds, split)
    return Panel(title, SAMPLES, CHANGES[split], [Series("clients", x.tolist(), y.tolist(), kind="points")])


def _sizes(run: Record) -> Panel:
    """Return a histogram of the clients' training samples."""
    counts, edges = np.histogram(run.table.numbers("n_train"), bins=20)
    middles = (edges[:-1] + edges[1:]) / 2
    bars = Series("clients", middles.tolist(), counts.tolist(), kind="bar")
    return Panel("", SAMPLES, "clients", [bars])


def _violins(title: str, variants: Mapping[str, Sequence[Record]], split: str) -> Panel:
    """Return a violin for each variant."""
    made = [
        Series(name, [], mean_change(seeds, split).tolist(), kind="violin")
        for name, seeds in variants.items()
    ]
    return Panel(title, "", CHANGES[split], made)


def _sorted(title: str, seeds: Sequence[Record]) -> Panel:
    """Return the clients in the order of their mean change, with the range over the seeds."""
    change = 100 * changes(seeds, "test")
    change = change[:, ~np.isnan(change).any(0)]
    change = change[:, np.argsort(change.mean(0), kind="stable")]
    mean = change.mean(0)
    band = np.stack([mean - change.min(0), change.max(0) - mean], axis=1).tolist() if len(seeds) > 1 else ()
    line = Series("mean over the seeds", list(range(1, len(mean) + 1)), mean.tolist(), band)
    return Panel(title, "client, by its mean change", CHANGES["test"], [line])
