"""How long turns took and how old uploads were: outlines, so that several runs overlay."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from partita.engine.counters import BINS
from partita.engine.record import Record, lookup, number
from partita.report import figures as draw
from partita.report.figures import Figure, Trace
from partita.report.rows import Runs
from partita.report.words import count, shorten, units

MOST_BINS, MOST_FILLED, MOST_TICKS = 40, 3, 9
ROUND: list[int] = [k * 10**e for e in range(20) for k in (1, 2, 5)]
Bins = Mapping[str, Counter[int]]
"""For each label, how many uploads are in the bin of each number."""


def delays(runs: Runs) -> Figure | None:
    """Return the uploads by their delay, on a log scale, of the labels whose delays vary; None if none."""
    # a turn that took no time has no place on a log scale; it counts all the same
    bins = _gathered(runs, "delay", lambda low: round(BINS * math.log2(low)) if low > 0 else None)
    bins = {label: counts if len(counts) > 1 else Counter() for label, counts in bins.items()}
    used = sorted({b for counts in bins.values() for b in counts})
    if not used:
        return None
    size = 1
    while used[-1] // size - used[0] // size >= MOST_BINS:
        size *= 2

    def edge(b: float) -> float:
        return float(2 ** (b * size / BINS))

    def words(b: int) -> str:
        return f"took {units(edge(b))} to {units(edge(b + 1))}"

    traces = _outlines(runs, "delay", _grouped(bins, lambda b: b // size), lambda b: edge(b + 0.5), words)
    low, high = edge(used[0] // size), edge(used[-1] // size + 1)
    room = 0.02 * math.log10(high / low)
    span = [math.log10(low) - room, math.log10(high) + room]
    axis = {"type": "log", "range": span, **_ticks(low, high), "hoverformat": ".3~g"}
    return _figure(traces, {**draw.titled("virtual time of a turn (log scale)"), **axis})


def ages(runs: Runs) -> Figure | None:
    """Return the uploads by the server steps since their download, of the labels with stale ones."""
    bins = _gathered(runs, "staleness", int)
    bins = {label: counts if any(counts) else Counter() for label, counts in bins.items()}
    oldest = max((age for counts in bins.values() for age in counts), default=0)
    if not oldest:
        return None
    # 1, 2, 5, 10, … ages to a bin, so that most uploads are in about thirty
    common = max(map(_most_ages, filter(None, bins.values())))
    width = next(w for w in ROUND if 30 * w > common)
    last = min(oldest // width, MOST_BINS)

    def words(b: int) -> str:
        low, high = b * width, (b + 1) * width - 1
        if b == last and oldest > high:
            return f"{count(low)} or more steps old"
        return f"{count(low)} to {count(high)} steps old" if width > 1 else f"{count(low)} steps old"

    grouped = _grouped(bins, lambda age: min(age // width, last))
    traces = _outlines(runs, "staleness", grouped, lambda b: (b + 0.5) * width - 0.5, words)
    end = (last + 1) * width - 0.5
    room = 0.02 * (end + 0.5)
    axis: dict[str, Any] = {"range": [-0.5 - room, end + room], "hoverformat": ",.0f"}
    if oldest > end:
        step = next(w for w in ROUND if 7 * w >= last * width)
        ticks = range(0, last * width, step)
        axis |= {"tickvals": [*ticks, end - width / 2 + 0.5], "ticktext": [*map(count, ticks), "…"]}
    return _figure(traces, {**draw.titled("server steps since the download"), **axis})


# ---- counts


def counted(run: Record, kind: str) -> list[tuple[float, float]]:
    """Return where each bin of a run's delays or staleness begins, and how many uploads are in it."""
    rows = lookup(run.facts, "clock", kind, "counts")
    rows = rows if isinstance(rows, list) else []
    pairs = [(number(row[0]), number(row[-1])) for row in rows if isinstance(row, list) and row]
    return [(low, n) for low, n in pairs if low is not None and n]


def uploads(run: Record) -> float:
    """Return how many uploads the server took in; 0 where it was not recorded."""
    return sum(n for _, n in counted(run, "staleness"))


def _gathered(runs: Runs, kind: str, place: Callable[[float], int | None]) -> dict[str, Counter[int]]:
    """Count the uploads of all seeds of each label, by the bin that `place` says."""
    bins: dict[str, Counter[int]] = {label: Counter() for label in runs}
    for label, seeds in runs.items():
        for low, n in (pair for run in seeds for pair in counted(run, kind)):
            b = place(low)
            if b is not None:
                bins[label][b] += int(n)
    return bins


def _grouped(bins: Bins, place: Callable[[int], int]) -> dict[str, Counter[int]]:
    grouped: dict[str, Counter[int]] = {label: Counter() for label in bins}
    for label, counts in bins.items():
        for b, n in counts.items():
            grouped[label][place(b)] += n
    return grouped


def _most_ages(counts: Counter[int]) -> int:
    """Return the age that 99 uploads in 100 do not exceed."""
    seen, enough = 0, 0.99 * counts.total()
    for age in sorted(counts):
        seen += counts[age]
        if seen >= enough:
            return age
    return 0


# ---- drawing


def _outlines(
    runs: Runs, kind: str, bins: Bins, centre: Callable[[int], float], words: Callable[[int], str]
) -> list[Trace]:
    """Return the share of a label's uploads in each bin, at its centre; lines step halfway between bins."""
    used = [b for counts in bins.values() for b in counts]
    places = range(min(used) - 1, max(used) + 2)  # an empty one at both ends: outlines come down to zero
    few, several = sum(map(bool, bins.values())) <= MOST_FILLED, len(runs) > 1
    traces = list[Trace]()
    for i, (label, counts) in enumerate(bins.items()):
        if not counts:
            continue
        total = sum(n for run in runs[label] for _, n in counted(run, kind))
        name = label if several else "uploads"
        trace = draw.line(name, draw.colour(i), draw.dash(i))
        trace |= {"mode": "lines", "x": [centre(b) for b in places], "y": [counts[b] / total for b in places]}
        trace["line"] |= {"shape": "hvh", "width": 2}
        trace |= {"fill": "tozeroy", "fillcolor": f"@{draw.colour(i)}/0.16"} if few else {}
        trace |= {"customdata": [words(b) for b in places], "showlegend": several}
        name = escape(shorten(name, draw.LONGEST_NAME))
        trace["hovertemplate"] = f"{name}: %{{y:.1%}} %{{customdata}}<extra></extra>"
        traces.append(trace)
    return traces


def _figure(traces: list[Trace], xaxis: dict[str, Any]) -> Figure:
    yaxis = {**draw.titled("share of the uploads"), "tickformat": ".1~%", "rangemode": "tozero"}
    return draw.overlay(traces, xaxis, yaxis)


def _ticks(low: float, high: float) -> dict[str, Any]:
    """Return 1, 2, 5, 10, …, or powers of ten where these would be too many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for digits, step in (((1, 2, 5), 1), ((1,), 1), ((1,), 1 + (last - first) // 8)):
        ticks = [k * 10.0**e for e in range(first, last + 1) for k in digits if e % step == 0]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= MOST_TICKS:
            break
    return {"tickvals": ticks, "ticktext": [f"{tick:,.12g}" for tick in ticks]}
