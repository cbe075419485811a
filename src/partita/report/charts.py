"""The charts of a study, laid out as the figures of a paper: panels side by side, with the same axes.

A recipe says what is drawn; the page gives it colours. The same name has the same colour in all panels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


class Series(NamedTuple):
    """What one name stands for in a panel.

    x       places; a violin has none
    y       values; of a violin all that it shows the distribution of
    spread  one standard deviation at each place: a band around a line, whiskers on a bar
    kind    'line', 'points', 'bar' or 'violin'
    """

    name: str
    x: Sequence[Any]
    y: Sequence[float | None]
    spread: Sequence[float] = ()
    kind: str = "line"


class Panel(NamedTuple):
    """A pair of axes: their titles, what is drawn, and which of them is logarithmic: '', 'x', 'y' or 'xy'."""

    title: str
    x: str
    y: str
    series: Sequence[Series]
    log: str = ""


class Chart(NamedTuple):
    """A figure of a paper, with its panels side by side; `note` says how to read it."""

    title: str
    panels: Sequence[Panel]
    note: str = ""


def as_chart(title: str, panels: Sequence[Sequence[Any]], note: str = "") -> Chart:
    """Return a chart from the lists that JSON makes of it."""
    return Chart(
        title, [Panel(t, x, y, [Series(*s) for s in rows], log) for t, x, y, rows, log in panels], note
    )


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
    for number_, chart in enumerate(drawn):
        names = list(dict.fromkeys(s.name for panel in chart.panels for s in panel.series))
        cells = list[Safe]()
        for i, panel in enumerate(chart.panels):
            name, made = f"chart-{number_ + 1}-{i + 1}", _figure(panel, names)
            if made is not None:
                figures[name] = made
                head = tag("h3", panel.title) if panel.title else None
                cells.append(tag("div", head, figure(name, panel.title or chart.title)))
        if cells:
            words = [note(line) for line in chart.note.split("\n") if line.strip()]
            sections.append(section(f"chart-{number_ + 1}", chart.title, grid(cells), *words))
    return figures, sections


def _figure(panel: Panel, names: Sequence[str]) -> Figure | None:
    """Return the panel; None where it has nothing to draw."""
    traces = [trace for s in panel.series for trace in _traces(s, names.index(s.name), panel.log)]
    if not traces:
        return None
    layout: dict[str, Any] = {"hovermode": "closest"}
    for axis, title in (("x", panel.x), ("y", panel.y)):
        layout[f"{axis}axis"] = draw.titled(title)
        if axis == "y" and axis not in panel.log:
            layout["yaxis"] |= {"zeroline": True}  # what gains is above it
        if axis in panel.log:
            layout[f"{axis}axis"] |= {"type": "log", "exponentformat": "power", "nticks": TICKS}
    if any(trace["type"] == "bar" for trace in traces):
        layout["barmode"] = "group"
    return {"data": traces, "layout": layout}


def _traces(series: Series, place: int, log: str) -> list[Trace]:
    """Return what plotly draws of a series: nothing of values that are none, or that its axis cannot show."""
    colour, dash = draw.colour(place), draw.dash(place)
    name = escape(shorten(series.name, draw.LONGEST_NAME))
    if series.kind == "violin":
        values = np.array([v for v in map(number, series.y) if v is not None])
        shape = draw.violin(name, values[draw.sample(np.arange(len(values)))], colour) if len(values) else {}
        return [{**shape, "showlegend": False}] if shape else []
    spread = series.spread or [0.0] * len(series.y)
    points = [
        (x, value, number(width) or 0.0)
        for x, y, width in zip(series.x, series.y, spread, strict=True)
        if (value := number(y)) is not None and not _out_of_range(x, value, log)
    ]
    if not points:
        return []
    x, y, width = (list(column) for column in zip(*points))
    hover = f"{name}<br>%{{x}}: %{{y:.4~g}}<extra></extra>"
    group = {"name": name, "legendgroup": name, "x": x, "hovertemplate": hover}
    if series.kind == "bar":
        whiskers = {"error_y": {"type": "data", "array": width, "thickness": 1.2}} if any(width) else {}
        return [{"type": "bar", **group, "y": y, "marker": {"color": f"@{colour}"}, **whiskers}]
    if series.kind == "points":
        marker = {"color": f"@{colour}", "size": 6 if len(x) > 200 else 8, "opacity": 0.75}
        return [{"type": "scatter", "mode": "markers", **group, "y": y, "marker": marker}]
    line = {**draw.line(series.name, colour, dash), **group, "y": y}
    line |= {"mode": "lines+markers" if len(x) <= MARKED else "lines"}
    return [*_band(x, y, width, name, colour, log), line]


def _band(
    x: Sequence[Any], y: Sequence[float], width: Sequence[float], name: str, colour: str, log: str
) -> list[Trace]:
    if not any(width):
        return []
    least = min(y) / 10 if "y" in log else -math.inf  # a log scale has no place for what is not above zero
    edge: Trace = {"type": "scatter", "mode": "lines", "line": {"width": 0}, "x": x, "legendgroup": name}
    edge |= {"hoverinfo": "skip", "showlegend": False}
    fill = {"fill": "tonexty", "fillcolor": f"@{colour}/0.16"}
    return [
        {**edge, "y": [max(v - w, least) for v, w in zip(y, width)]},
        {**edge, "y": [v + w for v, w in zip(y, width)], **fill},
    ]


def _out_of_range(x: Any, y: float, log: str) -> bool:
    return ("y" in log and y <= 0) or ("x" in log and not isinstance(x, str) and x <= 0)
