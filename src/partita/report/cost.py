"""What the runs cost: time, traffic, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from partita.report.histograms import uploads
from partita.report.html import Safe, section, table, tag, tiles
from partita.report.rows import Result, Runs, mean, number, virtual_time
from partita.report.words import (
    MISSING,
    bytes_,
    count,
    rounded,
    seconds,
    share,
    units,
)

Read = Callable[[Result], Any]


def cost(runs: Runs) -> Safe:
    """A line per quantity, a column per label; what no run recorded is left out."""
    lines = [(name, [show(mean(map(read, seeds))) for seeds in runs.values()]) for name, read, show in LINES]
    rows = [[name, *shown] for name, shown in lines if any(x != MISSING for x in shown)]
    if not rows:
        return section("cost", "What it cost", tag("p", "Nothing was recorded."))
    several = any(len(seeds) > 1 for seeds in runs.values())
    note = "Sent: by all clients to the server (up) and back (down); tensors only." + (
        " Means over the seeds." if several else ""
    )
    shown = table(["", *runs], rows) if len(runs) > 1 else tiles(rows)
    return section("cost", "What it cost", shown, tag("p", note, class_="how"))


def visits(run: Result) -> float | None:
    """How often a client took part in a round, all in all; None where stages differ or it is not known."""
    config, facts = run.config, run.summary()
    settings = config.get("settings") or {}
    if (config.get("algorithm") or {}).get("stages"):
        return None
    if counted := uploads(run):
        return counted
    if "rounds" not in facts or "cohort" not in settings:
        return None
    cohort = settings["cohort"] if settings["cohort"] is not None else facts.get("clients")
    found = (number(facts["rounds"]) or 0.0) * (number(cohort) or 0.0)
    return found or None


def _fact(key: str) -> Read:
    return lambda run: run.summary().get(key)


def _per_visit(key: str) -> Read:
    def read(run: Result) -> float | None:
        total, times = number(run.summary().get(key)), visits(run)
        return total / times if total is not None and times else None

    return read


def _phase(name: str) -> Read:
    """The share of a part of the rounds in the time of all of them."""

    def read(run: Result) -> float | None:
        found = run.summary().get("phases") or {}
        total = sum(number(x) or 0.0 for x in found.values())
        return (number(found.get(name)) or 0.0) / total if total else None

    return read


def _parameters(kind: str) -> Read:
    return lambda run: (run.summary().get("parameters") or {}).get(kind)


LINES: list[tuple[str, Read, Callable[[object], str]]] = [
    ("time", _fact("seconds"), seconds),
    ("of that, local steps", _phase("steps"), share),
    ("of that, evaluation", _phase("evaluation"), share),
    ("virtual time", virtual_time, units),
    (
        "client steps per second",
        _fact("client_steps_per_second"),
        rounded,
    ),
    ("sent up", _fact("bytes_up"), bytes_),
    ("sent down", _fact("bytes_down"), bytes_),
    ("up per client and round", _per_visit("bytes_up"), bytes_),
    ("down per client and round", _per_visit("bytes_down"), bytes_),
    ("peak memory", _fact("peak_memory"), bytes_),
    ("memory a client needs", _fact("client_memory"), bytes_),
    ("shared parameters", _parameters("shared"), count),
    ("personal parameters", _parameters("personal"), count),
]
