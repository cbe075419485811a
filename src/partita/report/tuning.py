"""The page of a search for options: what was tried, what each option did, and how much the budget gained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from partita.report import figures as draw
from partita.report.figures import Figure, Trace
from partita.report.html import Safe, grid, how, join, note, panel, section, table, tag
from partita.report.page import document
from partita.report.words import shorten

Row = Mapping[str, Any]
"""A trial: label, number, state, score, options, seconds, reason."""
MARKS = {"complete": "circle", "pruned": "x-thin-open"}


def page(
    trials: Sequence[Row],
    found: tuple[Sequence[str], Sequence[Sequence[str]], str],
    log: Mapping[tuple[str, str], bool],
    budget: int,
) -> str:
    """Return the page as HTML.

    trials  in the order in which they ran
    found   the table of what was found: head, rows, a note
    log     whether an option, by (label, option), was searched on a logarithmic scale
    """
    labels = list(dict.fromkeys(row["label"] for row in trials))
    metric = next((row["metric"] for row in trials if row["metric"]), "score")
    figures = draw.kept(
        {
            "best": _best(trials, labels, metric),
            **{
                _name(labels, label, option): _influence(trials, labels, label, option, metric, scale)
                for (label, option), scale in log.items()
            },
        }
    )
    head, rows, words = found
    title = f"Tuning of {', '.join(labels)}"
    top = tag(
        "header",
        tag("p", "Partita tuning", class_="eyebrow"),
        tag("h1", shorten(title, 120)),
        tag(
            "p",
            f"Up to {budget} trials of each method, judged by the mean validation {metric} of the clients' "
            "own models. No test sample was looked at.",
            class_="lead",
        ),
        table(head, rows, words=(0, len(head) - 1)),
        note(words),
        id="summary",
    )
    return document(
        title, join([top, _budget(figures), *_options(figures, labels, log), _trials(trials)]), figures
    )


def _budget(figures: Mapping[str, Figure]) -> Safe | None:
    if "best" not in figures:
        return None
    words = "The best score so far after each trial. Where a line still rises, a larger budget may find more."
    return section("budget", "Best so far", grid([panel("best", "Best validation score so far", words)]))


def _options(
    figures: Mapping[str, Figure], labels: Sequence[str], log: Mapping[tuple[str, str], bool]
) -> list[Safe]:
    sections = []
    for i, label in enumerate(labels):
        panels = [
            panel(name, option, "A point is a trial; a cross was ended early, at its last score.")
            for of, option in log
            if of == label and (name := _name(labels, label, option)) in figures
        ]
        if panels:
            sections.append(section(f"options-{i}", f"{label}: score against each option", grid(panels)))
    return sections


def _trials(trials: Sequence[Row]) -> Safe:
    head = ("method", "trial", "state", "validation score", "options", "seconds")
    rows = [
        (
            row["label"],
            row["number"] + 1,
            row["state"] + (f": {row['reason']}" if row["reason"] else ""),
            "-" if row["score"] is None else f"{row['score']:.4f}",
            ("" if row["number"] else "as given: ")
            + ", ".join(f"{k}={_value(v)}" for k, v in row["options"].items()),
            f"{row['seconds']:.1f}",
        )
        for row in trials
    ]
    return section(
        "trials",
        "All trials",
        table(head, rows, words=(0, 2, 4)),
        how("The first trial of a method has the options that it was given."),
    )


def _best(trials: Sequence[Row], labels: Sequence[str], metric: str) -> Figure | None:
    traces: list[Trace] = []
    for i, label in enumerate(labels):
        x, y = [], list[float]()
        for row in trials:
            if row["label"] == label and (y or row["state"] == "complete"):
                better = max if row["higher_is_better"] else min
                scores = [*y[-1:], *([row["score"]] if row["state"] == "complete" else [])]
                y.append(better(scores))
                x.append(row["number"] + 1)
        if x:
            traces.append({**draw.line(label, draw.colour(i), draw.dash(i)), "x": x, "y": y})
    return draw.overlay(traces, draw.titled("trial"), draw.titled(f"validation {metric}")) if traces else None


def _influence(
    trials: Sequence[Row], labels: Sequence[str], label: str, option: str, metric: str, log: bool
) -> Figure | None:
    colour, traces = draw.colour(labels.index(label)) if label in labels else "0", list[Trace]()
    for state, symbol in MARKS.items():
        rows = [
            row
            for row in trials
            if (row["label"], row["state"]) == (label, state)
            and option in row["params"]
            and row["score"] is not None
        ]
        if rows:
            shown = [row["options"].get(option, row["params"][option]) for row in rows]
            place = [_place(value) for value in shown]
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": state,
                    "x": place,
                    "y": [row["score"] for row in rows],
                    "customdata": [[row["number"] + 1] for row in rows],
                    "hovertemplate": "trial %{customdata[0]}<br>%{x}<br>%{y:.4f}<extra></extra>",
                    "marker": {"color": f"@{colour}", "symbol": symbol, "size": 9, "line": {"width": 2}},
                }
            )
    if not traces:
        return None
    axis = draw.titled(f"{option}{' (log scale)' if log else ''}")
    axis |= {"type": "log", "tickformat": "~g"} if log else {}
    yaxis = draw.titled(f"validation {metric}")
    return {"data": traces, "layout": {"hovermode": "closest", "xaxis": axis, "yaxis": yaxis}}


def _place(value: Any) -> Any:
    """Return a number, the size of a rate, or the text of anything else."""
    value = value.get("lr", value) if isinstance(value, Mapping) else value
    return value if isinstance(value, int | float) and not isinstance(value, bool) else escape(str(value))


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _name(labels: Sequence[str], label: str, option: str) -> str:
    return f"option-{labels.index(label) if label in labels else 'x'}-{option}"
