"""An experiment: a model, data, a method, and how long to train. Changed by `key=value` settings."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import re
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from partita import (
    aggregate,
    attack,
    capacity,
    measures,
    optim,
    schedule,
)
from partita.algorithms import METHODS, pipeline, psi, tuned
from partita.algorithms.by_name import by_name
from partita.algorithms.local import solvers
from partita.api import Arguments, Run, federate
from partita.core import check
from partita.core.options import bind, constructors, signature
from partita.core.parts import Algorithm
from partita.data import FederatedData
from partita.engine.settings import Manner, Parts, Settings, Training
from partita.engine.train import check_finished

Functions = dict[str, Callable[..., Any]]


CAPACITIES = ("depth", "fjord", "heterofl", "width")
MODULES = {
    "optim": constructors(optim),
    "aggregate": constructors(aggregate),
    "psi": constructors(psi),
    "solver": constructors(solvers),
    "attack": constructors(attack),
    "capacity": {n: f for n, f in constructors(capacity).items() if n in CAPACITIES},
    "measures": constructors(measures),
    "schedule": constructors(schedule),
}
"""The functions that a setting may call, by the word before their names: `optim.adam`, `attack.alie`."""
TAKES = {"server": "optim", "optimizer": "optim"}  # options whose functions are those of another word
SCHEDULES = ("asynchronous", "synchronous", "preferred")
DEEPEST = 50  # nesting of what is written on the command line


@dataclass(frozen=True)
class Experiment(Parts, Training):
    """What is computed, to be run later: `partita.federate` with these of its arguments, and others."""

    model: nn.Module | Callable[[], nn.Module]
    data: FederatedData
    algorithm: Algorithm

    def run(self, **options: Any) -> Run:
        """Train; `options` are further arguments of `federate`."""
        return federate(**{**self._given, **options})

    def check_finished(self, folder: Path, **options: Any) -> None:
        """Refuse a folder with a finished run that is not what `run` with these options would do."""
        manner = {f.name for f in dataclasses.fields(Manner)}
        options = {k: v for k, v in options.items() if k not in manner}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they were said when it ran
            run = Arguments(**{**self._given, **options, "out": folder}).prepared()
            check_finished(run, self.algorithm.name)

    @property
    def settings(self) -> Settings:
        """Its settings, and all others as they are by default."""
        names = [f.name for kind in (Training, Parts) for f in dataclasses.fields(kind)]
        return Settings(**{name: getattr(self, name) for name in names})

    @property
    def _given(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


def build(recipe: Callable[..., Any], settings: Mapping[str, Any]) -> Any:
    """The recipe's experiment with settings: arguments of the recipe, fields of the experiment, or options of
    its method as `algorithm.lr`; `algorithm` alone is the name of another method.

    A recipe of a study has only arguments; what it returns is returned.
    """
    arguments = inspect.signature(recipe).parameters
    name = getattr(recipe, "__name__", "experiment")
    with blamed(name):
        experiment = recipe(**{k: v for k, v in settings.items() if k in arguments})
    if hasattr(experiment, "variants"):
        for key in settings:
            check.choice("--set", key, arguments)
        return experiment
    if not isinstance(experiment, Experiment):
        raise check.fail("recipe", recipe, "a function that returns an Experiment or a Study")
    fields = [f.name for f in dataclasses.fields(Experiment) if f.name not in ("model", "data", "algorithm")]
    chosen = {k.partition(".")[2]: v for k, v in settings.items() if k.partition(".")[0] == "algorithm"}
    experiment = replace(experiment, algorithm=changed(experiment.algorithm, chosen))
    for key, value in settings.items():
        if key in fields:
            experiment = replace(experiment, **{key: _part(key, value)})
        elif key not in arguments and key.partition(".")[0] != "algorithm":
            known = [*arguments, *(f for f in fields if f not in arguments), "algorithm", "algorithm.OPTION"]
            raise check.fail("--set", key, f"one of {', '.join(known)}{check.meant(key, known)}")
    return experiment


@contextlib.contextmanager
def blamed(name: str) -> Iterator[None]:
    """Errors of a user's file are named as such, with the line; ours (and files not found) say enough."""
    try:
        yield
    except (ValueError, OSError):
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, SyntaxError) else f" in line {last.lineno} of {last.filename}"
        reason = f"{type(error).__name__}: {error}{where}"
        raise check.fail("recipe", name, f"Python that runs ({reason})") from error


def parse(assignments: list[str]) -> dict[str, Any]:
    """'key=value' texts: values are Python literals, calls such as `linear(0.1)` for options of the method,
    or words."""
    settings: dict[str, Any] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise check.fail("--set", text, "key=value, such as rounds=100 or algorithm.lr=0.05")
        settings[key.strip()] = _value(key.strip(), value.strip())
    return settings


def expression(field: str, text: str) -> ast.expr | None:
    """What a text says in Python, None if it is a word; what is nested too deep is refused."""
    try:
        found = ast.parse(text, mode="eval").body
    except (ValueError, SyntaxError):
        return None
    except (RecursionError, MemoryError):
        found = None
    level: list[ast.AST] = [] if found is None else [found]
    depth = 0
    while level and depth <= DEEPEST:
        level, depth = [child for node in level for child in ast.iter_child_nodes(node)], depth + 1
    if found is None or level:
        raise check.fail(field, text, f"an expression that is nested at most {DEEPEST} deep")
    return found


