"""Descriptions of settings, methods and parts as JSON, to write config.json and to tell runs apart."""

from __future__ import annotations

import dataclasses
import functools
import platform
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from partita.algorithms.psi import Penalty
from partita.core.options import called
from partita.core.parts import (
    Aggregation,
    Aggregator,
    Algorithm,
    Attack,
    Capacity,
    Measure,
    Optimizer,
    Transform,
)
from partita.engine import digest as code
from partita.engine.setup import Setup
from partita.engine.stage import Choices


def describe(value: Any) -> Any:
    """Return a description of a value in JSON's types: what is needed to write it down again."""
    parts = Algorithm | Aggregator | Attack | Capacity | Measure | Penalty | Optimizer | Transform
    if isinstance(value, parts):
        return {"name": value.name, **describe(value.options), **_own_code(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = {} if code.is_installed(type(value)) else {"code": code.digest(type(value))}
        return {"name": called(type(value)), **describe(_fields(value)), **own}
    if isinstance(value, Mapping):
        return {str(k): describe(v) for k, v in value.items()}
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    if isinstance(value, Sequence):
        return [describe(v) for v in value]
    if not callable(value) and not hasattr(value, "shape") and code.is_installed(type(value)):
        return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    return name if code.is_told_by_name(value) else f"{name} #{code.digest(value)}"


def _fields(value: Any) -> dict[str, Any]:
    names = getattr(value, "_fields", None) or [f.name for f in dataclasses.fields(value)]
    return {name: getattr(value, name) for name in names}


def _own_code(part: Any) -> dict[str, str]:
    """Return a digest of the user's functions in a method or another part: names do not tell what they do."""
    fields = _fields(part).items()
    functions = {k: v.bind if isinstance(v, Aggregation) else v for k, v in fields if callable(v)}
    own = {
        k: v
        for k, v in functions.items()
        if not code.is_installed(v if hasattr(v, "__module__") else type(v))
    }
    return {"code": code.digest(own)} if own else {}


def versions() -> dict[str, str]:
    """Return the versions of what a run is computed with."""
    installed = {package: _version(package) for package in ("partita", "torch", "numpy", "safetensors")}
    return {"python": platform.python_version(), **installed, "torch": torch.__version__}


@functools.cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


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
        "augment": describe(settings.augment),
        "attack": describe(settings.attack),
        "capacity": describe(settings.capacity),
        "uploads": describe(setup.uploads),
        "downloads": describe(settings.downloads),
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
            **({} if setup.newcomers is None else {"newcomers": setup.newcomers.fingerprint()}),
        },
        "trial": setup.origin.trial,
        "executor": {
            "requested": describe(settings.executor),
            "picks": choices,
            "threads": torch.get_num_threads(),
            **({} if setup.crew is None else {"workers": setup.crew.description()}),
        },
        "versions": versions(),
    }


def _partition(setup: Setup, algorithm: Algorithm) -> dict[str, Any]:
    """Return the names of a method's personal tensors, and how many numbers are shared and personal."""
    partition = setup.partition_of(algorithm)
    shared, personal = (sum(setup.initial[k].numel() for k in names) for names in partition)
    return {"personal": partition.personal, "parameters": {"shared": shared, "personal": personal}}


def _one(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values
