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

from partita.report.rows import (
    NAMES,
    Means,
    Result,
    Row,
    Runs,
    change,
    changes,
    federated,
    mean,
    number,
    references,
)
from partita.report.words import count, score, shorten, signed

Figure = dict[str, Any]
Trace = dict[str, Any]

AXES = ("round", "seconds")
COLOURS, MOST_POINTS, LONGEST_NAME = 8, 5000, 60
DASHES = ("solid", "dash", "dot", "dashdot")
CHANGE = "change, up is better"
HOVER = (
    "<b>%{customdata[0]}</b><br>%{customdata[1]} training samples"
    "<br>alone %{customdata[2]}<br>global %{customdata[3]}<br>personal %{customdata[4]}"
    "<br>change %{customdata[5]}<extra></extra>"
)


# ---- learning curves


def curves(runs: Runs, metric: str) -> Figure | None:
    """Test scores of the personal and the global models against rounds or seconds; None without any."""
    traces = _scores(runs, AXES)
    return _against_rounds(traces, f"test {metric}") if traces else None


def curves_in_time(runs: Runs, metric: str) -> Figure | None:
    """The same against virtual time; None where no time has passed."""
    return in_time(_scores(runs, ("time",)), titled(f"test {metric}"))


def _scores(runs: Runs, axes: Sequence[str]) -> list[Trace]:
    several, traces, drawn = len(runs) > 1, list[Trace](), list[list[tuple[float, float]]]()
    shown = federated(runs) if axes == ("time",) else runs
    for kind in ("personal", "global"):
        for i, (label, seeds) in enumerate(runs.items()):
            if label not in shown:
                continue
            found = series(seeds, cell(f"test.{kind}"), axes[0])
            points = [(row[axes[0]], row["mean"]) for row in found]
            # a method without a personal part, or a baseline that several labels share: one line, not two
            if not found or points in drawn:
                continue
            drawn.append(points)
            name = (label if kind == "personal" else f"{label}: global") if several else NAMES[kind]
            shade = colour(i) if several or kind == "personal" else "muted"
            traces += band(found, name, shade, "dash" if kind == "global" else dash(i), axes=axes)
    return traces + _alone(runs, traces, axes)


def losses(runs: Runs) -> Figure | None:
    """The training loss against rounds or seconds; None where it was not recorded."""
    traces = list[Trace]()
    for i, (label, seeds) in enumerate(runs.items()):
        name = label if len(runs) > 1 else "training loss"
        traces += band(series(seeds, cell("train_loss")), name, colour(i), dash(i))
    return _against_rounds(traces, "training loss") if traces else None


def cell(key: str) -> Callable[[Row], object]:
    """What a row has in a column."""
    return lambda row: row.get(key)


def series(seeds: Sequence[Result], read: Callable[[Row], object], along: str = "round") -> list[Row]:
    """Mean and deviation over the seeds at every round, or time, that has a value.

    Seeds that were evaluated at different rounds or times are read off their lines, as far as all of them go.
    """
    lines = [found for run in seeds if (found := _line(run, read, along))]
    if len({tuple(number(row.get(along)) for row in run.metrics) for run in seeds}) > 1:
        lines = _aligned(lines)
    rows: dict[float, list[Row]] = {}
    for at, row in (pair for line in lines for pair in line.items()):
        rows.setdefault(at, []).append(row)
    return [
        {
            **{axis: mean(row[axis] for row in rows[at]) for axis in (*AXES, "time")},
            along: at,
            "mean": mean(row["value"] for row in rows[at]),
            "std": float(np.std([row["value"] for row in rows[at]], ddof=1)) if len(rows[at]) > 1 else 0.0,
        }
        for at in sorted(rows)
    ]


def _line(run: Result, read: Callable[[Row], object], along: str) -> dict[float, Row]:
    """One run's rows that have a value, by round or time; of several at the same time, the last."""
    found: dict[float, Row] = {}
    for row in run.metrics:
        value, at = number(read(row)), number(row.get(along))
        if value is not None and at is not None:
            found[at] = {"value": value, **{axis: number(row.get(axis)) for axis in (*AXES, "time")}}
    return found


def _aligned(lines: Sequence[dict[float, Row]]) -> list[dict[float, Row]]:
    """All lines at the same places: where any of them has a point, between the ends that they share."""
    low, high = max(map(min, lines), default=0.0), min(map(max, lines), default=0.0)
    places = sorted({at for line in lines for at in line if low <= at <= high})

    def value(line: dict[float, Row], key: str) -> list[float | None]:
        known = [at for at in sorted(line) if line[at][key] is not None]
        if not known:
            return [None] * len(places)
        return [float(x) for x in np.interp(places, known, [line[at][key] for at in known])]

    keys = ("value", *AXES, "time")
    columns = [{key: value(line, key) for key in keys} for line in lines]
    return [{at: {key: c[key][i] for key in keys} for i, at in enumerate(places)} for c in columns]


