"""Settings, methods and parts as JSON: what is needed to write them down again, and to tell them apart."""

from __future__ import annotations

import dataclasses
import platform
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from partita.algorithms.psi import Penalty
from partita.core.parts import Aggregation, Aggregator, Algorithm, Attack, Capacity, Measure, Optimizer
from partita.engine import digest as code
from partita.engine.setup import Setup
from partita.engine.stage import Choices


def describe(value: Any) -> Any:
    """A JSON-able description of options: what is needed to write them down again."""
    if isinstance(value, Algorithm | Aggregator | Attack | Capacity | Measure | Penalty | Optimizer):
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


def configuration(setup: Setup, name: str, choices: Choices) -> dict[str, Any]:
    """Return what config.json holds: everything needed to run it again."""
    settings = setup.settings
    schedules = setup.schedules
    if all(s == schedules[0] for s in schedules):
        schedules = schedules[:1]
    return {
        "what": name,
        "algorithm": describe(setup.algorithm),
        "settings": describe(settings.recorded),
        "schedule": _one(describe(schedules)),
        "attack": describe(settings.attack),
        "capacity": describe(settings.capacity),
        "measures": describe(settings.measures),
        "loss": setup.profile.loss.name,
        "metric": setup.profile.metric.name,
        "model": {
            "class": type(setup.model).__name__,
            "tensors": {k: list(v.shape) for k, v in setup.initial.items()},
            "initial": setup.origin.initial,
            "fixed": setup.origin.fixed,
        },
        "code": setup.origin.code,
        "partition": _one([_partition(setup, plan.algorithm) for plan in setup.plans]),
        "data": {
            "clients": setup.data.clients,
            "fingerprint": setup.fingerprint,
            "source": setup.data.source,
        },
        "trial": setup.origin.trial,
        "executor": {
            "requested": describe(settings.executor),
            "picks": choices,
            "threads": torch.get_num_threads(),
        },
        "versions": versions(),
    }


def _partition(setup: Setup, algorithm: Algorithm) -> dict[str, Any]:
    """Which tensors a method leaves with the clients, and how many numbers are shared and personal."""
    partition = setup.partition_of(algorithm)
    shared, personal = (sum(setup.initial[k].numel() for k in names) for names in partition)
    return {"personal": partition.personal, "parameters": {"shared": shared, "personal": personal}}


def _one(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values
