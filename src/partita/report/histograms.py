"""How long turns took and how old uploads were: outlines, so that several runs overlay."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from partita.engine.counters import BINS
from partita.report import figures as draw
from partita.report.figures import Figure, Trace
from partita.report.rows import Result, Runs, clock, number
from partita.report.words import count, shorten, units

MOST_BINS, MOST_FILLED = 40, 3
ROUND: list[int] = [k * 10**e for e in range(20) for k in (1, 2, 5)]
Bins = Mapping[str, Counter[int]]  # uploads by the number of their bin, for each label


def delays(runs: Runs) -> Figure | None:
    """Uploads by how long they took, on a log scale, of the labels whose delays vary; None without any."""
    # a turn that took no time has no place on a log scale; it counts all the same
    found = _gathered(runs, "delay", lambda low: round(BINS * math.log2(low)) if low > 0 else None)
    found = {label: bins if len(bins) > 1 else Counter() for label, bins in found.items()}
    there = sorted({b for bins in found.values() for b in bins})
    if not there:
        return None
    size = 1
    while there[-1] // size - there[0] // size >= MOST_BINS:
        size *= 2

    def edge(b: float) -> float:
        return float(2 ** (b * size / BINS))

    def told(b: int) -> str:
        return f"took {units(edge(b))} to {units(edge(b + 1))}"

    grouped = {label: _grouped(bins, lambda b: b // size) for label, bins in found.items()}
    traces = _outlines(runs, "delay", grouped, lambda b: edge(b + 0.5), told)
    low, high = edge(there[0] // size), edge(there[-1] // size + 1)
    room = 0.02 * math.log10(high / low)
    span = [math.log10(low) - room, math.log10(high) + room]
    ticks = {"type": "log", "range": span, **_ticks(low, high), "hoverformat": ".3~g"}
    return _figure(traces, {**draw.titled("virtual time of a turn (log scale)"), **ticks})


def ages(runs: Runs) -> Figure | None:
    """Uploads by the server steps since their download, of the labels with stale ones; None without any."""
    found = _gathered(runs, "staleness", int)
    found = {label: bins if any(bins) else Counter() for label, bins in found.items()}
    oldest = max((age for bins in found.values() for age in bins), default=0)
    if not oldest:
        return None
    width = _width(max(map(_usual, filter(None, found.values()))))
    last = min(oldest // width, MOST_BINS)

    def told(b: int) -> str:
        low, high = b * width, (b + 1) * width - 1
        if b == last and oldest > high:
            return f"{count(low)} or more steps old"
        return f"{count(low)} to {count(high)} steps old" if width > 1 else f"{count(low)} steps old"

    grouped = {label: _grouped(bins, lambda age: min(age // width, last)) for label, bins in found.items()}
    traces = _outlines(runs, "staleness", grouped, lambda b: (b + 0.5) * width - 0.5, told)
    end = (last + 1) * width - 0.5
    room = 0.02 * (end + 0.5)
    axis: dict[str, Any] = {"range": [-0.5 - room, end + room], "hoverformat": ",.0f"}
    if oldest > end:
        at = last * width
        axis |= {
            "tickvals": [*_places(at), end - width / 2 + 0.5],
            "ticktext": [*map(count, _places(at)), "…"],
        }
    return _figure(traces, {**draw.titled("server steps since the download"), **axis})


# ---- counts


def counted(run: Result, kind: str) -> list[tuple[float, float]]:
    """Of a run's delays or staleness: where a bin begins, and how many uploads are in it."""
    rows = clock(run, kind, "counts")
    some = rows if isinstance(rows, list) else []
    pairs = [(number(row[0]), number(row[-1])) for row in some if isinstance(row, list) and row]
    return [(low, n) for low, n in pairs if low is not None and n]


def uploads(run: Result) -> float:
    """How many uploads the server took in; 0 where it was not recorded."""
    return sum(n for _, n in counted(run, "staleness"))


def _gathered(runs: Runs, kind: str, place: Callable[[float], int | None]) -> dict[str, Counter[int]]:
    """All seeds of a label together."""
    found: dict[str, Counter[int]] = {label: Counter() for label in runs}
    for label, seeds in runs.items():
        for low, n in (pair for run in seeds for pair in counted(run, kind)):
            b = place(low)
            if b is not None:
                found[label][b] += int(n)
    return found


def _grouped(bins: Counter[int], place: Callable[[int], int]) -> Counter[int]:
    found: Counter[int] = Counter()
    for b, n in bins.items():
        found[place(b)] += n
    return found


def _usual(bins: Counter[int]) -> int:
    """The age that 99 uploads in 100 do not exceed."""
    seen, enough = 0, 0.99 * bins.total()
    for age in sorted(bins):
        seen += bins[age]
        if seen >= enough:
            return age
    return 0


def _width(usual: int) -> int:
    """1, 2, 5, 10, … ages to a bin, so that most uploads are in about thirty."""
    return next(w for w in ROUND if 30 * w > usual)


# ---- drawing


def _outlines(
    runs: Runs, kind: str, bins: Bins, centre: Callable[[int], float], told: Callable[[int], str]
) -> list[Trace]:
    """The share of a label's uploads in each bin, at its centre; a step is halfway between two of them."""
    there = [b for some in bins.values() for b in some]
    places = range(min(there) - 1, max(there) + 2)  # an empty one at both ends: outlines come down to zero
    shared = [b for b in bins.values() if b]
    traces = list[Trace]()
    for i, (label, some) in enumerate(bins.items()):
        if not some:
            continue
        total = sum(n for run in runs[label] for _, n in counted(run, kind))
        shown = escape(shorten(label, draw.LONGEST_NAME)) if len(runs) > 1 else "uploads"
        trace = draw.line(label if len(runs) > 1 else "uploads", draw.colour(i), draw.dash(i))
        trace |= {"mode": "lines", "x": [centre(b) for b in places], "y": [some[b] / total for b in places]}
        trace["line"] = {**trace["line"], "shape": "hvh", "width": 2}
        trace |= (
            {"fill": "tozeroy", "fillcolor": f"@{draw.colour(i)}/0.16"} if len(shared) <= MOST_FILLED else {}
        )
        trace |= {"customdata": [told(b) for b in places], "showlegend": len(runs) > 1}
        trace["hovertemplate"] = f"{shown}: %{{y:.1%}} %{{customdata}}<extra></extra>"
        traces.append(trace)
    return traces


def _figure(traces: list[Trace], xaxis: dict[str, Any]) -> Figure:
    yaxis = {**draw.titled("share of the uploads"), "tickformat": ".1~%", "rangemode": "tozero"}
    return {"data": traces, "layout": {"hovermode": "x unified", "xaxis": xaxis, "yaxis": yaxis}}


def _ticks(low: float, high: float) -> dict[str, Any]:
    """1, 2, 5, 10, …, or powers of ten where these would be too many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for digits, step in (((1, 2, 5), 1), ((1,), 1), ((1,), 1 + (last - first) // 8)):
        places = [k * 10.0**e for e in range(first, last + 1) for k in digits if e % step == 0]
        there = [place for place in places if low <= place <= high]
        if len(there) <= 9:
            break
    return {"tickvals": there, "ticktext": [f"{place:,.12g}" for place in there]}


def _places(end: int) -> list[int]:
    """A few round numbers from zero up to an end."""
    step = next(w for w in ROUND if 7 * w >= end)
    return list(range(0, end, step))
