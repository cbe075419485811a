"""The figures as plain data for plotly.js; script.js gives them the page's colours and draws them.

A colour is the name of one in style.css: "@gain", "@0", with a share of opacity "@0/0.2". A trace with
`when={"axis": "seconds"}` is drawn while that choice is made, and so are the `layouts` of a figure.
All text that comes from users is escaped here, because plotly reads its texts as a kind of HTML.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from partita.engine.record import Record, lookup, mean, number, spread
from partita.report.rows import NAMES, Averages, Row, Runs, federated, first, references
from partita.report.words import count, score, shorten, signed

Figure = dict[str, Any]
Trace = dict[str, Any]
Read = Callable[[Row], object]
"""Reads a value from a row of metrics."""

AXES = ("round", "seconds")
COLOURS, MOST_POINTS, LONGEST_NAME = 8, 5000, 60
DASHES = ("solid", "dash", "dot", "dashdot")
GAIN_AXIS = {"title": {"text": "change, up is better"}, "zeroline": True, "tickformat": ".3~f"}
HOVER = (
    "<b>%{customdata[0]}</b><br>%{customdata[1]} training samples"
    "<br>alone %{customdata[2]}<br>global %{customdata[3]}<br>personal %{customdata[4]}"
    "<br>change %{customdata[5]}<extra></extra>"
)


# ---- pieces


def titled(title: str) -> dict[str, Any]:
    """Return an axis with a title."""
    return {"title": {"text": escape(title)}}


def colour(i: int) -> str:
    """Return the name of the i-th label's colour."""
    return str(i % COLOURS)


