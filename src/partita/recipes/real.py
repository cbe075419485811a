"""FFGG on real data: Mishchenko et al. (2023), section 5.3, Table 2.

    (a) fedavg                      a global model
    (b) ffgg_local                  θ shared; w begins anew in every round, one epoch on it, then both in turn
    (c) fine-tuning                 w alone

It is compared with FedAlt and FedSim whose clients keep no state, and with every client alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from partita.algorithms import ffgg_local, pipeline, stage
from partita.algorithms.alone import local
from partita.core import check
from partita.core.options import checked
from partita.core.parts import Algorithm
from partita.recipes.experiment import Experiment
from partita.recipes.partial import SPLITS, first_stage, later, trained, tuned
from partita.recipes.study import Study, Variant
from partita.recipes.tables import Runs, Table, score
from partita.recipes.tasks import Task, TaskOptions, task
from partita.schedule import synchronous


@checked()
def ffgg_real(start: str = "model", seed: int = 0, **options: Unpack[TaskOptions]) -> Study:
    """Is FFGG better than FedAlt and FedSim when clients cannot keep a state? Three personal parts (Table 2).

    start    where w begins in each round: 'model' (the part of stage (a)'s model that it replaces) or
             'random' (drawn anew, as in the paper; without stage (c), which has no w to begin with)
    """
    check.choice("start", start, ("model", "random"))
    t = task(seed, **options)
    variants = {"fedavg": Variant(first_stage(t, seed)), "local": Variant(_alone(t, seed))}
    for part in SPLITS:
        variants[f"ffgg-{part}"] = later(t, seed, part, _ffgg(t, part, start))
        for method in ("fedalt", "fedsim"):
            variants[f"{method}-{part}"] = later(t, seed, part, trained(t, method, part, state="reset"))
    return Study(variants, tables=lambda runs: [_table(runs)])


def _alone(t: Task, seed: int) -> Experiment:
    """Train every client alone, as much as in stages (a) and (c) when all clients have as many turns."""
    method = local(t.lr[0], max_grad_norm=t.max_grad_norm)
    return replace(first_stage(t, seed), algorithm=method, schedule=synchronous("turns"))


def _ffgg(t: Task, part: str, start: str) -> Algorithm:
    method = ffgg_local(
        part, t.lr[1], start=start, server=t.server[1], max_grad_norm=t.max_grad_norm, weighting="samples"
    )
    train = stage(method, rounds=t.rounds[1])
    return pipeline(train) if start == "random" else pipeline(train, stage(tuned(t, part), epochs=t.epochs))


def _table(runs: Runs) -> Table:
    methods = {"FFGG": "ffgg", "FedAlt, stateless": "fedalt", "FedSim, stateless": "fedsim"}
    rows: list[tuple[str, ...]] = [
        ("FedAvg", score(runs["fedavg"], digits=2), "", ""),
        ("alone", score(runs["local"], digits=2), "", ""),
    ]
    for title, method in methods.items():
        rows.append((title, *(score(runs[f"{method}-{part}"], digits=2) for part in SPLITS)))
    return Table("Test accuracy by personal part, % (Table 2)", ("method", *SPLITS), rows)
