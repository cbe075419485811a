"""The charts of a study, laid out as the figures of a paper: panels side by side, to be compared.

A recipe says what is drawn; the page gives it colours. In all panels of a chart the same name has the same
colour, and vertical axes of the same title have the same range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np

from partita.engine.record import Record, number
from partita.report import figures as draw
from partita.report.figures import Figure, Read, Trace
from partita.report.html import Safe, figure, grid, note, section, tag
from partita.report.words import shorten

KINDS = ("line", "points", "bar", "violin")
MARKED = 40  # a line of so many points needs no marks on them
TICKS = 6  # of a logarithmic axis
ROOM = 0.05  # of a range, above and below it


class Series(NamedTuple):
    """What one name stands for in a panel.

    x       places; a violin has none
    y       values; of a violin all that it shows the distribution of
    spread  one standard deviation at each place, or how far it goes below and above: a band around a line,
            whiskers on a bar
    kind    'line', 'points', 'bar' or 'violin'
    """

    name: str
    x: Sequence[Any]
    y: Sequence[float | None]
    spread: Sequence[float | Sequence[float]] = ()
    kind: str = "line"


class Panel(NamedTuple):
    """A pair of axes: their titles, what is drawn, and which of them is logarithmic: '', 'x', 'y' or 'xy'."""

    title: str
    x: str
    y: str
    series: Sequence[Series]
    log: str = ""


class Chart(NamedTuple):
    """A figure of a paper, with its panels side by side; `note` says how to read it.

    `columns` is how many panels stand in a row where there is room; 0: as many as fit.
    """

    title: str
    panels: Sequence[Panel]
    note: str = ""
    columns: int = 0


def as_chart(title: str, panels: Sequence[Sequence[Any]], note: str = "", columns: int = 0) -> Chart:
    """Return a chart from the lists that JSON makes of it."""
    read = [Panel(name, x, y, [Series(*s) for s in series], log) for name, x, y, series, log in panels]
    return Chart(title, read, note, columns)


def curve(name: str, seeds: Sequence[Record], read: Read, along: str = "round", scale: float = 1.0) -> Series:
    """Return a quantity over the rounds, the seconds or the virtual time of a run: its mean over the seeds.

    `read` takes a row of metrics and returns the number, or None where the row has none.
    """
    rows = [row for row in draw.series(seeds, read, along) if row[along] is not None]
    spread = [scale * row["std"] for row in rows]
    return Series(
        name,
        [row[along] for row in rows],
        [scale * row["mean"] for row in rows],
        spread if any(spread) else (),
    )


def charts(drawn: Sequence[Chart]) -> tuple[dict[str, Figure], list[Safe]]:
    """Return the figures by name, and a section for each chart that has something to draw."""
    figures: dict[str, Figure] = {}
    sections = list[Safe]()
    for i, chart in enumerate(drawn):
        names = list(dict.fromkeys(s.name for panel in chart.panels for s in panel.series))
        ranges, cells = _ranges(chart.panels), list[Safe]()
        for k, panel in enumerate(chart.panels):
            name, made = f"chart-{i + 1}-{k + 1}", _figure(panel, names, ranges)
            if made is not None:
                figures[name] = made
                head = tag("h3", panel.title) if panel.title else None
                cells.append(tag("div", head, figure(name, panel.title or chart.title)))
        if cells:
            words = [note(line) for line in chart.note.split("\n") if line.strip()]
            sections.append(section(f"chart-{i + 1}", chart.title, grid(cells, chart.columns), *words))
    return figures, sections


def _ranges(panels: Sequence[Panel]) -> dict[tuple[str, bool], list[float]]:
    """Return the range of the vertical axes, by their title and whether they are logarithmic."""
    values: dict[tuple[str, bool], list[float]] = {}
    for panel in panels:
        key = (panel.y, "y" in panel.log)
        for series in panel.series:
            for y, (below, above) in zip(series.y, _spreads(series)):
                if (value := number(y)) is not None and (value > 0 or not key[1]):
                    least = max(value - below, value / 10) if key[1] else value - below
                    values.setdefault(key, []).extend((least, value + above))
            if series.kind == "bar":
                values.setdefault(key, []).append(1.0 if key[1] else 0.0)
    ranges = {}
    for key, found in values.items():
        low, high = (math.log10(x) if key[1] else x for x in (min(found), max(found)))
        room = ROOM * (high - low) or ROOM * abs(high) or ROOM
        ranges[key] = [low - room * (low != 0), high + room]
    return ranges


def _figure(
    panel: Panel, names: Sequence[str], ranges: Mapping[tuple[str, bool], Sequence[float]]
) -> Figure | None:
    """Return the panel; None where it has nothing to draw."""
    traces = [trace for s in panel.series for trace in _traces(s, names.index(s.name), panel.log)]
    if not traces:
        return None
    layout: dict[str, Any] = {"hovermode": "closest", "showlegend": len(panel.series) > 1}
    for axis, title in (("x", panel.x), ("y", panel.y)):
        layout[f"{axis}axis"] = draw.titled(title)
        if axis in panel.log:
            layout[f"{axis}axis"] |= {"type": "log", "exponentformat": "power", "nticks": TICKS}
    if "y" not in panel.log:
        layout["yaxis"] |= {"zeroline": True}  # what gains is above it
    layout["yaxis"] |= {"range": list(ranges[panel.y, "y" in panel.log])}
    if any(isinstance(x, str) for s in panel.series for x in s.x):  # '10' is a name too, and no number
        layout["xaxis"] |= {"type": "category"}
    if any(trace["type"] == "bar" for trace in traces):
        layout["barmode"] = "group"
    return {"data": traces, "layout": layout}


def _spreads(series: Series) -> list[tuple[float, float]]:
    """Return how far each value may lie below and above."""
    pairs = [s if isinstance(s, Sequence) else (s, s) for s in series.spread or [0.0] * len(series.y)]
    return [(number(below) or 0.0, number(above) or 0.0) for below, above in pairs]


def _traces(series: Series, place: int, log: str) -> list[Trace]:
    """Return what plotly draws of a series: nothing of values that are none, or that its axis cannot show."""
    colour, dash = draw.colour(place), draw.dash(place)
    name = escape(shorten(series.name, draw.LONGEST_NAME))
    if series.kind == "violin":
        values = np.array([v for v in map(number, series.y) if v is not None])
        shape = draw.violin(name, values[draw.sample(np.arange(len(values)))], colour) if len(values) else {}
        return [{**shape, "showlegend": False}] if shape else []
    points = [
        (x, value, *pair)
        for x, y, pair in zip(series.x, series.y, _spreads(series), strict=True)
        if (value := number(y)) is not None and not _out_of_range(x, value, log)
    ]
    if not points:
        return []
    x, y, below, above = (list(column) for column in zip(*points))
    hover = f"{name}<br>%{{x}}: %{{y:.4~g}}<extra></extra>"
    group = {"name": name, "legendgroup": name, "x": x, "hovertemplate": hover}
    if series.kind == "bar":
        error = {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1.2}
        whiskers = {"error_y": error} if any(above) or any(below) else {}
        return [{"type": "bar", **group, "y": y, "marker": {"color": f"@{colour}"}, **whiskers}]
    if series.kind == "points":
        marker = {"color": f"@{colour}", "size": 6 if len(x) > 200 else 8, "opacity": 0.75}
        return [{"type": "scatter", "mode": "markers", **group, "y": y, "marker": marker}]
    line = {**draw.line(series.name, colour, dash), **group, "y": y}
    line |= {"mode": "lines+markers" if len(x) <= MARKED else "lines"}
    lowest = min(y) / 10 if "y" in log else -math.inf  # a log scale has no place for what is not above zero
    low, high = [max(v - b, lowest) for v, b in zip(y, below)], [v + a for v, a in zip(y, above)]
    return [*(_band(x, low, high, name, colour) if any(below) or any(above) else []), line]


def _band(
    x: Sequence[Any], low: Sequence[float], high: Sequence[float], name: str, colour: str
) -> list[Trace]:
    edge: Trace = {"type": "scatter", "mode": "lines", "line": {"width": 0}, "x": x, "legendgroup": name}
    edge |= {"hoverinfo": "skip", "showlegend": False}
    return [{**edge, "y": low}, {**edge, "y": high, "fill": "tonexty", "fillcolor": f"@{colour}/0.16"}]


def _out_of_range(x: Any, y: float, log: str) -> bool:
    return ("y" in log and y <= 0) or ("x" in log and not isinstance(x, str) and x <= 0)
