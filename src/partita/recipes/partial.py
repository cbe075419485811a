"""Federated Learning with Partial Model Personalization: Pillutla et al. (2022).

    (a) fedavg                      a global model
    (b) fedalt or fedsim            u shared, v_i personal, from (a)'s model
    (c) fine-tuning                 v_i alone

`partial-splits` compares the personal parts and the methods (Tables 2, 4, 12-14), `partial-harm` looks at
every client's change (Figures 5, 7-11).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Unpack

import numpy as np

from partita import models
from partita.algorithms import METHODS, fedavg, finetune, pipeline, stage
from partita.core.options import checked
from partita.core.parts import Algorithm
from partita.engine.record import Record
from partita.recipes.experiment import Experiment
from partita.recipes.study import Study, Variant
from partita.recipes.tables import Runs, Table, mean_std, score
from partita.recipes.tasks import Task, TaskOptions, task, with_dropout

SPLITS = ("input", "output", "adapter")


@checked()
def partial_splits(stateless: bool = False, seed: int = 0, **options: Unpack[TaskOptions]) -> Study:
    """Which part should be personal, and how to train it? Partial against full personalization.

    stateless  also train clients that forget their personal part between rounds (Tables 13 and 14)

    pFedMe is not among the full-personalization baselines yet; "ditto" is fine-tuning with an ℓ2 pull, as in
    the paper.
    """
    t = task(seed, **options)
    variants = {
        "fedavg": Variant(first_stage(t, seed)),
        "finetune": later(t, seed, "all", tuned(t, "all")),
        "ditto": later(t, seed, "all", tuned(t, "all", l2=t.ditto)),
    }
    for part in SPLITS:
        variants[f"finetune-{part}"] = later(t, seed, part, tuned(t, part))
        for method in ("fedalt", "fedsim"):
            variants[f"{method}-{part}"] = later(t, seed, part, trained(t, method, part))
            if stateless:
                forgets = trained(t, method, part, state="reset")
                variants[f"{method}-{part}-stateless"] = later(t, seed, part, forgets)
    return Study(variants, tables=lambda runs: splits_tables(runs, stateless))


@checked()
def partial_harm(seed: int = 0, **options: Unpack[TaskOptions]) -> Study:
    """Whom does personalization hurt? Each client's change on its training and its test data.

    Full fine-tuning, a personal output part and adapters; adapters also with weight decay, the output part
    also with dropout, which the paper found not to help. Weight decay acts on the shared part too, and on
    shakespeare dropout acts in the shared layers; the authors' code has both in the personal part only, so
    those variants do not repeat the paper's comparison.
    """
    t = task(seed, **options)
    variants = {
        "fedavg": Variant(first_stage(t, seed)),
        "finetune": later(t, seed, "all", tuned(t, "all")),
    }
    for part in ("output", "adapter"):
        variants[f"fedalt-{part}"] = later(t, seed, part, trained(t, "fedalt", part))
    for decay in (1e-3, 1e-1):
        method = trained(t, "fedalt", "adapter", weight_decay=decay)
        variants[f"fedalt-adapter-decay-{decay:g}"] = later(t, seed, "adapter", method)
    for p in (0.3, 0.6):
        dropped = replace(t, model=with_dropout(t.model, p))
        method = trained(t, "fedalt", "output")
        variants[f"fedalt-output-dropout-{p:g}"] = later(dropped, seed, "output", method)
    return Study(variants, tables=harm_tables)


# ---- the three stages


def first_stage(t: Task, seed: int) -> Experiment:
    """Return stage (a)."""
    return Experiment(
        model=t.model,
        data=t.data,
        algorithm=fedavg(t.lr[0], server=t.server[0], max_grad_norm=t.max_grad_norm),
        rounds=t.rounds[0],
        cohort=t.cohort,
        epochs=1,
        batch=t.batch,
        seed=seed,
        baselines=False,
        train_scores=True,
    )


def trained(t: Task, method: str, part: str, state: str = "keep", weight_decay: float = 0.0) -> Algorithm:
    """Return stage (b), and (c) on the same part."""
    train = METHODS[method](
        part, t.lr[1], server=t.server[1], max_grad_norm=t.max_grad_norm, weight_decay=weight_decay
    )
    return pipeline(
        stage(train, rounds=t.rounds[1], state=state),
        stage(tuned(t, part, weight_decay=weight_decay), epochs=t.epochs),
    )


def tuned(t: Task, part: str, l2: float = 0.0, weight_decay: float = 0.0) -> Algorithm:
    """Return the method of stage (c)."""
    return finetune(part, t.lr[2], l2, max_grad_norm=t.max_grad_norm, weight_decay=weight_decay)


def later(t: Task, seed: int, part: str, method: Algorithm) -> Variant:
    """Return what begins with stage (a)'s model and is compared with it."""
    experiment = replace(
        first_stage(t, seed),
        model=models.add_adapters(t.model, t.adapters, seed=seed) if part == "adapter" else t.model,
        algorithm=method if method.stages else pipeline(stage(method, epochs=t.epochs)),
        rounds=None,
        evaluate_every=max(1, t.rounds[1] // 5),
        baselines=True,
    )
    return Variant(experiment, start="fedavg", baselines={"global": "fedavg"})


# ---- tables


def splits_tables(runs: Runs, stateless: bool) -> list[Table]:
    """Return Tables 2, 4 and 12 of the paper, and 13 and 14 for stateless clients."""

    def accuracy(name: str) -> str:
        return score(runs[name], digits=2)

    def gained(name: str) -> str:
        last = [[row["test.personal"] for row in run.metrics[-2:]] for run in runs[name]]
        return mean_std([after - before for before, after in last], 100)

    names = ("fedavg", "finetune", "ditto", *(f"fedalt-{part}" for part in SPLITS))
    titles = ("FedAvg", "Finetune", "Ditto", "Input", "Output", "Adapter")
    title = "Full and partial personalization (Table 2): test accuracy, %"
    tables = [Table(title, titles, [tuple(map(accuracy, names))])]
    kinds = [("", "stateful", 4, 12), ("-stateless", "stateless", 13, 14)]
    methods = ("fedalt", "fedsim")
    for ending, kind, first, second in kinds if stateless else kinds[:1]:
        tables += [
            Table(
                f"Methods by personal part, {kind} clients (Table {first}): test accuracy, %",
                ("personal part", "FT (part.)", "FedAlt", "FedSim"),
                [
                    (p, accuracy(f"finetune-{p}"), *(accuracy(f"{m}-{p}{ending}") for m in methods))
                    for p in SPLITS
                ],
            ),
            Table(
                f"What the final fine-tuning adds, {kind} clients (Table {second}): percentage points",
                ("personal part", "FedAlt", "FedSim"),
                [(p, *(gained(f"{m}-{p}{ending}") for m in methods)) for p in SPLITS],
            ),
        ]
    return tables


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
        "Changes are against the global model of stage (a), in percentage points, each client counting once."
    )
    return [Table("Each client's change by personalization (Figures 5, 7-11)", columns, rows, note)]


