"""FFGG on real data: Mishchenko et al. (2023), section 5.3, Table 2.

    (a) fedavg                      a global model
    (b) ffgg_local                  θ shared; w begins anew in every round, one epoch on it, then both in turn
    (c) fine-tuning                 w alone

Beside it FedAlt and FedSim with clients that forget, and every client alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from partita.algorithms import ffgg_local, pipeline, stage
from partita.algorithms.alone import local
from partita.core import check
from partita.core.parts import Algorithm
from partita.engine.record import Record
from partita.recipes.experiment import Experiment
from partita.recipes.partial import SPLITS, first_stage, later, trained, tuned
from partita.recipes.study import Study, Table, Variant, mean_std
from partita.recipes.tasks import Task, task
from partita.schedule import synchronous


def ffgg_real(
    data: str = "femnist",
    size: str = "small",
    start: str = "model",
    clients: int | None = None,
    rounds: int | None = None,
    personal_rounds: int | None = None,
    epochs: int | None = None,
    seed: int = 0,
) -> Study:
    """Is FFGG better than FedAlt and FedSim when clients cannot keep a state? Three personal parts (Table 2).

    data     femnist, shakespeare or free_spoken_digits
    size     small (minutes on two cores), medium (minutes on a GPU) or paper
    start    where w begins in each round: 'model' (the part of stage (a)'s model that it replaces) or
             'random' (drawn anew, as the paper says; without stage (c), which has no w to begin with)
    clients, rounds, personal_rounds, epochs
             in place of the task's own: how many clients, rounds of stages (a) and (b), epochs of (c)
    """
    check.choice("start", start, ("model", "random"))
    t = task(data, size, seed, clients=clients, rounds=rounds, personal_rounds=personal_rounds, epochs=epochs)
    first = first_stage(t, seed)
    variants = {"fedavg": Variant(first), "local": Variant(_alone(t, seed))}
    for part in SPLITS:
        variants[f"ffgg-{part}"] = later(t, seed, part, _ffgg(t, part, start))
        for method in ("fedalt", "fedsim"):
            variants[f"{method}-{part}"] = later(t, seed, part, trained(t, method, part, state="reset"))
    return Study(variants, tables=lambda runs: [_table(runs)])


def _alone(t: Task, seed: int) -> Experiment:
    """As much work as a client does in stages (a) and (c) when everyone has as many turns."""
    rule = local(t.lr[0], max_grad_norm=t.max_grad_norm)
    return replace(first_stage(t, seed), algorithm=rule, schedule=synchronous("turns"))


def _ffgg(t: Task, part: str, start: str) -> Algorithm:
    rule = ffgg_local(
        part, t.lr[1], start=start, server=t.server[1], max_grad_norm=t.max_grad_norm, weighting="samples"
    )
    train = stage(rule, rounds=t.rounds[1])
    return pipeline(train) if start == "random" else pipeline(train, stage(tuned(t, part), epochs=t.epochs))


def _table(runs: Mapping[str, Sequence[Record]]) -> Table:
    def score(name: str) -> str:
        return mean_std([r.summary()["test"]["personal"] for r in runs[name]], 100)

    rows: list[tuple[str, ...]] = [
        ("FedAvg", score("fedavg"), "", ""),
        ("alone", score("local"), "", ""),
    ]
    for title, method in (("FFGG", "ffgg"), ("FedAlt, stateless", "fedalt"), ("FedSim, stateless", "fedsim")):
        rows.append((title, *(score(f"{method}-{part}") for part in SPLITS)))
    return Table("Test accuracy by personal part, % (Table 2)", ("method", *SPLITS), rows)
