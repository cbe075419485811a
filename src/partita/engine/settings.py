"""What a user asks of a run, checked before any work, and written down so that it can be run again."""

from __future__ import annotations

import dataclasses
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from partita.algorithms.psi import Penalty
from partita.core import check, draws
from partita.core.device import PRECISIONS
from partita.core.parts import (
    Aggregation,
    Aggregator,
    Algorithm,
    Attack,
    Capacity,
    Measure,
    ServerOptimizer,
    Stage,
)
from partita.core.types import Work
from partita.engine import digest as code
from partita.schedule import Schedule, synchronous, usual

STATES, NORMS = ("keep", "reset"), ("global", "static", "personal")
STORES, EXECUTORS = ("auto", "memory", "disk"), ("auto", "loop", "pool", "vmap", "graph", "compiled")

ENOUGH = 200
"""Rounds in which a client alone comes close to where it ends: with a few steps in each and usual rates,
after 25 to 200 on the digits and on spoken digits, after 25 on heart disease (more overfit)."""


@dataclass(frozen=True)
class Settings:
    """The arguments of `federate` that decide what is computed."""

    rounds: int | None
    cohort: int | None
    steps: int | tuple[int, ...] | None
    epochs: int | None
    batch: int | None
    seed: int
    state: str
    norm: str | None
    executor: str
    device: str
    memory: int | None
    store: str
    evaluate_every: int | float | None
    checkpoint_every: int | None
    baselines: bool | tuple[str, ...]
    train_scores: bool
    byzantine: tuple[int, ...] = ()
    precision: str = "tf32"
    deterministic: bool = False
    profile: bool = False

    @staticmethod
    def checked(clients: int, **given: Any) -> Settings:
        """The settings, or a ValueError that names the first wrong one."""
        usual = {
            f.name: f.default for f in dataclasses.fields(Settings) if f.default is not dataclasses.MISSING
        }
        given = {**usual, **given}
        whole = {
            "rounds": 1,
            "cohort": 1,
            "epochs": 1,
            "batch": 1,
            "checkpoint_every": 0,
        }
        for field, low in whole.items():
            if given[field] is not None:
                high = clients if field == "cohort" else None
                given[field] = check.integer(field, given[field], low=low, high=high)
        given["evaluate_every"] = _every(given["evaluate_every"])
        given["seed"] = check.integer("seed", given["seed"], low=0, high=2**63 - 1)
        given["steps"] = steps_of(given["steps"], clients)
        if given["steps"] is not None and given["epochs"] is not None:
            raise check.fail("steps", given["steps"], "steps or epochs, not both")
        check.choice("state", given["state"], STATES)
        if given["norm"] is not None:
            check.choice("norm", given["norm"], NORMS)
        check.choice("store", given["store"], STORES)
        check.choice("executor", given["executor"], EXECUTORS)
        check.choice("precision", given["precision"], PRECISIONS)
        given["baselines"] = _baselines(given["baselines"])
        for field in ("train_scores", "deterministic", "profile"):
            if not isinstance(given[field], bool):
                raise check.fail(field, given[field], "True or False")
        if given["checkpoint_every"] == 0 and given["store"] == "disk":
            raise check.fail(
                "checkpoint_every", 0, "from 1 with store='disk': states on disk need checkpoints"
            )
        given["device"] = _device(given["device"])
        given["memory"] = parse_bytes(given["memory"])
        return Settings(**given)

    def stages(self, algorithm: Algorithm) -> tuple[Stage, ...]:
        """The stages of the run with nothing left open: a plain method is a pipeline of one."""
        parts = algorithm.stages or (Stage(algorithm),)
        return tuple(self._fill(part) for part in parts)

    def _fill(self, stage: Stage) -> Stage:
        once = stage.rounds is None and stage.epochs is not None  # fine-tuning: all clients, one round
        rounds = 1 if once else (stage.rounds or self.rounds)
        if rounds is None:
            raise check.fail("rounds", None, "a whole number from 1 (or each stage's own)")
        own_work = stage.steps is not None or stage.epochs is not None
        return dataclasses.replace(
            stage,
            rounds=rounds,
            cohort=stage.cohort if once else (stage.cohort or self.cohort),
            steps=stage.steps if own_work else self.steps,
            epochs=stage.epochs if own_work else self.epochs,
            batch=stage.batch or self.batch,
            state=stage.state or ("keep" if once else self.state),
            schedule=stage.schedule or (synchronous() if once else None),
        )


