"""The figures of a bench as plain data: everyone's speed, and the parts of a round of Partita."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

from adapters import PEERS
from adapters.process import Speed
from partita.cli.bench import Row as BenchRow
from partita.report.figures import COLOURS, Figure, Trace, titled
from partita.report.words import share, units

BAR, GAP, FRAME = 19, 20, 110  # pixels: a bar, between workloads, axis and legend
PEER_COLOURS = (1, 2, 3, 5, 6)  # those that are not like ours
ORDER = {"traceorder": "normal"}
LEAST = 0.12  # of a round: a smaller part has no room for a number


@dataclass(frozen=True)
class Row(BenchRow):
    """A line of the bench, with the speeds of other packages."""

    peers: dict[str, Speed] = field(default_factory=dict)


class Bench(NamedTuple):
    """Rows, the machine they were measured on, and what the loop beside them is called."""

    rows: Sequence[Row]
    machine: str
    reference: str


def others(bench: Bench) -> list[str]:
    """Return what Partita is compared with: the loop, then the peers that have done any of the work."""
    peers = dict.fromkeys(name for row in bench.rows for name, speed in row.peers.items() if speed.steps)
    return [bench.reference, *peers]


def steps(row: Row, name: str) -> float | None:
    """Return the client steps per second of Partita, of a peer, or of the loop."""
    if name == "partita":
        return row.partita
    if name in PEERS:
        return row.peers[name].steps if name in row.peers else None
    return row.textbook


def speeds(bench: Bench) -> Figure:
    """Draw a group of bars for each row: the loop, the peers, Partita."""
    rows, names = bench.rows, [*others(bench), "partita"]
    traces = [_bars(rows, name, _colour(i, names)) for i, name in enumerate(names)]
    values = [x for trace in traces for x in trace["x"] if x]
    layout = {
        "barmode": "group",
        "bargap": GAP / (len(names) * BAR + GAP),
        "xaxis": {**titled("client steps per second"), **_logarithmic(min(values), max(values))},
        "yaxis": _categories(rows),
        "legend": ORDER,
    }
    return {"data": traces, "layout": layout}


def height(rows: Sequence[Row], bars: int) -> int:
    """Return the height in pixels of a figure with this many bars for each row."""
    return FRAME + len(rows) * (bars * BAR + GAP)


def phases(rows: Sequence[Row]) -> Figure | None:
    """Draw a bar for each row, in parts; None where no parts were measured."""
    names = list(dict.fromkeys(name for row in rows for name in row.phases))
    if not names:
        return None
    names.sort(key=lambda name: name != "steps")  # local training first
    layout = {
        "barmode": "stack",
        "bargap": GAP / (2 * BAR + GAP),
        "xaxis": {
            **titled("share of a round of Partita"),
            "range": [0, 1.3],
            "tickvals": [0, 0.25, 0.5, 0.75, 1],
            "tickformat": ".0%",
        },
        "yaxis": _categories(rows),
        "annotations": [_overhead(row) for row in rows],
        "legend": ORDER,
    }
    return {"data": [_parts(rows, name, i) for i, name in enumerate(names)], "layout": layout}


def _logarithmic(low: float, high: float) -> dict[str, Any]:
    """Return an axis that shows the shortest bar, and the number behind the longest."""
    first, last = math.log10(low), math.log10(high)
    span = max(last - first, 0.5)
    digits = (1,) if span > 1.5 else (1, 2, 5)
    values = [d * 10.0**e for e in range(math.floor(first) - 1, math.ceil(last) + 1) for d in digits]
    start = first - max(0.25 * span, 0.5)
    ticks = [x for x in values if start <= math.log10(x) <= last + 0.1 * span]
    return {
        "type": "log",
        "range": [start, last + 0.4 * span],
        "tickvals": ticks,
        "ticktext": [f"{x:,g}" for x in ticks],
    }


def _bars(rows: Sequence[Row], name: str, colour: str) -> Trace:
    values = [steps(row, name) for row in rows]
    label = PEERS[name].label if name in PEERS else "Partita" if name == "partita" else name
    return {
        "type": "bar",
        "orientation": "h",
        "name": escape(label),
        "x": values,
        "y": [escape(row.name) for row in rows],
        "text": [_number(row, x, name) for row, x in zip(rows, values)],
        "textposition": "outside",
        "textfont": {"size": 12},
        "cliponaxis": False,
        "marker": {"color": colour},
        "hovertemplate": f"{escape(label)}<br>%{{y}}: %{{text}}<extra></extra>",
    }


def _number(row: Row, value: float | None, name: str) -> str:
    """Return the number behind a bar: '3,801', or '21,200 · 5.6×'."""
    if not value:
        return ""
    if name not in (*PEERS, "partita"):
        return units(value)
    text = f"{units(value)} · {times(value / row.textbook)}"
    return f"<b>{text}</b>" if name == "partita" else text


def times(ratio: float) -> str:
    """Return a ratio with two digits or so: '12×', '5.6×' or '0.07×'."""
    digits = 0 if ratio >= 9.95 else 1 if ratio >= 0.95 else 2
    return f"{ratio:,.{digits}f}×"


def _parts(rows: Sequence[Row], name: str, i: int) -> Trace:
    shares = [row.phases.get(name, 0.0) for row in rows]
    return {
        "type": "bar",
        "orientation": "h",
        "name": escape(name),
        "x": shares,
        "y": [escape(row.name) for row in rows],
        "text": [share(x) if x >= LEAST else "" for x in shares],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "textfont": {"size": 12, "color": "@panel"},
        "marker": {"color": f"@{i % COLOURS}"},
        "hovertemplate": f"{escape(name)}<br>%{{y}}: %{{x:.1%}}<extra></extra>",
    }


def _overhead(row: Row) -> dict[str, Any]:
    """Say behind a bar how much is not local training: it is often too little to see."""
    text = f"{share(row.overhead)} overhead" if row.phases else ""
    return {
        "x": 1.01,
        "y": escape(row.name),
        "text": text,
        "xanchor": "left",
        "showarrow": False,
        "font": {"size": 12},
    }


def _categories(rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "type": "category",
        "categoryarray": [escape(row.name) for row in rows],
        "autorange": "reversed",
        "ticksuffix": " ",
        "showgrid": False,
        "title": {"text": ""},
    }


def _colour(i: int, names: Sequence[str]) -> str:
    """Return grey for the loop, the first colour for Partita."""
    return (
        "@equal"
        if i == 0
        else "@0"
        if i == len(names) - 1
        else f"@{PEER_COLOURS[(i - 1) % len(PEER_COLOURS)]}"
    )
