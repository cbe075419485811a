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