def as_one(stages: Sequence[Stage]) -> dict[str, Any]:
    """All stages as one: their rounds together, the cohort and the work of the first."""
    first = stages[0]
    work = {"steps": first.steps, "epochs": first.epochs, "batch": first.batch}
    return {"rounds": sum(s.rounds or 0 for s in stages), "cohort": first.cohort, **work}


def as_alone(
    stages: Sequence[Stage], schedules: Sequence[Schedule], clients: int, every: int | float | None
) -> dict[str, Any]:
    """The same for every client alone, which costs no communication: its amount does not follow the schedule.

    Everyone takes part in every round, without delays, as many rounds as the stages have; but no more than
    ENOUGH, or than a client of the stages has turns on average, if that is more. Virtual time says nothing
    there: evaluations after `every` so much of it go by rounds, and under `until` nobody knows the turns.
    """
    uploads = [
        (stage.rounds or 0) * (getattr(schedule, "buffer", None) or stage.cohort or clients)
        for stage, schedule in zip(stages, schedules)
        if getattr(schedule, "until", None) is None
    ]
    whole = as_one(stages)
    rounds = min(whole["rounds"], max(ENOUGH, -(-sum(uploads) // clients)))
    evaluations = {"evaluate_every": None if isinstance(every, float) else every}
    return {**whole, "rounds": rounds, "cohort": None, **evaluations}


def schedule_of(stage: Stage, schedule: Schedule | None) -> Schedule:
    """What a stage runs under: its own schedule, the run's, or what its method wants."""
    chosen: Schedule = stage.schedule or schedule or usual()
    return chosen.of(stage.algorithm)


def stage_work(stage: Stage) -> Work:
    """What a client computes in a round of this stage; one pass over its data unless the user says more."""
    epochs = 1 if stage.steps is None and stage.epochs is None else stage.epochs
    return Work(steps=stage.steps, epochs=epochs, batch=stage.batch)


def describe(value: Any) -> Any:
    """A JSON-able description of options: what is needed to write them down again."""
    if isinstance(value, Algorithm | Aggregator | Attack | Capacity | Measure | Penalty | ServerOptimizer):
        return {"name": value.name, **describe(value.options), **_own_code(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = {} if code.is_known(type(value)) else {"code": code.digest(type(value))}
        return {"name": type(value).__name__.lower(), **describe(_fields(value)), **own}
    if isinstance(value, Mapping):
        return {str(k): describe(v) for k, v in value.items()}
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    if isinstance(value, Sequence):
        return [describe(v) for v in value]
    if not callable(value) and not hasattr(value, "shape") and code.is_known(type(value)):
        return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    return name if code.told_by_name(value) else f"{name} #{code.digest(value)}"


def _fields(value: Any) -> dict[str, Any]:
    names = getattr(value, "_fields", None) or [f.name for f in dataclasses.fields(value)]
    return {name: getattr(value, name) for name in names}


def _own_code(part: Any) -> dict[str, str]:
    """Of a method or another part whose functions are a user's: name and options do not tell what it does."""
    given = {k: v.bind if isinstance(v, Aggregation) else v for k, v in _fields(part).items() if callable(v)}
    own = {k: v for k, v in given.items() if not code.is_known(v if hasattr(v, "__module__") else type(v))}
    return {"code": code.digest(own)} if own else {}


def versions() -> dict[str, str]:
    """What a run was computed with."""
    found = {"python": platform.python_version()}
    for package in ("partita", "torch", "numpy", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    found["torch"] = torch.__version__
    return found


def parse_bytes(memory: Any) -> int | None:
    """'8GiB', '500MB' or a number of bytes."""
    return None if memory is None else check.size("memory", memory)


def _every(every: Any) -> int | float | None:
    """Rounds between evaluations, or virtual time if it is no whole number."""
    if every is None:
        return None
    if isinstance(every, float):
        return check.number("evaluate_every", every, low=0, open_low=True)
    try:
        return check.integer("evaluate_every", every, low=1)
    except ValueError as error:
        raise ValueError(f"{error}, or virtual time such as 2.5") from None


def _baselines(baselines: Any) -> bool | tuple[str, ...]:
    """Whether to train them; given as runs, only which they are."""
    if isinstance(baselines, bool):
        return baselines
    if not isinstance(baselines, Mapping):
        raise check.fail("baselines", baselines, "True, False or {'global': run, 'local': run}")
    for name, run in baselines.items():
        check.choice("baselines", name, ("global", "local"))
        if not hasattr(run, "scores"):
            raise check.fail(f"baselines[{name!r}]", run, "a run, as partita.federate returns it")
    return tuple(baselines)


def steps_of(steps: Any, clients: int) -> int | tuple[int, ...] | None:
    """One number of steps, or one for each client."""
    if steps is None:
        return None
    steps = steps.tolist() if hasattr(steps, "tolist") else steps
    if isinstance(steps, str) or not hasattr(steps, "__len__"):
        return check.integer("steps", steps, low=1)
    if len(steps) != clients:
        raise check.fail("steps", steps, f"a whole number, or one for each of the {clients} clients")
    return tuple(check.integer("steps", s, low=0) for s in steps)


def liars(byzantine: Any, attack: Any, names: Sequence[str], seed: Any) -> tuple[int, ...]:
    """The numbers of the dishonest clients: a share of all, drawn by the seed, or those that are named."""
    if attack is not None and not isinstance(attack, Attack):
        raise check.fail("attack", attack, "an attack such as partita.attack.sign_flip()")
    given = byzantine.tolist() if hasattr(byzantine, "tolist") else byzantine
    found = _share(given, len(names), seed) if isinstance(given, float) else _named(given, names)
    if attack is None and found:
        raise check.fail("byzantine", byzantine, "none without attack=, such as partita.attack.sign_flip()")
    if attack is not None and not found and isinstance(given, float) and given > 0:
        raise check.fail("byzantine", byzantine, f"a share of at least one of the {len(names)} clients")
    if attack is not None and not found:
        raise check.fail("byzantine", byzantine, "with attack=, a share such as 0.25, numbers or names")
    if len(found) == len(names):
        raise check.fail("byzantine", byzantine, "at least one honest client")
    return found


def _share(share: float, clients: int, seed: Any) -> tuple[int, ...]:
    check.number("byzantine", share, low=0.0, high=1.0)
    number = check.integer("seed", seed, low=0, high=2**63 - 1)
    chosen = draws.generator(number, "byzantine").choice(clients, round(share * clients), replace=False)
    return tuple(sorted(chosen.tolist()))


def _named(byzantine: Any, names: Sequence[str]) -> tuple[int, ...]:
    if isinstance(byzantine, str | bytes) or not isinstance(byzantine, Iterable):
        raise check.fail("byzantine", byzantine, "a share such as 0.25, or a list of numbers or names")
    given = list(byzantine)
    named = any(isinstance(who, str) for who in given)
    places = {name: i for i, name in enumerate(names)} if named else {}
    found = {
        places[check.choice("byzantine", who, places)]
        if isinstance(who, str)
        else check.integer("byzantine", who, low=0, high=len(names) - 1)
        for who in given
    }
    return tuple(sorted(found))


def _device(device: Any) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise check.fail("device", device, "'auto', 'cpu' or 'cuda'") from None
    if chosen.type not in ("cpu", "cuda"):
        raise check.fail("device", device, "'auto', 'cpu' or 'cuda'")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise check.fail("device", device, "'auto' or 'cpu': this machine has no CUDA device")
    return str(chosen)
