"""FFGG on real data: Mishchenko et al. (2023), section 5.3, Table 2.

    (a) fedavg                      a global model
    (b) ffgg_local                  θ shared; w begins anew in every round, one epoch on it, then both in turn
    (c) fine-tuning                 w alone

w begins with the part of (a)'s model that it replaces, or, as in the paper, at random. A random w is kept by
nobody, so that (c) begins at random too: it is how the clients of (b) solve for w when they are evaluated.
It is compared with FedAlt and FedSim whose clients keep no state, and with every client alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from partita.algorithms import ffgg_local, pipeline, stage
from partita.algorithms.alone import local
from partita.algorithms.local.solvers import Solver, gd
from partita.core.options import checked
from partita.core.parts import Algorithm, StagePlan
from partita.recipes.experiment import Experiment
from partita.recipes.partial import SPLITS, first_stage, later, trained, tuned
from partita.recipes.study import Study, Variant
from partita.recipes.tables import Runs, Table, score
from partita.recipes.tasks import Task, TaskOptions, task
from partita.schedule import synchronous


@checked()
def ffgg_real(seed: int = 0, **options: Unpack[TaskOptions]) -> Study:
    """Is FFGG better than FedAlt and FedSim when clients cannot keep a state? Three personal parts (Table 2).

    FFGG begins each round with the part of stage (a)'s model that w replaces, which nearly makes it stateless
    FedAlt, and (`-random`) with a new random w, as in the paper.
    """
    t = task(seed, **options)
    variants = {"fedavg": Variant(first_stage(t, seed)), "local": Variant(_alone(t, seed))}
    for part in SPLITS:
        variants[f"ffgg-{part}"] = later(t, seed, part, _from_the_model(t, part))
        variants[f"ffgg-{part}-random"] = _drawn_anew(t, seed, part)
        for method in ("fedalt", "fedsim"):
            variants[f"{method}-{part}"] = later(t, seed, part, trained(t, method, part, state="reset"))
    return Study(variants, tables=lambda runs: [_table(runs)])


def _alone(t: Task, seed: int) -> Experiment:
    """Train every client alone, as much as in stages (a) and (c) when all clients have as many turns."""
    method = local(t.lr[0], max_grad_norm=t.max_grad_norm)
    return replace(first_stage(t, seed), algorithm=method, schedule=synchronous("turns"))


def _drawn_anew(t: Task, seed: int, part: str) -> Variant:
    """w at random; each evaluation fine-tunes it as stage (c) does, so that there is one, at the end."""
    tuner = gd(epochs=t.epochs, lr=t.lr[2])
    variant = later(t, seed, part, pipeline(_alternating(t, part, "random", tuner)))
    return replace(variant, experiment=replace(variant.experiment, evaluate_every=t.rounds[1]))


def _from_the_model(t: Task, part: str) -> Algorithm:
    """w from the model of stage (a), which stage (c) begins with as well."""
    return pipeline(_alternating(t, part, "model"), stage(tuned(t, part), epochs=t.epochs))


def _alternating(t: Task, part: str, start: str, evaluate: Solver | None = None) -> StagePlan:
    """Return stage (b)."""
    method = ffgg_local(
        part,
        t.lr[1],
        start=start,
        evaluate=evaluate,
        server=t.server[1],
        max_grad_norm=t.max_grad_norm,
        weighting="samples",
    )
    return stage(method, rounds=t.rounds[1])


def _table(runs: Runs) -> Table:
    methods = {
        "FFGG, w at random": "ffgg-{}-random",
        "FFGG, w from FedAvg": "ffgg-{}",
        "FedAlt, stateless": "fedalt-{}",
        "FedSim, stateless": "fedsim-{}",
    }
    rows: list[tuple[str, ...]] = [
        ("FedAvg", score(runs["fedavg"], digits=2), "", ""),
        ("alone", score(runs["local"], digits=2), "", ""),
    ]
    for title, name in methods.items():
        rows.append((title, *(score(runs[name.format(part)], digits=2) for part in SPLITS)))
    return Table("Test accuracy by personal part, % (Table 2)", ("method", *SPLITS), rows)