def _harm(seeds: Sequence[Record]) -> list[str]:
    train, test = ([run.gains("global", split) for run in seeds] for split in ("train", "test"))
    small = [_smaller_half(run) for run in seeds]
    shares = {
        "train": map(_worse, train),
        "test": map(_worse, test),
        "small": (_worse(change[half]) for change, half in zip(test, small)),
        "large": (_worse(change[~half]) for change, half in zip(test, small)),
    }
    means = [mean_std((np.nanmean(change) for change in changes), 100) for changes in (train, test)]
    return [*means, *(mean_std(share, 100, 1) for share in shares.values()), _undecided(seeds, test)]


def _worse(change: np.ndarray) -> float:
    change = change[~np.isnan(change)]
    return float((change < 0).mean()) if len(change) else float("nan")


def _smaller_half(run: Record) -> np.ndarray:
    sizes = np.array([row["n_train"] for row in run.clients])
    half: np.ndarray = sizes <= np.median(sizes)
    return half


def _undecided(runs: Sequence[Record], changes: Iterable[np.ndarray]) -> str:
    """Return the share of clients that only some seeds hurt (Figure 11), if all seeds have the same ones."""
    if len(runs) < 2 or any(r.names != runs[0].names for r in runs):
        return "-"
    hurt = np.stack([c < 0 for c in changes])
    return f"{100 * (hurt.any(0) & ~hurt.all(0)).mean():.1f}"
