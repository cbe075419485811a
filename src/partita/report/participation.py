"""Who took part: how often each client reported, and by what it was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np

from partita.engine.record import Record, lookup
from partita.report import figures as draw
from partita.report.figures import Figure
from partita.report.html import Safe, figure, how, section, table
from partita.report.rows import Averages, Runs, federated, over_seeds
from partita.report.words import count, share, shorten

MOST_BINS = 40
COLUMNS = ("chosen", "fewest reports", "median", "most", "never took part", "reports of the busiest tenth")
HOW = (
    "A report is an upload that arrived. The busiest tenth are the clients that reported most often: with "
    "clients that take part equally often, a tenth of all reports is theirs."
)


def participation(runs: Runs, clients: Averages) -> tuple[dict[str, Figure], Safe | None]:
    """Return the figure by name, and the section; none where all clients took part equally often."""
    reports = {label: _reports(clients[label]) for label in federated(runs) if label in clients}
    reports = {label: counts for label, counts in reports.items() if len(counts)}
    if not any(np.ptp(counts) > 0 for counts in reports.values()):
        return {}, None
    several = len(runs) > 1
    rows = [
        [*[label] * several, _chosen(runs[label][0].config), *_figures(counts)]
        for label, counts in reports.items()
    ]
    return {"participation": _histogram(reports, several)}, section(
        "participation",
        "Who took part",
        figure("participation", "share of the clients by how often they reported"),
        table([*["run"] * several, *COLUMNS], rows, range(1 + several)),
        how(HOW + over_seeds(runs)),
    )


def _reports(clients: Record) -> np.ndarray:
    counts: np.ndarray = clients.table.numbers("reports")
    known: np.ndarray = counts[np.isfinite(counts)]
    return known


def _figures(counts: np.ndarray) -> list[str]:
    busiest = np.sort(counts)[::-1][: max(1, round(len(counts) / 10))].sum()
    total, never = counts.sum(), int((counts == 0).sum())
    middle = (float(x) for x in (counts.min(), np.median(counts), counts.max()))
    return [*map(count, middle), count(never), share(busiest / total if total else None)]


def _chosen(config: Mapping[str, Any]) -> str:
    """Say by what clients were chosen; of a run with stages, in each of them."""
    schedule = config.get("schedule")
    stages = schedule if isinstance(schedule, list) else [schedule]
    return shorten(", then ".join(dict.fromkeys(map(_rule, stages))), 80)


def _rule(schedule: Any) -> str:
    choice, available = (lookup(schedule, key) for key in ("choose", "available"))
    words = str(lookup(schedule, "order") or "random")
    if choice is not None:
        words = _call(choice)
    return words if available is None else f"{words}, while available by {_call(available)}"


def _call(part: Any) -> str:
    """Write a part as it is called: power_of_choice(d=10)."""
    if not isinstance(part, Mapping):
        return str(part)
    options = [f"{k}={v}" for k, v in part.items() if k not in ("name", "digest", "code") and v is not None]
    return f"{part.get('name')}({', '.join(shorten(option, 40) for option in options)})"


def _histogram(reports: Mapping[str, np.ndarray], several: bool) -> Figure:
    """Return the share of the clients with each number of reports: outlines, so that runs overlay."""
    most = max(float(counts.max()) for counts in reports.values())
    width = max(1, -(-int(most + 1) // MOST_BINS))
    edges = np.arange(-0.5, most + width + 0.5, width)
    traces = []
    for i, (label, counts) in enumerate(reports.items()):
        shares = np.histogram(counts, edges)[0] / len(counts)
        name = label if several else "clients"
        trace = draw.line(name, draw.colour(i), draw.dash(i))
        centres = (edges[:-1] + edges[1:]) / 2
        x = [centres[0] - width, *centres.tolist(), centres[-1] + width]  # outlines come down to zero
        trace |= {"mode": "lines", "x": x, "y": [0.0, *draw.short(shares), 0.0], "showlegend": several}
        trace["line"] |= {"shape": "hvh", "width": 2}
        name = escape(shorten(name, draw.LONGEST_NAME))
        trace["hovertemplate"] = f"{name}: %{{y:.1%}}<extra></extra>"
        traces.append(trace)
    yaxis = {**draw.titled("share of the clients"), "tickformat": ".1~%", "rangemode": "tozero"}
    return draw.overlay(traces, {**draw.titled("reports of a client"), "hoverformat": ",.0f"}, yaxis)