def band(
    series: Sequence[Row],
    name: str,
    colour: str,
    dash: str,
    digits: str = ".4f",
    axes: Sequence[str] = AXES,
) -> list[Trace]:
    """A line against each of the axes, to choose from if they are several; a band where seeds differ."""
    traces = list[Trace]()
    for axis in axes:
        there = [row for row in series if row[axis] is not None]
        if not there:
            continue
        x, middle = [row[axis] for row in there], [row["mean"] for row in there]
        place: Trace = {"x": x, "legendgroup": escape(name)}
        place |= {"when": {"axis": axis}} if len(axes) > 1 else {}
        if any(row["std"] for row in there):
            edge: Trace = {**place, "type": "scatter", "mode": "lines", "line": {"width": 0}}
            edge = {**edge, "hoverinfo": "skip", "showlegend": False}
            fill = {"fill": "tonexty", "fillcolor": f"@{colour}/0.16"}
            traces.append({**edge, "y": [row["mean"] - row["std"] for row in there]})
            traces.append({**edge, "y": [row["mean"] + row["std"] for row in there], **fill})
        traces.append({**line(name, colour, dash, digits), **place, "y": middle})
    return traces


def line(name: str, colour: str, dash: str, digits: str = ".4f") -> Trace:
    """A line with points on it, but for where they are."""
    shown = escape(shorten(name, LONGEST_NAME))
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": shown,
        "line": {"color": f"@{colour}", "width": 2.5, "dash": dash},
        "marker": {"size": 5},
        "hovertemplate": f"{shown}: %{{y:{digits}}}<extra></extra>",
    }


def _alone(runs: Runs, traces: Sequence[Trace], axes: Sequence[str]) -> list[Trace]:
    """A level line: what clients reach alone in the end."""
    scores = [(r.summary().get("test") or {}).get("local") for seeds in runs.values() for r in seeds]
    level, lines = mean(scores), list[Trace]()
    if level is None:
        return []
    for axis in axes:
        when = {"when": {"axis": axis}} if len(axes) > 1 else {}
        x = [v for t in traces if t.get("when") == when.get("when") for v in t["x"]]
        if x:
            line = {"color": "@muted", "width": 1.5, "dash": "dot"}
            ends = {"x": [min(x), max(x)], "y": [level, level], **when}
            hover = "each alone, in the end: %{y:.4f}<extra></extra>"
            lines.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": "each alone",
                    "line": line,
                    **ends,
                    "hovertemplate": hover,
                }
            )
    return lines


def in_time(traces: list[Trace], yaxis: dict[str, Any]) -> Figure | None:
    """Lines against virtual time; None where no time has passed."""
    if not any(x > 0 for trace in traces for x in trace["x"]):
        return None
    xaxis = {**titled("virtual time"), "rangemode": "tozero", "hoverformat": ",.1f"}
    return {"data": traces, "layout": {"hovermode": "x unified", "xaxis": xaxis, "yaxis": yaxis}}


def _against_rounds(traces: list[Trace], title: str) -> Figure:
    return {
        "data": traces,
        "layout": {"hovermode": "x unified", "yaxis": titled(title)},
        "layouts": {"axis=round": {"xaxis": titled("round")}, "axis=seconds": {"xaxis": titled("seconds")}},
    }


# ---- what personalization changes


def scatter(means: Means, higher: bool) -> Figure | None:
    """Each client's change against its number of training samples, one view per label and reference."""
    several, traces = len(means) > 1, list[Trace]()
    for i, everyone in enumerate(means.values()):
        rows = [row for row in everyone if number(row.get("n_train")) is not None]
        for reference in references(rows, higher):
            there = sample([row for row in rows if change(row, reference, higher) is not None])
            when = {"reference": reference, **({"label": str(i)} if several else {})}
            traces += [{**trace, "when": when} for trace in _points(there, reference, higher)]
    if not traces:
        return None
    low, high = min(min(t["x"]) for t in traces), max(max(t["x"]) for t in traces)
    room = max(0.06 * math.log10(high / low), 0.012)
    span = [math.log10(low) - room, math.log10(high) + room]
    axis = {**titled("training samples (log scale)"), "type": "log", "range": span, **_ticks(low, high)}
    return {
        "data": traces,
        "layout": {
            "hovermode": "closest",
            "xaxis": axis,
            "yaxis": {**titled(CHANGE), "zeroline": True, "tickformat": ".3~f"},
        },
    }


def _ticks(low: float, high: float) -> dict[str, Any]:
    """1, 2, 5, 10, … or, where few of them are in range, whole numbers: samples have no decimals."""
    places = [k * 10**e for e in range(math.ceil(math.log10(high)) + 1) for k in (1, 2, 5)]
    there = [place for place in places if low <= place <= high]
    if len(there) < 3:
        there = sorted({round(x) for x in np.linspace(low, high, 5)} - {0})
    return {"tickvals": there, "ticktext": [count(place) for place in there]}


