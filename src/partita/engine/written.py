"""What the files of a run hold, by name: a file whose values are of another kind is refused where it is read.

Names that are not known, and values that are not there, are left alone: older and newer runs have others.
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
SUMMARY: dict[str, Any] = {
    **dict.fromkeys(("algorithm", "metric"), TEXT),
    **dict.fromkeys(("seed", "rounds", "clients", "scored", "seconds", "client_steps_per_second"), NUMBER),
    **dict.fromkeys(("bytes_up", "bytes_down", "client_memory", "peak_memory"), NUMBER),
    "higher_is_better": FLAG,
    "test": _SCORES,
    "hurt": {ANY: NUMBER},
    "phases": {ANY: NUMBER},
    "clock": {ANY: NUMBER, "staleness": _COUNTS, "delay": _COUNTS},
    "excluded": [TEXT],
    "excluded_why": {ANY: TEXT},
    "byzantine": {"clients": NUMBER, "attack": TEXT, "test": _SCORES, "excluded": [TEXT]},
    "parameters": {ANY: NUMBER},
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


def check_form(path: Path, found: Any, form: Any, name: str = "") -> None:
    """A value of a JSON file is what a run writes: an object, a list, a number or a text; or nothing."""
    if found is None:
        return
    if isinstance(form, str):
        if not _LEAVES[form](found):
            raise _refusal(path, name, form)
    elif isinstance(form, list):
        if not isinstance(found, list):
            raise _refusal(path, name, "a list")
        for each in found:
            check_form(path, each, form[0], name)
    else:
        if not isinstance(found, Mapping):
            raise _refusal(path, name, "an object")
        for key, value in found.items():
            if key in form or ANY in form:
                inner = f"{name}.{key}" if name else str(key)
                check_form(path, value, form.get(key, form.get(ANY)), inner)


def _refusal(path: Path, name: str, allowed: str) -> ValueError:
    return check.fail("file", str(path), f"{allowed} as {name or 'its content'}, as a run writes it")
