"""The page of a bench, in the dress of a report."""

from __future__ import annotations

from collections.abc import Sequence

from partita.cli.bench import figures as draw
from partita.cli.bench.compare import Row
from partita.cli.bench.peers import PEERS
from partita.cli.bench.workloads import WORKLOADS
from partita.report.figures import kept
from partita.report.html import (
    Safe,
    figure,
    how,
    join,
    section,
    table,
    tag,
)
from partita.report.page import document
from partita.report.words import MISSING, share, units

SPEEDS = (
    "A bar is the median round in client steps per second; the axis is logarithmic. Behind it the speed, and "
    "how many times that of the grey bar it is. All have done the same work in turn on the same machine."
)
PHASES = (
    "What a round of Partita is made of. Local training (steps) is the first colour; the rest, and the "
    "number behind the bar, is the price of everything around it."
)


def page(rows: Sequence[Row], machine: str, other: str) -> str:
    """Speeds, the parts of a round, and what was measured."""
    shown = kept({"speeds": draw.speeds(rows, other), "phases": draw.phases(rows)})
    return document(f"Partita bench, {machine}", body(rows, machine, other), shown)


def body(rows: Sequence[Row], machine: str, other: str) -> Safe:
    """Everything between the head and the foot."""
    top = tag(
        "header",
        tag("p", "Partita bench", tag("span", " · ", machine), class_="eyebrow"),
        tag("h1", verdict(rows, other)),
    )
    bars = len(draw.others(rows, other)) + 1
    fast = section(
        "speeds",
        "Whole rounds",
        figure("speeds", "client steps per second of each", draw.height(rows, bars)),
        *(tag("p", f"No bar for {line}.", class_="how") for line in failures(rows)),
        how(SPEEDS),
    )
    return join([top, fast, _parts(rows), _measured(rows)])


def verdict(rows: Sequence[Row], other: str) -> str:
    """One sentence: how many times as fast as the loop."""
    low, high = (draw.times(f(row.ratio for row in rows)).strip("×") for f in (min, max))
    found = low if low == high else f"{low} to {high}"
    return f"Rounds are {found} times as fast as those of the {other}"


def _parts(rows: Sequence[Row]) -> Safe | None:
    if not any(row.phases for row in rows):
        return None
    drawn = figure("phases", "the parts of a round", draw.height(rows, 2))
    return section("phases", "Where the time goes", drawn, how(PHASES))


def failures(rows: Sequence[Row]) -> list[str]:
    """Who has no bar, and why."""
    return [
        f"{PEERS[name].about} on {row.name}: {speed.error}"
        for row in rows
        for name, speed in row.peers.items()
        if speed.error is not None
    ]


def _measured(rows: Sequence[Row]) -> Safe:
    head = ["", "model", "executor", "steps per second", "ratio", "around steps", "of peak"]
    lines = [
        [
            row.name,
            WORKLOADS[row.name].about if row.name in WORKLOADS else MISSING,
            row.executor,
            units(row.partita),
            draw.times(row.ratio),
            share(1.0 - row.phases.get("steps", 0.0)),
            share(row.share),
        ]
        for row in rows
    ]
    return section("measured", "What was measured", table(head, lines, words=(0, 1, 2)))
