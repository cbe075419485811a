"""Federated Learning with Partial Model Personalization: Pillutla et al. (2022).

    (a) fedavg                      a global model
    (b) fedalt or fedsim            u shared, v_i personal, from (a)'s model
    (c) fine-tuning                 v_i alone

`partial-splits` compares the personal parts and the methods (Tables 2, 4, 12-14), `partial-harm` looks at
every client's change (Figures 5, 7-11).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from partita.algorithms import METHODS, fedavg, finetune, pipeline, stage
from partita.core.parts import Algorithm
from partita.engine.record import Record
from partita.recipes.experiment import Experiment
from partita.recipes.study import Study, Table, Variant, mean_std
from partita.recipes.tasks import Task, task, with_dropout

SPLITS = ("input", "output", "adapter")
Runs = Mapping[str, Sequence[Record]]


def partial_splits(
    data: str = "femnist",
    size: str = "small",
    stateless: bool = False,
    clients: int | None = None,
    rounds: int | None = None,
    personal_rounds: int | None = None,
    epochs: int | None = None,
    seed: int = 0,
) -> Study:
    """Which part should be personal, and how to train it? Partial against full personalization.

    data       femnist, shakespeare or free_spoken_digits
    size       small (minutes on two cores), medium (minutes on a GPU) or paper
    stateless  also train clients that forget their personal part between rounds (Tables 13 and 14)
    clients, rounds, personal_rounds, epochs
               in place of the task's own: how many clients, rounds of stages (a) and (b), epochs of (c)

    pFedMe is not among the full-personalization baselines yet; "ditto" is fine-tuning with an ℓ2 pull, as in
    the paper.
    """
    t = task(data, size, seed, clients=clients, rounds=rounds, personal_rounds=personal_rounds, epochs=epochs)
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


def partial_harm(
    data: str = "femnist",
    size: str = "small",
    clients: int | None = None,
    rounds: int | None = None,
    personal_rounds: int | None = None,
    epochs: int | None = None,
    seed: int = 0,
) -> Study:
    """Whom does personalization hurt? Each client's change on its training and its test data.

    Full fine-tuning, a personal output part and adapters; adapters also with weight decay, the output part
    also with dropout, which the paper found not to help. Weight decay acts on the shared part too, and on
    shakespeare dropout acts in the shared layers; the authors' code has both in the personal part only, so
    those variants do not repeat the paper's comparison.

    data       femnist, shakespeare or free_spoken_digits
    size       small (minutes on two cores), medium (minutes on a GPU) or paper
    clients, rounds, personal_rounds, epochs
               in place of the task's own: how many clients, rounds of stages (a) and (b), epochs of (c)
    """
    t = task(data, size, seed, clients=clients, rounds=rounds, personal_rounds=personal_rounds, epochs=epochs)
    variants = {
        "fedavg": Variant(first_stage(t, seed)),
        "finetune": later(t, seed, "all", tuned(t, "all")),
    }
    for part in ("output", "adapter"):
        variants[f"fedalt-{part}"] = later(t, seed, part, trained(t, "fedalt", part))
    for decay in (1e-3, 1e-1):
        rule = trained(t, "fedalt", "adapter", weight_decay=decay)
        variants[f"fedalt-adapter-decay-{decay:g}"] = later(t, seed, "adapter", rule)
    for p in (0.3, 0.6):
        dropped = replace(t, model=with_dropout(t.model, p))
        found = later(dropped, seed, "output", trained(t, "fedalt", "output"))
        variants[f"fedalt-output-dropout-{p:g}"] = found
    return Study(variants, tables=harm_tables)


# ---- the three stages


def first_stage(t: Task, seed: int) -> Experiment:
    rule = fedavg(t.lr[0], server=t.server[0], max_grad_norm=t.max_grad_norm)
    return Experiment(
        model=t.model,
        data=t.data,
        algorithm=rule,
        rounds=t.rounds[0],
        cohort=t.cohort,
        epochs=1,
        batch=t.batch,
        seed=seed,
        baselines=False,
        train_scores=True,
    )


def trained(t: Task, method: str, part: str, state: str = "keep", weight_decay: float = 0.0) -> Algorithm:
    """Stage (b), and (c) on the same part."""
    options: dict[str, Any] = {"max_grad_norm": t.max_grad_norm, "weight_decay": weight_decay}
    train = METHODS[method](part, t.lr[1], server=t.server[1], **options)
    return pipeline(
        stage(train, rounds=t.rounds[1], state=state),
        stage(tuned(t, part, weight_decay=weight_decay), epochs=t.epochs),
    )


def tuned(t: Task, part: str, l2: float = 0.0, weight_decay: float = 0.0) -> Algorithm:
    """Stage (c)."""
    return finetune(part, t.lr[2], l2, max_grad_norm=t.max_grad_norm, weight_decay=weight_decay)


def later(
    t: Task,
    seed: int,
    part: str,
    rule: Algorithm,
) -> Variant:
    """What begins with stage (a)'s model and is compared with it."""
    if not rule.stages:
        rule = pipeline(stage(rule, epochs=t.epochs))
    experiment = Experiment(
        model=t.adapted(seed) if part == "adapter" else t.model,
        data=t.data,
        algorithm=rule,
        cohort=t.cohort,
        epochs=1,
        batch=t.batch,
        seed=seed,
        evaluate_every=max(1, t.rounds[1] // 5),
        train_scores=True,
    )
    return Variant(experiment, start="fedavg", baselines={"global": "fedavg"})


# ---- tables


def splits_tables(runs: Runs, stateless: bool) -> list[Table]:
    """Tables 2, 4 and 12 of the paper, and 13 and 14 for stateless clients."""

    def score(name: str) -> str:
        found = [r.summary()["test"]["personal"] for r in runs[name]]
        return mean_std(found, 100)

    def gained(name: str) -> str:
        return mean_std(
            [r.metrics[-1]["test.personal"] - r.metrics[-2]["test.personal"] for r in runs[name]], 100
        )

    whole = ("fedavg", "finetune", "ditto", *(f"fedalt-{part}" for part in SPLITS))
    titles = ("FedAvg", "Finetune", "Ditto", "Input", "Output", "Adapter")
    tables = [
        Table(
            "Full and partial personalization (Table 2): test accuracy, %", titles, [tuple(map(score, whole))]
        )
    ]
    for ending, numbers, who in [("", (4, 12), "stateful")] + [
        ("-stateless", (13, 14), "stateless")
    ] * stateless:
        methods = ("fedalt", "fedsim")
        tables += [
            Table(
                f"Methods by personal part, {who} clients (Table {numbers[0]}): test accuracy, %",
                ("personal part", "FT (part.)", "FedAlt", "FedSim"),
                [(p, score(f"finetune-{p}"), *(score(f"{m}-{p}{ending}") for m in methods)) for p in SPLITS],
            ),
            Table(
                f"What the final fine-tuning adds, {who} clients (Table {numbers[1]}): percentage points",
                ("personal part", "FedAlt", "FedSim"),
                [(p, *(gained(f"{m}-{p}{ending}") for m in methods)) for p in SPLITS],
            ),
        ]
    return tables


def harm_tables(runs: Runs) -> list[Table]:
    """The scatter and violin plots of the paper in figures; the report has the pictures."""
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
    rows: list[tuple[str, ...]] = []
    for name, seeds in runs.items():
        if name == "fedavg":
            continue
        train, test = ([r.gains("global", part) for r in seeds] for part in ("train", "test"))
        small = [_smaller_half(r) for r in seeds]
        sides = [(t[s], t[~s]) for t, s in zip(test, small)]
        rows.append(
            (
                name,
                mean_std((np.nanmean(c) for c in train), 100),
                mean_std((np.nanmean(c) for c in test), 100),
                mean_std(map(_worse, train), 100, 1),
                mean_std(map(_worse, test), 100, 1),
                mean_std((_worse(a) for a, _ in sides), 100, 1),
                mean_std((_worse(b) for _, b in sides), 100, 1),
                _undecided(seeds, test),
            )
        )
    note = (
        "Changes are against the global model of stage (a), in percentage points, each client counting once."
    )
    return [Table("Each client's change by personalization (Figures 5, 7-11)", columns, rows, note)]


def _worse(change: np.ndarray) -> float:
    change = change[~np.isnan(change)]
    return float((change < 0).mean()) if len(change) else float("nan")


def _smaller_half(run: Record) -> np.ndarray:
    sizes = np.array([row["n_train"] for row in run.clients])
    found: np.ndarray = sizes <= np.median(sizes)
    return found


def _undecided(runs: Sequence[Record], changes: Iterable[np.ndarray]) -> str:
    """Clients that some seeds hurt and others do not (Figure 11), where all seeds have the same clients."""
    if len(runs) < 2 or any(r.names != runs[0].names for r in runs):
        return "-"
    hurt = np.stack([c < 0 for c in changes])
    return f"{100 * (hurt.any(0) & ~hurt.all(0)).mean():.1f}"
