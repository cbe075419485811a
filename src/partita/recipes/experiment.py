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
    for key, value in settings.items():
        if key in fields:
            experiment = replace(experiment, **{key: value})
        elif key == "algorithm" or key.startswith("algorithm."):
            path = key.split(".")[1:]
            experiment = replace(experiment, algorithm=_changed(experiment.algorithm, path, value))
        elif key not in arguments:
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


def _changed(algorithm: Algorithm, path: list[str], value: Any) -> Algorithm:
    """The method with one option changed (`lr`, or `1.lr` for a pipeline's stage 1), or another method."""
    if not path:
        make = METHODS[check.choice("algorithm", value, METHODS)]
        known = inspect.signature(make).parameters
        return make(**{k: v for k, v in algorithm.options.items() if k in known})
    if algorithm.stages:
        number = int(path[0]) if path[0].isdecimal() else -1
        if not 0 <= number < len(algorithm.stages) or len(path) != 2:
            raise check.fail(
                "--set", ".".join(["algorithm", *path]), "algorithm.STAGE.OPTION, such as algorithm.0.lr"
            )
        stages = list(algorithm.stages)
        stages[number] = replace(
            stages[number], algorithm=_changed(stages[number].algorithm, path[1:], value)
        )
        return pipeline(*stages)
    known = inspect.signature(METHODS[algorithm.name]).parameters
    check.choice(f"option of {algorithm.name}", ".".join(path), known)
    return METHODS[algorithm.name](**{**algorithm.options, path[0]: value})
