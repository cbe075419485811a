"""The whole page: one file that opens without a network."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import import_module, resources

from partita.engine.store.output import MARK
from partita.report import compare
from partita.report import figures as draw
from partita.report.charts import Chart, charts
from partita.report.cost import cost
from partita.report.devices import devices
from partita.report.everyone import everyone
from partita.report.figures import Figure
from partita.report.header import header, what_ran
from partita.report.html import (
    Safe,
    choice,
    embedded,
    figure,
    grid,
    how,
    join,
    note,
    packed,
    section,
    table,
    tag,
    text,
)
from partita.report.hurt import hurt
from partita.report.measures import measures
from partita.report.newcomers import newcomers
from partita.report.participation import participation
from partita.report.rows import (
    Averages,
    Runs,
    averages,
    checked,
    differs,
    metric,
    over_seeds,
    references,
    several_seeds,
)
from partita.report.settings import settings
from partita.report.time import time

REFERENCES = {"global": "the global model", "local": "training alone"}


def page(
    runs: Runs,
    title: str | None = None,
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]], str]] = (),
    drawn: Sequence[Chart] = (),
) -> str:
    """Return the report as HTML; `tables` (title, columns, rows, a note) and charts are those of a study."""
    runs = checked(runs)
    clients = averages(runs)
    start = _start(runs, clients)
    figures = draw.kept(
        {
            "curves": draw.curves(runs, metric(runs)),
            "losses": draw.losses(runs),
            "clients": draw.scatter(clients),
            "violins": draw.violins(clients),
            "violins_train": draw.violins(clients, "train"),
        }
    )
    charted, chart_sections = charts(drawn)
    measured, measures_section = measures(runs)
    timed, time_section = time(runs, clients)
    bars, devices_section = devices(runs)
    took_part, participation_section = participation(runs, clients)
    body = join(
        [
            header(runs, clients, title),
            *(_table(i, *figure) for i, figure in enumerate(tables)),
            *chart_sections,
            _curves(runs, figures),
            time_section,
            participation_section,
            _clients(clients, figures, start, over_seeds(runs)),
            _distribution(clients, figures, start),
            hurt(runs, clients),
            everyone(runs, clients),
            newcomers(runs),
            devices_section,
            measures_section,
            cost(runs),
            settings(runs),
        ]
    )
    return document(title or what_ran(runs), body, figures | charted | measured | timed | bars | took_part)


def _table(
    number: int, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], words: str
) -> Safe:
    """Return a table of the study, with what it says below."""
    notes = [note(paragraph) for paragraph in words.split("\n") if paragraph.strip()]
    return section(f"table-{number + 1}", title, table(columns, rows), *notes)


def _curves(runs: Runs, figures: dict[str, Figure]) -> Safe:
    if not figures.keys() & {"curves", "losses"}:
        return section("curves", "Learning curves", tag("p", "No evaluation was recorded."))
    words = "Solid: each client's own model. Dashed: one global model. Dotted: what clients reach alone."
    words += " Equal lines are drawn once." if len(runs) > 1 else ""
    words += " Bands are one standard deviation over the seeds." if several_seeds(runs) else ""
    return section(
        "curves",
        "Learning curves",
        choice("axis", "Against", {"round": "rounds", "seconds": "seconds"}),
        _grid(figures, {"curves": "test score against rounds", "losses": "training loss against rounds"}),
        how(words),
    )


def _start(runs: Runs, clients: Averages) -> str:
    """Return the label to show first: the best, or another where the best one's gains are all zero."""
    labels: list[str] = [row["label"] for row in compare.table(runs) if row["best"]]
    labels += clients
    telling = (x for x in labels if any(differs(clients[x], kind) for kind in REFERENCES))
    return next(telling, labels[0])


def _clients(clients: Averages, figures: dict[str, Figure], start: str, seeds: str) -> Safe:
    name = "What each client gains or loses"
    if "clients" not in figures:
        return section("clients", name, tag("p", "No client has two scores to compare."))
    labels = {str(i): label for i, label in enumerate(clients)}
    first = str(list(clients).index(start))
    words = (
        "A point is a client. Above the line its personal model is better than the reference, below it is "
        "worse. Clients at the same point stand side by side." + seeds
    )
    return section(
        "clients",
        name,
        tag("div", choice("label", "Of", labels, first), _reference(clients, start), class_="choices"),
        figure("clients", "each client's change against its number of training samples"),
        how(words),
        _selected(clients),
    )


def _distribution(clients: Averages, figures: dict[str, Figure], start: str) -> Safe:
    name = "How the changes are spread"
    if "violins" not in figures:
        return section("distribution", name, tag("p", "No client has two scores to compare."))
    places = {"violins": "On test samples", "violins_train": "On training samples"}
    words = (
        "The wider, the more clients changed by that much. The box holds the middle half of the clients, its "
        "line is the median; the ends are the largest loss and the largest gain."
    )
    violins = _grid(figures, places, headed="violins_train" in figures)
    return section("distribution", name, _reference(clients, start), violins, how(words))


def _grid(figures: dict[str, Figure], places: dict[str, str], headed: bool = False) -> Safe | None:
    """Put those of the figures that are drawn side by side where there is room."""
    return grid(
        [
            tag("div", tag("h3", label) if headed else None, figure(name, label))
            for name, label in places.items()
            if name in figures
        ]
    )


def _reference(clients: Averages, start: str) -> Safe | None:
    """Return buttons for what the personal models are compared with, the most telling for `start` first."""
    kinds = [kind for record in (clients[start], *clients.values()) for kind in references(record)]
    return choice("reference", "Compared with", {kind: REFERENCES[kind] for kind in dict.fromkeys(kinds)})


def _selected(clients: Averages) -> Safe | None:
    most = max(len(record.clients) for record in clients.values())
    if most <= draw.MOST_POINTS:
        return None
    return note(
        f"Of {most:,} clients, the figures show {draw.MOST_POINTS:,} chosen at random; the tables count all."
    )


def document(title: str, body: Safe, figures: dict[str, Figure], *more: str) -> str:
    """Return a page: `body`, what script.js draws in its places, and `more` scripts.

    plotly.js, nearly five megabytes, travels compressed; script.js unpacks it in the browser.
    """
    library = import_module("plotly.offline").get_plotlyjs()
    scripts = (_file("script.js"), *more)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy((library, *scripts))}">',
            f"<title>{text(title)}</title>",
            f"<style>{_file('style.css')}</style>",
            '<button type="button" id="theme" aria-label="Switch between light and dark">◐</button>',
            f"<main>{body}<footer>{MARK}. This page is complete: it loads nothing.</footer></main>",
            embedded("figures", figures),
            f'<script type="text/plain" id="plotly">{_packed(library)}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</html>",
            "",
        ]
    )


@cache
def _packed(library: str) -> str:
    return packed(library)


def _policy(scripts: tuple[str, ...]) -> str:
    """Allow these scripts alone and no request, even if some text should not have been escaped."""
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    allowed = " ".join(f"'sha256-{h}'" for h in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


def _file(name: str) -> str:
    return resources.files("partita.report").joinpath(name).read_text(encoding="utf-8")
