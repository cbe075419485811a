"""An experiment: a model, data, a method, and how long to train. Changed by `key=value` settings."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from partita.algorithms import METHODS, known, pipeline, stage, tuned
from partita.algorithms.by_name import EPOCHS, by_name
from partita.api import Arguments, Run, federate
from partita.core import check
from partita.core.parts import Algorithm
from partita.data import FederatedData
from partita.engine.settings import Manner, Parts, Settings, Training
from partita.engine.train import check_finished
from partita.recipes.expressions import methods, part

OF_STAGE = ("rounds", "cohort", "steps", "epochs", "batch", "state")
"""What a stage of a pipeline has of its own, written among the options of its method."""


@dataclass(frozen=True)
class Experiment(Parts, Training):
    """What is computed, to be run later: `partita.federate` with these of its arguments, and others."""

    model: nn.Module | Callable[[], nn.Module]
    data: FederatedData
    algorithm: Algorithm

    def run(self, **options: Any) -> Run:
        """Train; `options` are further arguments of `federate`."""
        return federate(**{**self._arguments, **options})

    def check_finished(self, folder: Path, **options: Any) -> None:
        """Refuse a folder with a finished run that is not what `run` with these options would do."""
        manner = {f.name for f in dataclasses.fields(Manner)}
        options = {k: v for k, v in options.items() if k not in manner}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they were given when it ran
            run = Arguments(**{**self._arguments, **options, "out": folder}).prepared()
            check_finished(run, self.algorithm.name)

    @property
    def settings(self) -> Settings:
        """Its settings, with all others at their defaults."""
        names = [f.name for kind in (Training, Parts) for f in dataclasses.fields(kind)]
        return Settings(**{name: getattr(self, name) for name in names})

    @property
    def _arguments(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


def build(recipe: Callable[..., Any], settings: Mapping[str, Any]) -> Any:
    """Return the recipe's experiment with settings.

    A setting is an argument of the recipe, a field of the experiment, or an option of its method as
    `algorithm.lr`; `algorithm` alone is the name of another method. A study has the recipe's arguments only.
    """
    arguments = inspect.signature(recipe).parameters
    with blamed(getattr(recipe, "__name__", "experiment")):
        experiment = recipe(**{k: v for k, v in settings.items() if k in arguments})
    if hasattr(experiment, "variants"):
        for key in settings:
            check.choice("--set", key, arguments)
        return experiment
    if not isinstance(experiment, Experiment):
        raise check.fail("recipe", recipe, "a function that returns an Experiment or a Study")
    fields = [f.name for f in dataclasses.fields(Experiment) if f.name not in ("model", "data", "algorithm")]
    options = {k.partition(".")[2]: v for k, v in settings.items() if k.partition(".")[0] == "algorithm"}
    experiment = replace(experiment, algorithm=changed(experiment.algorithm, options))
    for key, value in settings.items():
        if key in fields:
            experiment = replace(experiment, **{key: part(key, value)})
        elif key not in arguments and key.partition(".")[0] != "algorithm":
            keys = [*arguments, *(f for f in fields if f not in arguments), "algorithm", "algorithm.OPTION"]
            raise check.fail("--set", key, f"one of {', '.join(keys)}{check.meant(key, keys)}")
    return experiment


@contextlib.contextmanager
def blamed(name: str) -> Iterator[None]:
    """Name a user's file in its errors, with the line. Our own errors, and files not found, say enough."""
    try:
        yield
    except (ValueError, OSError):
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, SyntaxError) else f" in line {last.lineno} of {last.filename}"
        reason = f"{type(error).__name__}: {error}{where}"
        raise check.fail("recipe", name, f"Python that runs ({reason})") from error


def changed(algorithm: Algorithm, options: Mapping[str, Any]) -> Algorithm:
    """Return the method with other options, or another method ("") with those options that it takes too.

    Another method is what its name stands for: `finetune` comes after fedavg. It may be written with options,
    or as a pipeline: "fedavg(lr=0.1) > finetune(lr=0.01, epochs=5)". A pipeline's options are those of its
    stages: "1.lr" is the lr of stage 1. A tuned method stays tuned.
    """
    if not options:
        return algorithm
    new = {k: v for k, v in options.items() if k}
    written = methods(options[""]) if isinstance(options.get(""), str) else []
    if len(written) > 1:
        return _changed_stages(_pipeline(algorithm, written), new)
    if written:
        new = {**written[0][1], **new}
    name = known.method("algorithm", written[0][0] if written else options.get("", algorithm.name))
    if name == "pipeline":
        if not algorithm.stages:
            allowed = "the stages of the pipeline, such as fedavg(lr=0.1) > finetune(lr=0.01)"
            raise check.fail("algorithm", name, allowed)
        return _changed_stages(algorithm, new)
    parameters = inspect.signature(METHODS[name]).parameters
    for option in new:
        check.choice(f"option of {name}", option, parameters)
    kept = {k: v for k, v in algorithm.options.items() if k in parameters}
    same = name == algorithm.name and not algorithm.stages  # the recipe fine-tunes a model of its own
    make = METHODS[name] if same else partial(by_name, name)
    made = make(**{**kept, **new})
    return tuned(made, **algorithm.options["tuned"]) if "tuned" in algorithm.options else made


def _pipeline(algorithm: Algorithm, written: Sequence[tuple[str, Mapping[str, Any]]]) -> Algorithm:
    """Return a pipeline as it is written. Options of stages that are not given are those of the method.

    `rounds`, `cohort`, `steps`, `epochs`, `batch` and `state` among the options are those of the stage. A
    stage of fine-tuning is by default as long as fine-tuning by its name, and of the whole model.
    """
    own = algorithm.stages[0].algorithm if algorithm.stages else algorithm
    stages = []
    for name, given in written:
        parameters = inspect.signature(METHODS[name]).parameters
        for option in given:
            check.choice(f"option of {name}", option, [*parameters, *OF_STAGE])
        amount = {k: given[k] for k in OF_STAGE if k in given}
        kept = {k: v for k, v in own.options.items() if k in parameters}
        if name == "finetune":
            kept = {"personal": "all", **kept}
            amount = amount if amount.keys() & {"rounds", "steps", "epochs"} else {**amount, "epochs": EPOCHS}
        try:
            method = METHODS[name](**{**kept, **{k: v for k, v in given.items() if k not in OF_STAGE}})
            stages.append(stage(method, **amount))
        except check.Refused as error:
            raise error.within(name) from None
    made = pipeline(*stages)
    return tuned(made, **own.options["tuned"]) if "tuned" in own.options else made


def _changed_stages(algorithm: Algorithm, options: Mapping[str, Any]) -> Algorithm:
    stages = list(algorithm.stages)
    for key, value in options.items():
        number, _, option = key.partition(".")
        if not number.isdecimal() or int(number) >= len(stages) or not option:
            raise check.fail("--set", f"algorithm.{key}", "algorithm.STAGE.OPTION, such as algorithm.0.lr")
        before = stages[int(number)]
        stages[int(number)] = replace(before, algorithm=changed(before.algorithm, {option: value}))
    return pipeline(*stages)
