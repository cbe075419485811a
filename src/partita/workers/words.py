"""Workers as they are written on a command line: 4, ray:4, ray:auto, ray:4@host:6379."""

from __future__ import annotations

from typing import Any

from partita.core import check
from partita.workers.processes import Processes
from partita.workers.ray_cluster import RayCluster

Workers = Processes | RayCluster
ALLOWED = "a number of processes such as 4, 'ray:4', 'ray:auto', 'ray:4@HOST:PORT', or partita.workers.ray(4)"


def requested(field: str, value: Any) -> Workers | None:
    """Return the workers that a number, a word or a part of `partita.workers` asks for; None for none."""
    if value is None or isinstance(value, Workers):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise check.fail(field, value, ALLOWED)
        return Processes(value)
    if not isinstance(value, str):
        raise check.fail(field, value, ALLOWED)
    if value.isdecimal():
        return requested(field, int(value))
    kind, _, rest = value.partition(":")
    count, _, address = rest.partition("@")
    if kind != "ray" or not (count == "auto" or (count.isdecimal() and int(count) > 0)):
        raise check.fail(field, value, ALLOWED)
    if count == "auto":  # a cluster that is there already
        return RayCluster(None, address=address or "auto")
    return RayCluster(int(count), address=address or None)
