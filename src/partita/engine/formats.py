"""The form of the files that a run writes, by name: a file with values of other types is refused when read.

Unknown names and missing values are accepted: older and newer runs have others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from partita.core import check

NUMBER, TEXT, FLAG = "a number", "a text", "true or false"
ANY = "*"  # any name
_LEAVES: dict[str, Callable[[Any], bool]] = {
    NUMBER: lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    TEXT: lambda v: isinstance(v, str),
    FLAG: lambda v: isinstance(v, bool),
}
_SCORES = {"local": NUMBER, "global": NUMBER, "personal": NUMBER}
_COUNTS = {"mean": NUMBER, "max": NUMBER, "counts": [[NUMBER]]}
_DIVERGED = {
    **dict.fromkeys(("clients", "of", "first", "last", "set_aside", "uploads"), NUMBER),
    **dict.fromkeys(("finite", "nothing_learned"), FLAG),
    "why": {ANY: NUMBER},
    "rates": {ANY: NUMBER},
}
_TRAINING = {
    **dict.fromkeys(("rounds", "model_of_round", "gain"), NUMBER),
    "ended": TEXT,
    "rising": FLAG,
    "epochs": {ANY: NUMBER},
}
_CHANCE = {**dict.fromkeys(("worse", "beyond_chance", "better_beyond_chance"), NUMBER), "clients": [TEXT]}
_CHANCE |= {**dict.fromkeys(("estimate", "low", "high", "of"), NUMBER), "same": FLAG}
SUMMARY: dict[str, Any] = {
    **dict.fromkeys(("algorithm", "metric"), TEXT),
    **dict.fromkeys(("seed", "rounds", "clients", "scored", "seconds", "client_steps_per_second"), NUMBER),
    **dict.fromkeys(("bytes_up", "bytes_down", "client_memory", "peak_memory"), NUMBER),
    **dict.fromkeys(("higher_is_better", "deployed"), FLAG),
    "ended": {"reason": TEXT, "of": NUMBER},
    "test": _SCORES,
    "validation": _SCORES,
    "metrics": {ANY: {"higher_is_better": FLAG, "test": _SCORES}},
    "undefined": {ANY: [TEXT]},
    "majority": {ANY: NUMBER},
    "training": _TRAINING,
    "chance": {ANY: _CHANCE},
    "intervals": {},
    "baselines": {ANY: _TRAINING},
    "hurt": {ANY: NUMBER},
    "choice": {ANY: NUMBER},
    "phases": {ANY: NUMBER},
    "clock": {ANY: NUMBER, "staleness": _COUNTS, "delay": _COUNTS},
    "excluded": [TEXT],
    "excluded_why": {ANY: TEXT},
    "byzantine": {"clients": NUMBER, "attack": TEXT, "test": _SCORES, "excluded": [TEXT]},
    "newcomers": {"clients": NUMBER, "scored": NUMBER, "test": _SCORES, "hurt": {ANY: NUMBER}},
    "parameters": {ANY: NUMBER},
    "privacy": {ANY: NUMBER},
    "personal_part": {"names": [TEXT], "parameters": NUMBER, "of": NUMBER},
    "classes": {ANY: {ANY: NUMBER, "test": _SCORES}},
    "diverged": {**_DIVERGED, "baselines": {"local": _DIVERGED, "global": _DIVERGED}},
}
CONFIG: dict[str, Any] = {
    **dict.fromkeys(("what", "loss", "metric"), TEXT),
    "algorithm": {"name": TEXT},
    "settings": {
        **dict.fromkeys(("seed", "rounds", "cohort", "epochs", "batch"), NUMBER),
        "byzantine": [NUMBER],
    },
    "attack": {"name": TEXT},
    "capacity": {"name": TEXT},
    "measures": [{"name": TEXT}],
    "model": {"class": TEXT, "tensors": {ANY: [NUMBER]}},
    "data": {"clients": NUMBER, "fingerprint": TEXT, "source": {}},
    "executor": {"requested": TEXT, "picks": {ANY: {ANY: TEXT}}},
    "versions": {ANY: TEXT},
}


def check_form(path: Path, value: Any, form: Any, name: str = "") -> None:
    """Refuse a value of a JSON file that has another form than a run writes; null is accepted."""
    if value is None:
        return
    if isinstance(form, str):
        if not _LEAVES[form](value):
            raise _refusal(path, name, form)
    elif isinstance(form, list):
        if not isinstance(value, list):
            raise _refusal(path, name, "a list")
        for item in value:
            check_form(path, item, form[0], name)
    else:
        if not isinstance(value, Mapping):
            raise _refusal(path, name, "an object")
        for key, item in value.items():
            if key in form or ANY in form:
                inner = f"{name}.{key}" if name else str(key)
                check_form(path, item, form.get(key, form.get(ANY)), inner)


def _refusal(path: Path, name: str, allowed: str) -> ValueError:
    return check.fail("file", str(path), f"{allowed} as {name or 'its content'}, as a run writes it")
