"""Methods side by side on one experiment: the same data, initial weights, cohorts and work."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from partita.algorithms.baselines import baselines
from partita.core import check
from partita.core.parts import Algorithm, StagePlan
from partita.engine.settings import as_alone, as_one, schedule_of
from partita.recipes.experiment import Experiment, changed
from partita.recipes.study import Study, Variant
from partita.schedule import synchronous

ALONE, GLOBAL = "local", "fedavg"


def versus(experiment: Experiment, methods: Sequence[str] = ()) -> Study:
    """Return the experiment under each of these methods, after the two that all are compared with.

    A method is a name, a call with options such as 'fedprox(mu=0.1)' or 'fedalt(personal=input, lr=0.05)', or
    a pipeline of such: 'fedavg(lr=0.1) > finetune(lr=0.01)'. Other options that it takes are those of the
    experiment's own method. By default that method is the only one.
    All run under the experiment's schedule; if it has none, each under the one that it prefers.
    """
    return beside(experiment, methods_of(experiment, methods))


def methods_of(experiment: Experiment, methods: Sequence[str] = ()) -> dict[str, Algorithm]:
    """Return the methods that texts stand for, by labels that can be names of folders."""
    own = experiment.algorithm
    chosen = {_label(text): text for text in methods} if methods else {own.name: own.name}
    return {
        label: own if text.strip() == own.name else changed(own, {"": text})
        for label, text in chosen.items()
        if text.strip() not in (ALONE, GLOBAL)
    }


def beside(experiment: Experiment, methods: Mapping[str, Algorithm]) -> Study:
    """Return the experiment under each of these methods, after the two that all are compared with.

    Those two have the options of the experiment's own method, unless they are among the methods by their
    names.
    """
    whole = replace(experiment, baselines=False)
    stages = experiment.settings.checked(experiment.data.clients).stages(experiment.algorithm)
    plain = replace(whole, **as_one(stages))
    base = replace(plain, state="keep", norm="global")  # as the baselines of a single run
    rules = baselines(experiment.algorithm)
    alone, one = methods.get(ALONE, rules["local"]), methods.get(GLOBAL, rules["global"])
    variants = {
        ALONE: Variant(replace(base, algorithm=alone, **_alone(experiment, stages))),
        GLOBAL: Variant(replace(base, algorithm=one), baselines={"local": ALONE}),
    }
    for label, method in methods.items():
        if label not in variants:
            variant = replace(whole if method.stages else plain, algorithm=method)
            variants[label] = Variant(variant, baselines={"local": ALONE, "global": GLOBAL})
    return Study(variants)


def _alone(experiment: Experiment, stages: Sequence[StagePlan]) -> dict[str, Any]:
    """Return the settings of training alone: as many steps, and no delays."""
    chosen = check.schedule("schedule", experiment.schedule)
    schedules = [schedule_of(stage, chosen) for stage in stages]
    data, validated = experiment.data, bool(experiment.data.validation[:, 1].any())
    amount = as_alone(stages, schedules, data.clients, experiment.evaluate_every, validated)
    return {**amount, "schedule": synchronous()}


def _label(text: str) -> str:
    """Return a method as it is written, as a name that can be a folder's."""
    parts = []
    for written in text.split(">"):
        name, bracket, options = "".join(written.split()).partition("(")
        parts.append(f"{name}-{options.removesuffix(')')}" if bracket else name)
    return re.sub(r"[^\w.=,+-]", "", "+".join(parts))


def separate(text: str) -> list[str]:
    """Split such as 'fedavg,fedprox(mu=0.1, lr=0.2)' at the commas outside of brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if c == "," and not depth:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts if part.strip()]
