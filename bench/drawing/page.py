"""The page of a bench, in the style of a report."""

from __future__ import annotations

from collections.abc import Sequence

from adapters import PEERS
from drawing import figures as draw
from drawing.figures import Bench, Row
from partita.cli.bench import WORKLOADS
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
    "its ratio to that of the grey bar. All have done the same work in turn on the same machine."
)
PHASES = (
    "The parts of a round of Partita. Local training (steps) has the first colour; the rest, which is the "
    "number behind the bar, is overhead."
)


def page(bench: Bench) -> str:
    """Return the page: speeds, the parts of a round, and what was measured."""
    figures = kept({"speeds": draw.speeds(bench), "phases": draw.phases(bench.rows)})
    return document(f"Partita bench, {bench.machine}", body(bench), figures)


def body(bench: Bench) -> Safe:
    """Return everything between the head and the foot."""
    top = tag(
        "header",
        tag("p", "Partita bench", tag("span", " · ", bench.machine), class_="eyebrow"),
        tag("h1", verdict(bench)),
    )
    bars = len(draw.others(bench)) + 1
    speeds = section(
        "speeds",
        "Whole rounds",
        figure("speeds", "client steps per second of each", draw.height(bench.rows, bars)),
        *(tag("p", f"No bar for {line}.", class_="how") for line in failures(bench.rows)),
        how(SPEEDS),
    )
    return join([top, speeds, _parts(bench.rows), _measured(bench.rows)])


def verdict(bench: Bench) -> str:
    """Say in one sentence how many times as fast as the loop Partita is."""
    low, high = (draw.times(f(row.ratio for row in bench.rows)).strip("×") for f in (min, max))
    ratio = low if low == high else f"{low} to {high}"
    return f"Rounds are {ratio} times as fast as those of the {bench.reference}"


def _parts(rows: Sequence[Row]) -> Safe | None:
    if not any(row.phases for row in rows):
        return None
    drawn = figure("phases", "the parts of a round", draw.height(rows, 2))
    return section("phases", "Where the time goes", drawn, how(PHASES))


def failures(rows: Sequence[Row]) -> list[str]:
    """Say which peers have no bar, and their errors."""
    return [
        f"{PEERS[name].label} on {row.name}: {speed.error}"
        for row in rows
        for name, speed in row.peers.items()
        if speed.error is not None
    ]


def _measured(rows: Sequence[Row]) -> Safe:
    head = ["", "model", "executor", "steps per second", "ratio", "overhead", "of peak"]
    lines = [
        [
            row.name,
            WORKLOADS[row.name].about if row.name in WORKLOADS else MISSING,
            row.executor,
            units(row.partita),
            draw.times(row.ratio),
            share(row.overhead),
            share(row.share),
        ]
        for row in rows
    ]
    return section("measured", "What was measured", table(head, lines, words=(0, 1, 2)))
