"""Workers as they are written on a command line: 4, ray:4, ray:auto, ray:4@host:6379, ray(4, threads=2)."""

from __future__ import annotations

import ast
from typing import Any

from partita.core import check
from partita.workers.processes import Processes
from partita.workers.ray_cluster import RayCluster

Workers = Processes | RayCluster
CALLS = {"processes": Processes, "ray": RayCluster}
ALLOWED = (
    "a number of processes such as 4, 'ray:4', 'ray:auto', 'ray:4@HOST:PORT', or a call such as "
    "'ray(4, threads=2)'"
)


def requested(field: str, value: Any) -> Workers | None:
    """Return the workers that a number, a word or a part of `partita.workers` asks for; None for none."""
    if value is None or isinstance(value, Workers):
        return value
    if isinstance(value, str):
        return _written(field, value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise check.fail(field, value, ALLOWED)
    return _made(field, Processes, (value,), {})


def _written(field: str, text: str) -> Workers:
    kind, _, rest = text.partition(":")
    count, _, address = rest.partition("@")
    if text.isdecimal() and int(text):
        return _made(field, Processes, (int(text),), {})
    if kind == "ray" and count == "auto":  # a cluster that is there already
        return RayCluster(None, address=address or "auto")
    if kind == "ray" and count.isdecimal() and int(count):
        return _made(field, RayCluster, (int(count),), {"address": address or None})
    return _called(field, text)


def _called(field: str, text: str) -> Workers:
    """Return the workers of a call whose arguments are plain values; nothing else is ever called."""
    try:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call)
        assert isinstance(call.func, ast.Name)
        make = CALLS[call.func.id]
        arguments = tuple(ast.literal_eval(argument) for argument in call.args)
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (AssertionError, KeyError, SyntaxError, ValueError, RecursionError, MemoryError):
        raise check.fail(field, text, ALLOWED) from None
    return _made(field, make, arguments, named)


def _made(field: str, make: type[Workers], arguments: tuple[Any, ...], named: dict[str, Any]) -> Workers:
    try:
        return make(*arguments, **named)
    except check.Refused as error:
        raise error.within(field) from None