def dash(i: int) -> str:
    """Return the i-th label's line: beyond the number of colours they repeat with another line."""
    return DASHES[(i // COLOURS) % len(DASHES)] if i >= COLOURS else "solid"


def short(values: np.ndarray) -> list[float]:
    """Return numbers with six digits: enough for any screen, and a page of thousands of them stays small."""
    return [float(f"{value:.6g}") for value in values.tolist()]


def kept(figures: Mapping[str, Figure | None]) -> dict[str, Figure]:
    """Return the figures that have something to draw."""
    return {name: figure for name, figure in figures.items() if figure is not None}


def overlay(traces: Sequence[Trace], xaxis: Mapping[str, Any], yaxis: Mapping[str, Any]) -> Figure:
    """Return lines over each other, whose values at one place are shown together."""
    return {"data": traces, "layout": {"hovermode": "x unified", "xaxis": xaxis, "yaxis": yaxis}}


def line(name: str, colour: str, dash: str, digits: str = ".4f") -> Trace:
    """Return a line with points on it, without their places."""
    name = escape(shorten(name, LONGEST_NAME))
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "line": {"color": f"@{colour}", "width": 2.5, "dash": dash},
        "marker": {"size": 5},
        "hovertemplate": f"{name}: %{{y:{digits}}}<extra></extra>",
    }


def band(
    series: Sequence[Row],
    name: str,
    colour: str,
    dash: str,
    digits: str = ".4f",
    axes: Sequence[str] = AXES,
) -> list[Trace]:
    """Return a line against each axis, to choose from if they are several; with a band where seeds differ."""
    traces = list[Trace]()
    for axis in axes:
        rows = [row for row in series if row[axis] is not None]
        if not rows:
            continue
        place: Trace = {"x": [row[axis] for row in rows], "legendgroup": escape(name), **_when(axis, axes)}
        if any(row["std"] for row in rows):
            edge: Trace = {**place, "type": "scatter", "mode": "lines", "line": {"width": 0}}
            edge |= {"hoverinfo": "skip", "showlegend": False}
            fill = {"fill": "tonexty", "fillcolor": f"@{colour}/0.16"}
            traces.append({**edge, "y": [row["mean"] - row["std"] for row in rows]})
            traces.append({**edge, "y": [row["mean"] + row["std"] for row in rows], **fill})
        traces.append({**line(name, colour, dash, digits), **place, "y": [row["mean"] for row in rows]})
    return traces


def bands(
    runs: Runs,
    read: Read,
    name: str,
    digits: str = ".4f",
    axes: Sequence[str] = AXES,
    only: Runs | None = None,
) -> list[Trace]:
    """Return a line for each label (of `only` these); `name` is that of the line where there is one label."""
    traces = list[Trace]()
    for i, (label, seeds) in enumerate(runs.items()):
        if only is None or label in only:
            rows = series(seeds, read, axes[0])
            traces += band(rows, label if len(runs) > 1 else name, colour(i), dash(i), digits, axes)
    return traces


def _when(axis: str, axes: Sequence[str]) -> dict[str, Any]:
    return {"when": {"axis": axis}} if len(axes) > 1 else {}


# ---- a quantity over the rounds


def cell(key: str) -> Read:
    """Read a column."""
    return lambda row: row.get(key)


def series(seeds: Sequence[Record], read: Read, along: str = "round") -> list[Row]:
    """Return mean and deviation over the seeds at every round, or time, that has a value.

    Seeds that were evaluated at different rounds or times are read off their lines, as far as all of them go.
    """
    lines = [line for run in seeds if (line := _points(run, read, along))]
    if len({tuple(number(row.get(along)) for row in run.metrics) for run in seeds}) > 1:
        lines = _aligned(lines)
    rows: dict[float, list[Row]] = {}
    for at, row in (pair for line in lines for pair in line.items()):
        rows.setdefault(at, []).append(row)
    return [
        {
            **{axis: mean(row[axis] for row in rows[at]) for axis in (*AXES, "time")},
            along: at,
            **(spread(row["value"] for row in rows[at]) or {}),
        }
        for at in sorted(rows)
    ]


def _points(run: Record, read: Read, along: str) -> dict[float, Row]:
    """Return one run's rows that have a value, by round or time; of several at the same time, the last."""
    points: dict[float, Row] = {}
    for row in run.metrics:
        value, at = number(read(row)), number(row.get(along))
        if value is not None and at is not None:
            points[at] = {"value": value, **{axis: number(row.get(axis)) for axis in (*AXES, "time")}}
    return points


def _aligned(lines: Sequence[dict[float, Row]]) -> list[dict[float, Row]]:
    """Return all lines at the same places: where any has a point, between the ends that they share."""
    low, high = max(map(min, lines), default=0.0), min(map(max, lines), default=0.0)
    places = sorted({at for line in lines for at in line if low <= at <= high})

    def column(line: dict[float, Row], key: str) -> list[float | None]:
        known = [at for at in sorted(line) if line[at][key] is not None]
        if not known:
            return [None] * len(places)
        return [float(x) for x in np.interp(places, known, [line[at][key] for at in known])]

    keys = ("value", *AXES, "time")
    columns = [{key: column(line, key) for key in keys} for line in lines]
    return [{at: {key: c[key][i] for key in keys} for i, at in enumerate(places)} for c in columns]


# ---- learning curves


def curves(runs: Runs, metric: str) -> Figure | None:
    """Return the scores of the personal and the global models against rounds or seconds; None if none."""
    traces = _scores(runs, AXES)
    return _against_rounds(traces, f"{first(runs).watched} {metric}") if traces else None


def curves_in_time(runs: Runs, metric: str) -> Figure | None:
    """Return the scores against virtual time; None where no time has passed."""
    return in_time(_scores(runs, ("time",), federated(runs)), titled(f"{first(runs).watched} {metric}"))


def losses(runs: Runs) -> Figure | None:
    """Return the training loss against rounds or seconds; None where it was not recorded."""
    traces = bands(runs, cell("train_loss"), "training loss")
    return _against_rounds(traces, "training loss") if traces else None


def in_time(traces: list[Trace], yaxis: dict[str, Any]) -> Figure | None:
    """Return lines against virtual time; None where no time has passed."""
    if not any(x > 0 for trace in traces for x in trace["x"]):
        return None
    return overlay(traces, {**titled("virtual time"), "rangemode": "tozero", "hoverformat": ",.1f"}, yaxis)


def _scores(runs: Runs, axes: Sequence[str], only: Runs | None = None) -> list[Trace]:
    several, traces, drawn = len(runs) > 1, list[Trace](), list[list[tuple[float, float]]]()
    for kind in ("personal", "global"):
        for i, (label, seeds) in enumerate(runs.items()):
            if only is not None and label not in only:
                continue
            rows = series(seeds, cell(f"{seeds[0].watched}.{kind}"), axes[0])
            points = [(row[axes[0]], row["mean"]) for row in rows]
            # a method without a personal part, or a baseline that several labels share: one line, not two
            if not rows or points in drawn:
                continue
            drawn.append(points)
            name = (label if kind == "personal" else f"{label}: global") if several else NAMES[kind]
            shade = colour(i) if several or kind == "personal" else "muted"
            traces += band(rows, name, shade, "dash" if kind == "global" else dash(i), axes=axes)
    return traces + _alone(runs, traces, axes)


def _alone(runs: Runs, traces: Sequence[Trace], axes: Sequence[str]) -> list[Trace]:
    """Return a level line: what clients reach alone in the end."""
    level = mean(lookup(run.facts, run.watched, "local") for seeds in runs.values() for run in seeds)
    lines = list[Trace]()
    for axis in axes if level is not None else ():
        when = _when(axis, axes)
        x = [v for trace in traces if trace.get("when") == when.get("when") for v in trace["x"]]
        if x:
            name, place = "each alone", {"x": [min(x), max(x)], "y": [level, level], **when}
            style = {"mode": "lines", "line": {"color": "@muted", "width": 1.5, "dash": "dot"}}
            hover = f"{name}, in the end: %{{y:.4f}}<extra></extra>"
            lines.append({"type": "scatter", "name": name, "hovertemplate": hover, **style, **place})
    return lines


def _against_rounds(traces: list[Trace], title: str) -> Figure:
    return {
        "data": traces,
        "layout": {"hovermode": "x unified", "yaxis": titled(title)},
        "layouts": {f"axis={axis}": {"xaxis": titled(axis)} for axis in AXES},
    }


# ---- what personalization changes


def scatter(averages: Averages) -> Figure | None:
    """Return each client's gain against its number of training samples, one view per label and reference."""
    traces = list[Trace]()
    for i, clients in enumerate(averages.values()):
        samples = clients.table.numbers("n_train")
        for reference in references(clients):
            gains = clients.gains(reference)
            rows = sample(np.flatnonzero(np.isfinite(samples) & ~np.isnan(gains)))
            when = {"reference": reference, **({"label": str(i)} if len(averages) > 1 else {})}
            traces += [
                {**trace, "when": when} for trace in _groups(clients, rows, samples[rows], gains[rows])
            ]
    if not traces:
        return None
    low, high = min(min(t["x"]) for t in traces), max(max(t["x"]) for t in traces)
    room = max(0.06 * math.log10(high / low), 0.012)
    span = [math.log10(low) - room, math.log10(high) + room]
    xaxis = {**titled("training samples (log scale)"), "type": "log", "range": span, **_ticks(low, high)}
    return {"data": traces, "layout": {"hovermode": "closest", "xaxis": xaxis, "yaxis": GAIN_AXIS}}


def _ticks(low: float, high: float) -> dict[str, Any]:
    """Return 1, 2, 5, 10, … or, where few of them are in range, whole numbers: samples have no decimals."""
    places = [k * 10**e for e in range(math.ceil(math.log10(high)) + 1) for k in (1, 2, 5)]
    places = [place for place in places if low <= place <= high]
    if len(places) < 3:
        places = sorted({round(x) for x in np.linspace(low, high, 5)} - {0})
    return {"tickvals": places, "ticktext": [count(place) for place in places]}


def _groups(clients: Record, rows: np.ndarray, samples: np.ndarray, gains: np.ndarray) -> list[Trace]:
    """Return three traces: clients that gain, stay and lose."""
    groups = {
        "better": (gains > 0, "@gain", "circle"),
        "equal": (gains == 0, "@equal", "circle"),
        "worse": (gains < 0, "@hurt", "diamond"),
    }
    x = np.array(_side_by_side(np.maximum(samples, 0.5).tolist(), gains.tolist()))
    size, traces = 10 if len(rows) < 500 else 6, list[Trace]()
    for name, (members, colour, symbol) in groups.items():
        if members.any():
            edge = {"color": "@page", "width": 1}
            trace = {
                "type": "scatter",
                "mode": "markers",
                "name": f"{name} ({count(int(members.sum()))})",
                "x": short(x[members]),
                "y": short(gains[members]),
                "customdata": [
                    _hover(clients.clients[int(i)], gained)
                    for i, gained in zip(rows[members], gains[members])
                ],
                "hovertemplate": HOVER,
                "marker": {"color": colour, "symbol": symbol, "size": size, "line": edge},
            }
            traces.append(trace)
    return traces


def _hover(row: Row, gained: float) -> list[str]:
    name = escape(shorten(str(row["client"]), LONGEST_NAME))
    scores = [score(row.get(model)) for model in ("local", "global", "personal")]
    return [name, count(row.get("n_train")), *scores, signed(gained)]


def _side_by_side(x: Sequence[float], y: Sequence[float]) -> list[float]:
    """Put clients at the very same point next to each other, or one would hide the others."""
    width = max(math.log10(max(x) / min(x)), 0.06) if x else 0.0
    crowds: dict[tuple[float, float], list[int]] = {}
    for i, (across, up) in enumerate(zip(x, y)):
        crowds.setdefault((across, round(up, 9)), []).append(i)
    places = list(x)
    for crowd in crowds.values():
        # a crowd of any size takes at most a twelfth of the width
        step = min(0.016 * width, width / 12 / len(crowd))
        for k, i in enumerate(crowd):
            places[i] = x[i] * 10 ** (step * (k - (len(crowd) - 1) / 2))
    return places


def violins(averages: Averages, split: str = "test") -> Figure | None:
    """Return the distribution of the clients' gains, one violin per label; as Figure 7 of Pillutla et al."""
    traces = list[Trace]()
    for i, (label, clients) in enumerate(averages.items()):
        for reference in references(clients):
            gains = clients.gains(reference, split)
            gains = gains[sample(np.arange(len(gains)))]
            gains = gains[~np.isnan(gains)]
            if len(gains):
                name = escape(shorten(label, 24))
                both = (violin(name, gains, colour(i)), _median(name, gains, colour(i)))
                traces += [{**trace, "when": {"reference": reference}} for trace in both]
    if not traces:
        return None
    layout: dict[str, Any] = {"yaxis": GAIN_AXIS, "showlegend": False, "hovermode": "closest"}
    if len(averages) == 1:
        layout["xaxis"] = {"range": [-1.3, 1.3]}  # one violin need not fill the page
    return {"data": traces, "layout": layout}


def violin(name: str, gains: np.ndarray, colour: str) -> Trace:
    return {
        "type": "violin",
        "name": name,
        "x0": name,
        "y": short(gains),
        "box": {"visible": True, "width": 0.12, "fillcolor": "@page", "line": {"width": 1.5}},
        "points": False,
        "spanmode": "hard",  # from the smallest to the largest change, not beyond
        "line": {"color": f"@{colour}", "width": 1.5},
        "fillcolor": f"@{colour}/0.25",
        "width": 0.8,
        "hoveron": "violins",
        "yhoverformat": "+.4f",
    }


def _median(name: str, gains: np.ndarray, colour: str) -> Trace:
    """Return the dot in the box: a median on the edge of the box would be hard to see."""
    median = float(np.median(gains))
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [name],
        "y": [median],
        "marker": {"color": "@page", "size": 9, "line": {"color": f"@{colour}", "width": 2.5}},
        "hovertemplate": f"median {signed(median)}<br>{count(len(gains))} clients<extra></extra>",
    }


def sample(rows: np.ndarray) -> np.ndarray:
    """Return all rows, or a fixed random selection of very many, so that a page stays quick."""
    if len(rows) <= MOST_POINTS:
        return rows
    return rows[np.sort(np.random.default_rng(0).choice(len(rows), MOST_POINTS, replace=False))]
