"""The whole page: one file that opens without a network."""

from __future__ import annotations

import base64
import hashlib
from importlib import import_module, resources

from partita.engine.store.output import MARK
from partita.report import compare
from partita.report import figures as draw
from partita.report.cost import cost
from partita.report.devices import devices
from partita.report.figures import Figure
from partita.report.header import header, what_ran
from partita.report.html import (
    Safe,
    choice,
    data,
    figure,
    how,
    join,
    section,
    tag,
    text,
)
from partita.report.hurt import hurt
from partita.report.measures import measures
from partita.report.rows import (
    Means,
    Runs,
    checked,
    differs,
    higher_is_better,
    means,
    metric,
    over_seeds,
    references,
)
from partita.report.settings import settings
from partita.report.time import time

AGAINST = {"global": "the global model", "local": "training alone"}


def page(runs: Runs, title: str | None = None) -> str:
    """The report as HTML."""
    runs = checked(runs)
    higher, clients = higher_is_better(runs), means(runs)
    followed, measured = measures(runs)
    timed, clocked = time(runs, clients)
    drawn = draw.kept(
        {
            "curves": draw.curves(runs, metric(runs)),
            "losses": draw.losses(runs),
            "clients": draw.scatter(clients, higher),
            "violins": draw.violins(clients, higher),
            "violins_train": draw.violins(clients, higher, "_train"),
        }
    )
    bars, classes = devices(runs)
    figures = drawn | followed | timed | bars
    start = _start(runs, clients, higher)
    body = join(
        [
            header(runs, clients, title),
            _curves(runs, figures),
            clocked,
            _clients(clients, higher, figures, start, over_seeds(runs)),
            _distribution(clients, higher, figures, start),
            hurt(runs, clients),
            classes,
            measured,
            cost(runs),
            settings(runs),
        ]
    )
    return document(title or what_ran(runs), body, figures)


def _curves(runs: Runs, figures: dict[str, Figure]) -> Safe:
    if not figures.keys() & {"curves", "losses"}:
        return section("curves", "Learning curves", tag("p", "No evaluation was recorded."))
    band = " Bands are one standard deviation over the seeds." if _several_seeds(runs) else ""
    words = "Solid: each client's own model. Dashed: one global model. Dotted: what clients reach alone."
    words += " Equal lines are drawn once." if len(runs) > 1 else ""
    return section(
        "curves",
        "Learning curves",
        choice("axis", "Against", {"round": "rounds", "seconds": "seconds"}),
        _grid(figures, {"curves": "test score against rounds", "losses": "training loss against rounds"}),
        how(words + band),
    )


def _start(runs: Runs, means: Means, higher: bool) -> str:
    """The label to show first: the best, or another where the best one's changes are all zero."""
    best: list[str] = [row["label"] for row in compare.table(runs) if row["best"]]
    order = [*best, *means]
    telling = (x for x in order if any(differs(means[x], k, higher) for k in ("global", "local")))
    return next(telling, order[0])


def _clients(means: Means, higher: bool, figures: dict[str, Figure], start: str, seeds: str) -> Safe:
    name = "What each client gains or loses"
    if "clients" not in figures:
        return section("clients", name, tag("p", "No client has two scores to compare."))
    labels = {str(i): label for i, label in enumerate(means)} if len(means) > 1 else {}
    first = str(list(means).index(start))
    words = (
        "A point is a client. Above the line its personal model is better than the reference, below it is "
        "worse. Clients at the same point stand side by side." + seeds
    )
    return section(
        "clients",
        name,
        tag("div", choice("label", "Of", labels, first), _reference(means, higher, start), class_="choices"),
        figure("clients", "each client's change against its number of training samples"),
        how(words),
        _selected(means),
    )


def _distribution(means: Means, higher: bool, figures: dict[str, Figure], start: str) -> Safe:
    name = "How the changes are spread"
    if "violins" not in figures:
        return section("distribution", name, tag("p", "No client has two scores to compare."))
    places = {"violins": "On test samples", "violins_train": "On training samples"}
    words = (
        "The wider, the more clients changed by that much. The box holds the middle half of the clients, its "
        "line is the median; the ends are the largest loss and the largest gain."
    )
    shown = _grid(figures, places, headed=True)
    return section("distribution", name, _reference(means, higher, start), shown, how(words))


def _grid(figures: dict[str, Figure], places: dict[str, str], headed: bool = False) -> Safe:
    """The figures that there are, side by side where there is room."""
    there = {name: label for name, label in places.items() if name in figures}
    headed = headed and len(there) > 1
    cells = [
        tag("div", tag("h3", label) if headed else None, figure(name, label)) for name, label in there.items()
    ]
    return tag("div", *cells, class_="grid")


def _reference(means: Means, higher: bool, start: str) -> Safe | None:
    """Buttons for what the personal models are compared with, the most telling for `start` first."""
    found = [kind for rows in (means[start], *means.values()) for kind in references(rows, higher)]
    return choice("reference", "Compared with", {kind: AGAINST[kind] for kind in dict.fromkeys(found)})


def _selected(means: Means) -> Safe | None:
    most = max(map(len, means.values()))
    if most <= draw.MOST_POINTS:
        return None
    words = (
        f"Of {most:,} clients, the figures show {draw.MOST_POINTS:,} chosen at random; the tables count all."
    )
    return tag("p", words, class_="how")


def _several_seeds(runs: Runs) -> bool:
    return any(len(seeds) > 1 for seeds in runs.values())


def document(title: str, body: Safe, figures: dict[str, Figure], *more: str) -> str:
    """A page whose figures are drawn in its places for them, and then `more` scripts."""
    scripts = (import_module("plotly.offline").get_plotlyjs(), _file("script.js"), *more)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">',
            f"<title>{text(title)}</title>",
            f"<style>{_file('style.css')}</style>",
            '<button type="button" id="theme" aria-label="Switch between light and dark">◐</button>',
            f"<main>{body}<footer>{MARK}. This page is complete: it loads nothing.</footer></main>",
            f'<script type="application/json" id="figures">{data(figures)}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</html>",
            "",
        ]
    )


def _policy(scripts: tuple[str, ...]) -> str:
    """Only these scripts run and nothing is fetched, even if some text should have slipped through."""
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    allowed = " ".join(f"'sha256-{h}'" for h in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


def _file(name: str) -> str:
    return resources.files("partita.report").joinpath(name).read_text(encoding="utf-8")
