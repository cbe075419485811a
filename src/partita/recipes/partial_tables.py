"""The tables of partial personalization: Pillutla et al. (2022), Tables 2, 4, 12 to 14, and of who is hurt.

FedAlt and FedSim are compared by the differences of the same clients under the same seed: scores of different
clients spread far more than the two methods differ.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from partita.engine.record import Record, number
from partita.engine.significance import mean_interval
from partita.recipes.tables import Runs, Table, mean_std, score

METHODS = ("fedalt", "fedsim")


def splits_tables(runs: Runs, splits: Sequence[str], stateless: bool) -> list[Table]:
    """Return Tables 2, 4 and 12 of the paper, 13 and 14 for stateless clients, and paired differences."""

    def accuracy(name: str) -> str:
        return score(runs[name], digits=2)

    names = ("fedavg", "finetune", "ditto", "pfedme", *(f"fedalt-{part}" for part in splits))
    titles = ("FedAvg", "Finetune", "Ditto", "pFedMe", *(part.capitalize() for part in splits))
    title = "Full and partial personalization (Table 2): test accuracy, %"
    tables = [Table(title, titles, [tuple(map(accuracy, names))])]
    kinds = [("", "stateful", 4, 12), ("-stateless", "stateless", 13, 14)]
    for ending, kind, first, second in kinds if stateless else kinds[:1]:
        tables += [
            Table(
                f"Methods by personal part, {kind} clients (Table {first}): test accuracy, %",
                ("personal part", "FT (part.)", "FedAlt", "FedSim", "FedAlt − FedSim (95 % interval)"),
                [
                    (
                        part,
                        accuracy(f"finetune-{part}"),
                        *(accuracy(f"{m}-{part}{ending}") for m in METHODS),
                        difference(*(runs[f"{m}-{part}{ending}"] for m in METHODS)),
                    )
                    for part in splits
                ],
                "The last column has the differences of the same clients under the same seed, weighted by "
                "their test samples, with an interval over clients and seeds: clear where it leaves out 0.",
            ),
            Table(
                f"What the final fine-tuning adds, {kind} clients (Table {second}): percentage points",
                ("personal part", "FedAlt", "FedSim"),
                [(part, *(_added(runs[f"{m}-{part}{ending}"]) for m in METHODS)) for part in splits],
            ),
        ]
    return tables


def difference(ours: Sequence[Record], theirs: Sequence[Record]) -> str:
    """Return by how many points the first method is ahead on the same clients: '0.08 (0.01 to 0.15)'."""
    gains = np.stack([100 * (a.scores() - b.scores()) for a, b in zip(ours, theirs)])
    mean, low, high, _ = mean_interval(gains, weights=ours[0].table.numbers("n_test"))
    if np.isnan(mean):
        return "-"
    return f"{mean:.2f}" + ("" if np.isnan(low) else f" ({low:.2f} to {high:.2f})")


def _added(runs: Sequence[Record]) -> str:
    """Return what the last evaluation has gained on the one before, which is that of stage (b)."""
    pairs = [[number(row.get("test.personal")) for row in run.metrics[-2:]] for run in runs]
    return mean_std((None if a is None or b is None else b - a for a, b in pairs), 100)


def harm_tables(runs: Runs) -> list[Table]:
    """Return the scatter and violin plots of the paper in figures; the report has the pictures."""
    columns = (
        "variant",
        "train, mean change",
        "test, mean change",
        "clients worse on train, %",
        "clients worse on test, %",
        "of the smaller half, %",
        "of the larger half, %",
        "worse under some seeds only, %",
    )
    rows = [(name, *_harm(seeds)) for name, seeds in runs.items() if name != "fedavg"]
    note = (
        "Changes are against the global model of stage (a), in percentage points, each client counting once. "
        "The last column (Figure 11) takes at least two seeds."
    )
    tables = [Table("Each client's change by personalization (Figures 5, 7-11)", columns, rows, note)]
    chosen = {name: [run.choice() for run in seeds] for name, seeds in runs.items() if name != "fedavg"}
    if any(all(choices) for choices in chosen.values()):
        tables.append(_choice_table(chosen, runs))
    return tables


def _choice_table(chosen: Mapping[str, Sequence[dict[str, Any] | None]], runs: Runs) -> Table:
    """Return what comes of it if each client deploys the model that is better on its validation samples."""
    rows: list[tuple[str, ...]] = []
    for name, choices in chosen.items():
        known = [choice for choice in choices if choice is not None]
        rows.append(
            (
                name,
                mean_std((choice["global"] / choice["of"] for choice in known), 100, 1),
                score(runs[name], digits=2),
                mean_std((choice["test"] for choice in known), 100),
                mean_std((choice["worse"] / choice["of"] for choice in known), 100, 1),
            )
        )
    return Table(
        "Each client deploys whichever model is better on its validation samples (appendix C.3)",
        (
            "variant",
            "clients that choose the global model, %",
            "test, personal, %",
            "test, chosen, %",
            "worse on test than with the global model, %",
        ),
        rows,
        "Choices are made without test samples, so a client may still do worse than with the global model.",
    )


def _harm(seeds: Sequence[Record]) -> list[str]:
    train, test = (changes(seeds, split) for split in ("train", "test"))
    sizes = seeds[0].table.numbers("n_train")
    small = sizes <= np.median(sizes)
    shares = (train, test, test[:, small], test[:, ~small])
    return [
        *(mean_std(_mean(change, axis=1), 100) for change in (train, test)),
        *(mean_std(map(_worse, change), 100, 1) for change in shares),
        _undecided(test),
    ]


def changes(seeds: Sequence[Record], split: str) -> np.ndarray:
    """Return each client's change against the global model, a row for each seed; NaN where there is none."""
    return np.stack([run.gains("global", split) for run in seeds])


def mean_change(seeds: Sequence[Record], split: str) -> np.ndarray:
    """Return each client's change in percentage points, the mean over the seeds."""
    return 100 * _mean(changes(seeds, split), axis=0)


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of nothing but NaN it is NaN
        mean: np.ndarray = np.nanmean(values, axis=axis)
    return mean


def _worse(change: np.ndarray) -> float:
    change = change[~np.isnan(change)]
    return float((change < 0).mean()) if len(change) else float("nan")


def _undecided(change: np.ndarray) -> str:
    """Return the share of clients that only some seeds hurt (Figure 11)."""
    if len(change) < 2:
        return "-"
    hurt = change < 0
    return f"{100 * (hurt.any(0) & ~hurt.all(0)).mean():.1f}"