def _points(rows: Sequence[Row], reference: str, higher: bool) -> list[Trace]:
    """Three traces: clients that gain, stay and lose."""
    found = [(row, change(row, reference, higher) or 0.0) for row in rows]
    x = _side_by_side([max(number(row.get("n_train")) or 0.0, 0.5) for row in rows], [y for _, y in found])
    groups = {"better": ("@gain", "circle"), "equal": ("@equal", "circle"), "worse": ("@hurt", "diamond")}
    traces, size, edge = [], 10 if len(rows) < 500 else 6, {"color": "@page", "width": 1}
    for name, (colour, symbol) in groups.items():
        here = [i for i, (_, y) in enumerate(found) if name == _side(y)]
        if here:
            trace = {
                "type": "scatter",
                "mode": "markers",
                "name": f"{name} ({count(len(here))})",
                "x": [x[i] for i in here],
                "y": [found[i][1] for i in here],
                "customdata": [_told(*found[i]) for i in here],
                "hovertemplate": HOVER,
                "marker": {"color": colour, "symbol": symbol, "size": size, "line": edge},
            }
            traces.append(trace)
    return traces


def _side(change: float) -> str:
    return "better" if change > 0 else "worse" if change < 0 else "equal"


def _told(row: Row, changed: float) -> list[str]:
    name = escape(shorten(str(row["client"]), LONGEST_NAME))
    scores = [score(row.get(kind)) for kind in ("local", "global", "personal")]
    return [name, count(row.get("n_train")), *scores, signed(changed)]


def _side_by_side(x: Sequence[float], y: Sequence[float]) -> list[float]:
    """Clients at the very same point stand next to each other, or one would hide the others."""
    width = max(math.log10(max(x) / min(x)), 0.06) if x else 0.0
    places: dict[tuple[float, float], list[int]] = {}
    for i, (across, up) in enumerate(zip(x, y)):
        places.setdefault((across, round(up, 9)), []).append(i)
    found = list(x)
    for here in places.values():
        # a crowd of any size takes at most a twelfth of the width
        step = min(0.016 * width, width / 12 / len(here))
        for k, i in enumerate(here):
            found[i] = x[i] * 10 ** (step * (k - (len(here) - 1) / 2))
    return found


def violins(means: Means, higher: bool, suffix: str = "") -> Figure | None:
    """The distribution of the change over the clients, one violin per label; as Figure 7 of the paper."""
    traces = list[Trace]()
    for i, (label, rows) in enumerate(means.items()):
        for reference in references(rows, higher):
            found = changes(sample(rows), reference, higher, suffix)
            if found:
                name = escape(shorten(label, 24))
                both = (_violin(name, found, colour(i)), _median(name, found, colour(i)))
                traces += [{**trace, "when": {"reference": reference}} for trace in both]
    if not traces:
        return None
    layout = {
        "yaxis": {**titled(CHANGE), "zeroline": True, "tickformat": ".3~f"},
        "showlegend": False,
        "hovermode": "closest",
    }
    if len(means) == 1:
        layout["xaxis"] = {"range": [-1.3, 1.3]}  # one violin need not fill the page
    return {"data": traces, "layout": layout}


def _violin(name: str, found: Sequence[float], colour: str) -> Trace:
    return {
        "type": "violin",
        "name": name,
        "x0": name,
        "y": found,
        "box": {"visible": True, "width": 0.12, "fillcolor": "@page", "line": {"width": 1.5}},
        "points": False,
        "spanmode": "hard",  # from the smallest to the largest change, not beyond
        "line": {"color": f"@{colour}", "width": 1.5},
        "fillcolor": f"@{colour}/0.25",
        "width": 0.8,
        "hoveron": "violins",
        "yhoverformat": "+.4f",
    }


def _median(name: str, found: Sequence[float], colour: str) -> Trace:
    """The dot in the box: a median on the edge of the box would be hard to see."""
    middle = float(np.median(found))
    marker = {"color": "@page", "size": 9, "line": {"color": f"@{colour}", "width": 2.5}}
    told = f"median {signed(middle)}<br>{count(len(found))} clients<extra></extra>"
    place = {"type": "scatter", "mode": "markers", "x": [name], "y": [middle]}
    return {**place, "marker": marker, "hovertemplate": told}


def sample(rows: Sequence[Row]) -> Sequence[Row]:
    """All rows, or a fixed random selection of very many, so that a page stays quick."""
    if len(rows) <= MOST_POINTS:
        return rows
    chosen = np.random.default_rng(0).choice(len(rows), MOST_POINTS, replace=False)
    return [rows[i] for i in sorted(chosen)]


def titled(title: str) -> dict[str, Any]:
    """An axis with a title."""
    return {"title": {"text": escape(title)}}


def colour(i: int) -> str:
    """The name of the i-th label's colour."""
    return str(i % COLOURS)


def dash(i: int) -> str:
    """More labels than colours: the colours come again with another line."""
    return DASHES[(i // COLOURS) % len(DASHES)] if i >= COLOURS else "solid"


def kept(figures: Mapping[str, Figure | None]) -> dict[str, Figure]:
    """The figures that there is something to draw for."""
    return {name: figure for name, figure in figures.items() if figure is not None}
