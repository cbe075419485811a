"""An experiment: a model, data, a method, and how long to train. Changed by `key=value` settings."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from partita import check
from partita.algorithms import METHODS, pipeline
from partita.data import FederatedData
from partita.federate import federate
from partita.measure.criteria import Function
from partita.run import Run
from partita.schedule import Schedule
from partita.types import Algorithm


@dataclass(frozen=True)
class Experiment:
    """The arguments of `partita.federate`, to be run later."""

    model: nn.Module | Callable[[], nn.Module]
    data: FederatedData
    algorithm: Algorithm
    rounds: int | None = None
    cohort: int | None = None
    steps: int | tuple[int, ...] | None = None
    epochs: int | None = None
    batch: int | None = None
    seed: int = 0
    loss: str | Function | None = None
    metric: str | Function | None = None
    state: str = "keep"
    norm: str | None = None
    evaluate_every: int | None = None
    baselines: bool = True
    train_scores: bool = False
    checkpoint_every: int | None = None
    schedule: Schedule | None = None

    def run(self, **options: Any) -> Run:
        """Train; `options` are further arguments of `federate`."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return federate(**{**given, **options})


def build(recipe: Callable[..., Any], settings: Mapping[str, Any]) -> Experiment:
    """The recipe's experiment with settings: arguments of the recipe, fields of the experiment, or options of
    its method as `algorithm.lr`; `algorithm` alone is the name of another method."""
    arguments = inspect.signature(recipe).parameters
    experiment = recipe(**{k: v for k, v in settings.items() if k in arguments})
    if not isinstance(experiment, Experiment):
        raise check.fail("recipe", recipe, "a function that returns a partita.recipes.Experiment")
    fields = [f.name for f in dataclasses.fields(Experiment) if f.name not in ("model", "data", "algorithm")]
    chosen = {k.partition(".")[2]: v for k, v in settings.items() if k.partition(".")[0] == "algorithm"}
    experiment = replace(experiment, algorithm=_changed(experiment.algorithm, chosen))
    for key, value in settings.items():
        if key in fields:
            experiment = replace(experiment, **{key: value})
        elif key not in arguments and key.partition(".")[0] != "algorithm":
            known = [*arguments, *(f for f in fields if f not in arguments), "algorithm", "algorithm.OPTION"]
            raise check.fail("--set", key, f"one of {', '.join(known)}{check.meant(key, known)}")
    return experiment


def parse(assignments: list[str]) -> dict[str, Any]:
    """'key=value' texts: values are Python literals, anything else is a word."""
    settings: dict[str, Any] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise check.fail("--set", text, "key=value, such as rounds=100 or algorithm.lr=0.05")
        try:
            settings[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            settings[key.strip()] = value.strip()
    return settings


def _changed(algorithm: Algorithm, chosen: Mapping[str, Any]) -> Algorithm:
    """The method with other options, or another method ("") with those options that it takes too.

    A pipeline's options are those of its stages: "1.lr" is the lr of stage 1.
    """
    if not chosen:
        return algorithm
    if algorithm.stages and "" not in chosen:
        return _changed_stages(algorithm, chosen)
    name = check.choice("algorithm", chosen.get("", algorithm.name), METHODS)
    known = inspect.signature(METHODS[name]).parameters
    kept = {k: v for k, v in algorithm.options.items() if k in known}
    new = {k: v for k, v in chosen.items() if k}
    for option in new:
        check.choice(f"option of {name}", option, known)
    return METHODS[name](**{**kept, **new})


def _changed_stages(algorithm: Algorithm, chosen: Mapping[str, Any]) -> Algorithm:
    stages = list(algorithm.stages)
    for key, value in chosen.items():
        number, _, option = key.partition(".")
        if not number.isdecimal() or int(number) >= len(stages) or not option:
            raise check.fail("--set", f"algorithm.{key}", "algorithm.STAGE.OPTION, such as algorithm.0.lr")
        part = stages[int(number)]
        stages[int(number)] = replace(part, algorithm=_changed(part.algorithm, {option: value}))
    return pipeline(*stages)