def _value(key: str, text: str) -> Any:
    node = expression(key, text)
    if node is None:
        return text
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        if not key.startswith("algorithm.") or not isinstance(node, ast.Call):
            return text
    try:
        return _made(node, key.rpartition(".")[2])
    except check.Refused as error:
        raise error.within(key) from None


def _part(field: str, value: Any) -> Any:
    """A field of the experiment from its text: `sign_flip`, `sign_flip(scale=2)`, or several of such."""
    if field not in MODULES or not isinstance(value, str):
        return value
    node = expression(field, value)
    if node is None:
        raise check.fail(field, value, _call_of(field))
    if isinstance(node, ast.List | ast.Tuple):
        return [_called(n, field) for n in node.elts]
    made = _called(node, field)
    return [made] if field == "measures" else made


def _called(node: ast.expr, field: str) -> Any:
    """What a call makes; a name alone is called without arguments."""
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name | ast.Attribute):
        raise check.fail(field, ast.unparse(node), _call_of(field))
    name = re.sub(rf"^((partita|pt)\.)?({field}\.)?", "", ast.unparse(call.func))
    check.choice(field, name, _names(field))
    try:
        return _made(call, field)
    except check.Refused as error:
        raise error.within(field) from None


def _call_of(field: str) -> str:
    return f"a call such as {next(iter(_names(field)))}()"


def _names(field: str) -> Sequence[str]:
    """What a field may be: a schedule is no delay."""
    return SCHEDULES if field == "schedule" else [*MODULES[field]]


def _made(node: ast.Call, option: str, prefix: str = "") -> Any:
    """What one of the known functions makes of literals; no other is called.

    In errors of its arguments, `prefix` is before the argument.
    """
    full, short = _known(option)
    written = re.sub(r"^(partita|pt)\.", "", ast.unparse(node.func))
    part = full.get(written) or short[check.choice("function", written, short)]
    name = written.rpartition(".")[2]
    args = [_argument(a, option, name) for a in node.args]
    if any(k.arg is None for k in node.keywords):
        raise check.fail("argument", ast.unparse(node), "arguments by their names, without **")
    kwargs = {str(k.arg): _argument(k.value, option, name) for k in node.keywords}
    bound = bind(name, signature(part), args, kwargs, prefix)
    return part(*bound.args, **bound.kwargs)


def _known(option: str) -> tuple[Functions, Functions]:
    """The functions that this option may call, as `schedule.delays` and as `delays`.

    A name alone is of the module that the option takes, else of the first that has it.
    """
    some = {"schedule": MODULES["schedule"]} if option == "schedule" else MODULES
    full = {f"{word}.{name}": part for word, parts in some.items() for name, part in parts.items()}
    short = {name.partition(".")[2]: part for name, part in reversed(full.items())}
    return full, dict(sorted({**short, **some.get(TAKES.get(option, option), {})}.items()))


def literal(node: ast.expr, option: str) -> Any:
    """As `_argument`, or a bare word."""
    return node.id if isinstance(node, ast.Name) else _argument(node, option)


def _argument(node: ast.expr, option: str, inside: str = "") -> Any:
    """A literal, or a call; `inside` is the function whose argument it is."""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        return _made(node, option, f"{name} " if inside else "")
    if isinstance(node, ast.Dict) and all(node.keys):
        pairs = [(_argument(k, option, inside), v) for k, v in zip(node.keys, node.values) if k]
        if not all(isinstance(k, Hashable) for k, _ in pairs):
            raise check.fail("argument", ast.unparse(node), "names or numbers as keys")
        return {k: _argument(v, option, inside) for k, v in pairs}
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise check.fail("argument", ast.unparse(node), "a number, a word in quotes or a list") from None


def changed(algorithm: Algorithm, chosen: Mapping[str, Any]) -> Algorithm:
    """The method with other options, or another method ("") with those options that it takes too.

    Another method is what its name stands for: `finetune` comes after fedavg. A pipeline's options are those
    of its stages: "1.lr" is the lr of stage 1. What is tuned stays so.
    """
    if not chosen:
        return algorithm
    name = check.choice("algorithm", chosen.get("", algorithm.name), METHODS)
    if algorithm.stages and name == "pipeline":
        return _changed_stages(algorithm, {k: v for k, v in chosen.items() if k})
    if name == "pipeline":
        raise check.fail(
            "algorithm", name, "another method: a pipeline is written in Python, as experiment()"
        )
    known = inspect.signature(METHODS[name]).parameters
    kept = {k: v for k, v in algorithm.options.items() if k in known}
    new = {k: v for k, v in chosen.items() if k}
    for option in new:
        check.choice(f"option of {name}", option, known)
    plain = name == algorithm.name and not algorithm.stages  # the recipe fine-tunes a model of its own
    make = METHODS[name] if plain else partial(by_name, name)
    made = make(**{**kept, **new})
    return tuned(made, **algorithm.options["tuned"]) if "tuned" in algorithm.options else made


def _changed_stages(algorithm: Algorithm, chosen: Mapping[str, Any]) -> Algorithm:
    stages = list(algorithm.stages)
    for key, value in chosen.items():
        number, _, option = key.partition(".")
        if not number.isdecimal() or int(number) >= len(stages) or not option:
            raise check.fail("--set", f"algorithm.{key}", "algorithm.STAGE.OPTION, such as algorithm.0.lr")
        part = stages[int(number)]
        stages[int(number)] = replace(part, algorithm=changed(part.algorithm, {option: value}))
    return pipeline(*stages)
