"""What the runs cost: time, traffic, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from partita.engine.record import Record, lookup, mean, number
from partita.report.histograms import uploads
from partita.report.html import Safe, note, section, table, tag, tiles
from partita.report.rows import Runs, several_seeds
from partita.report.words import MISSING, bytes_, count, precise, rounded, seconds, share, units

Read = Callable[[Record], Any]


def cost(runs: Runs) -> Safe:
    """Return a line per quantity, a column per label; what no run recorded is left out."""
    lines = [(name, [show(mean(map(read, seeds))) for seeds in runs.values()]) for name, read, show in LINES]
    lines = [(name, cells) for name, cells in lines if any(cell != MISSING for cell in cells)]
    if not lines:
        return section("cost", "What it cost", tag("p", "Nothing was recorded."))
    if len(runs) > 1:
        body = table(["", *runs], [[name, *cells] for name, cells in lines])
    else:
        body = tiles((name, cell) for name, [cell] in lines)
    words = "Sent: by all clients to the server (up) and back (down); tensors only."
    words += " Means over the seeds." if several_seeds(runs) else ""
    return section("cost", "What it cost", body, note(words))


def visits(run: Record) -> float | None:
    """Return how often clients took part in a round, in all; None where stages differ or it is not known."""
    if lookup(run.config, "algorithm", "stages"):
        return None
    settings = run.config.get("settings") or {}
    if "rounds" not in run.facts or "cohort" not in settings:
        return uploads(run) or None
    cohort = settings["cohort"] if settings["cohort"] is not None else run.facts.get("clients")
    return uploads(run) or (number(run.facts["rounds"]) or 0.0) * (number(cohort) or 0.0) or None


def _fact(*keys: str) -> Read:
    return lambda run: lookup(run.facts, *keys)


def _per_visit(key: str) -> Read:
    def read(run: Record) -> float | None:
        total, times = number(run.facts.get(key)), visits(run)
        return total / times if total is not None and times else None

    return read


def _phase(name: str) -> Read:
    """Read the share of a part of the rounds in the time of all of them."""

    def read(run: Record) -> float | None:
        phases = run.facts.get("phases") or {}
        total = sum(number(x) or 0.0 for x in phases.values())
        return (number(phases.get(name)) or 0.0) / total if total else None

    return read


LINES: list[tuple[str, Read, Callable[[object], str]]] = [
    ("time", _fact("seconds"), seconds),
    ("of that, local steps", _phase("steps"), share),
    ("of that, evaluation", _phase("evaluation"), share),
    ("virtual time", lambda run: run.facts.virtual_time, units),
    ("client steps per second", _fact("client_steps_per_second"), rounded),
    ("sent up", _fact("bytes_up"), bytes_),
    ("sent down", _fact("bytes_down"), bytes_),
    ("up per client and round", _per_visit("bytes_up"), bytes_),
    ("down per client and round", _per_visit("bytes_down"), bytes_),
    ("peak memory", _fact("peak_memory"), bytes_),
    ("memory a client needs", _fact("client_memory"), bytes_),
    ("privacy ε of each client", _fact("privacy", "epsilon"), precise),
    ("with probability 1 − δ, δ =", _fact("privacy", "delta"), precise),
    ("noise, in units of the clip", _fact("privacy", "noise"), precise),
    ("shared parameters", _fact("parameters", "shared"), count),
    ("personal parameters", _fact("parameters", "personal"), count),
]
