"""What server and clients have in common: the experiment, without anybody's samples.

Both make the same setup of the same file. The samples in it are an example: they show the form of a sample,
and a trial pass looks at some of them. The server knows of its clients' samples how many each has.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partita.api import Arguments
from partita.core import check, inputs
from partita.data import FederatedData, Population
from partita.data import columns as columns_of
from partita.data.columns import Column
from partita.data.mapped import Mapped
from partita.engine.description import describe, versions
from partita.engine.setup import Setup
from partita.recipes.experiment import Experiment
from partita.schedule.asynchronous import Asynchronous
from partita.schedule.synchronous import Synchronous

TRIAL_ROWS = 64
"""Of an example, at least, that stand for the samples of each client: more than any trial asks for."""
MOST_SAMPLES = 1 << 31
"""That a client may say it has."""


def standing_for(example: FederatedData, population: Population) -> FederatedData:
    """Return data with the counts of a population, and the rows of an example for all its clients.

    The rows are as many as trials ask for, whatever a client says it has: nobody reads those behind them,
    since clients have their samples themselves.
    """
    rows = torch.arange(max(example.rows, TRIAL_ROWS)) % example.rows
    counts = [population.n_train, population.n_validation, population.n_test]
    ranges = [np.stack([np.zeros_like(n), n], axis=1) for n in counts]

    def again(column: Column) -> Column:
        if isinstance(column, Tensor):
            return Mapped(column, rows, column.dtype)
        if isinstance(column, Mapped):
            return replace(column, rows=column.rows[rows])
        return replace(column, start=column.start[rows], length=column.length[rows])

    return replace(
        example,
        x=columns_of.each(again, example.x),
        y=example.y[rows],
        lengths=None if example.lengths is None else example.lengths[rows],
        train=ranges[0],
        validation=ranges[1],
        test=ranges[2],
        names=population.names,
    )


def setup_of(experiment: Experiment, data: FederatedData, **options: Any) -> Setup:
    """Return the setup of an experiment on these data; refuse what does not work among real clients."""
    given = {f.name: getattr(experiment, f.name) for f in dataclasses.fields(experiment)}
    changed = {"data": data, "baselines": False, "newcomers": (), "progress": False, "data_on": "host"}
    _refuse_arguments(experiment)
    setup = Arguments(**{**given, **changed, **options}).prepared()
    _refuse_schedules(setup)
    if setup.settings.norm == "static" and setup.profile.buffers:
        reason = "the statistics of a model are measured over all clients' samples before each evaluation"
        raise _undeployable("norm", "static", "'global' or 'personal'", reason)
    return setup


def _undeployable(field: str, value: object, allowed: str, reason: str) -> check.Refused:
    return check.fail(field, value, f"{allowed} among real clients", reason)


def _refuse_arguments(experiment: Experiment) -> None:
    """Refuse what is of simulations."""
    if not isinstance(experiment, Experiment):
        raise check.fail("experiment", experiment, "an Experiment, as a file of `partita run` returns it")
    byzantine = experiment.byzantine
    for field, value in (("attack", experiment.attack), ("byzantine", byzantine or None)):
        if value is not None:
            raise _undeployable(field, value, "none", "real clients do what they do")
    if experiment.newcomers:
        reason = "clients that come later enrol while the run goes on"
        raise _undeployable("newcomers", experiment.newcomers, "none", reason)
    if experiment.measures:
        names = [measure.name for measure in experiment.measures]
        reason = "what measures look at would leave the clients"
        raise _undeployable("measures", names, "none", reason)
    if experiment.keep == "best":
        reason = "clients keep the states that checkpoints need, and not those of the best round"
        raise _undeployable("keep", "best", "'last'", reason)


def _refuse_schedules(setup: Setup) -> None:
    """Refuse what is of virtual time; delays and availability are simply what they are."""
    for schedule in setup.schedules:
        if not isinstance(schedule, Synchronous | Asynchronous):
            name = type(schedule).__name__
            raise _undeployable(
                "schedule", name, "synchronous() or asynchronous()", "it has a clock of its own"
            )
        if schedule.until is not None:
            raise _undeployable("until", schedule.until, "rounds=", "it is virtual time")
        if getattr(schedule.choose, "asks", False):
            reason = "a question to all clients would hold up each round"
            raise _undeployable("choose", schedule.choose, "a choice that asks nobody", reason)
        if isinstance(schedule, Synchronous) and (schedule.stragglers or schedule.late != "drop"):
            field = "stragglers" if schedule.stragglers else "late"
            value = getattr(schedule, field)
            raise _undeployable(field, value, "late='drop', and a deadline in seconds", "it is simulated")


# ---- one experiment


def parts_of(setup: Setup) -> dict[str, str]:
    """Return digests of all that decides what a client computes, by what it is about."""
    algorithms = [
        [describe(plan.algorithm), plan.rounds, plan.steps, plan.epochs, plan.batch, plan.state]
        for plan in setup.plans
    ]
    settings, data = setup.settings, setup.data
    form = [columns_of.described(data.x), str(inputs.sample_form(data.y)), data.source.get("classes")]
    parts = {
        "version of partita": versions()["partita"],
        "method": algorithms,
        "seed": settings.seed,
        "norm": settings.norm,
        "precision": [settings.precision, settings.deterministic],
        "model": {k: [str(v.dtype), list(v.shape)] for k, v in setup.initial.items()},
        "initial weights": [setup.origin.initial, setup.origin.fixed],
        "code": setup.origin.code,
        "loss and metric": [setup.profile.loss.name, [m.name for m in setup.profile.metrics]],
        "augment": describe(settings.augment),
        "capacity": describe(settings.capacity),
        "uploads": describe(setup.uploads),
        "downloads": describe(settings.downloads),
        "form of a sample": form,
    }
    return {name: _hash(value) for name, value in parts.items()}


def digest_of(parts: Mapping[str, str]) -> str:
    """Return one digest of an experiment."""
    return _hash(sorted(parts.items()))


def differing(ours: Mapping[str, str], theirs: Mapping[str, Any]) -> list[str]:
    """Return the names of the parts in which two experiments differ."""
    return [name for name in ours if theirs.get(name) != ours[name]]


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def population_of(names: Sequence[str], sizes: Mapping[str, Sequence[int]]) -> Population:
    """Return the clients of a run in their order, with their counts of (train, validation, test) samples."""
    train, validation, test = zip(*[sizes[name] for name in names])
    return Population.make(list(train), list(test), list(names), n_validation=list(validation))
