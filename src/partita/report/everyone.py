"""Every client under every method: the rows of a table that can be sorted and searched, and of a CSV file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from partita.engine.record import number
from partita.engine.store.files import write_csv
from partita.report import ranking
from partita.report.html import Safe, embedded, how, section, tag
from partita.report.rows import Averages, Runs, averages, checked, first, metric, over_seeds

FILE = "clients_by_method.csv"
MOST_ROWS = 20_000
"""Clients that a page holds; the file has all."""
REFERENCES = {"global": "global", "local": "alone"}


class Matrix(NamedTuple):
    """A row for each client.

    names    of the columns; the first is the client's
    heat     which of them are scores of methods, to be coloured
    changes  which of them are changes, above zero is better
    """

    names: list[str]
    heat: list[int]
    changes: list[int]
    rows: list[list[Any]]


def matrix(runs: Runs, clients: Averages, most: int | None = None, changes_too: bool = True) -> Matrix:
    """Return every client's samples, its score under each method, and its changes against the references.

    Of more than `most` clients the first.
    """
    scores = ranking.gathered(runs) if len(runs) > 1 else None
    rows: dict[str, list[Any]] = {}
    for record in clients.values():
        for name, *sizes in record.table.values(["client", "n_train", "n_test"]):
            if name not in rows and len(rows) != most:
                rows[name] = [name, *map(number, sizes)]
    names, order = ["client", "train", "test"], list(rows)
    heat, changes = list[int](), list[int]()
    if scores is not None:
        for label, values in scores.methods.items():
            heat.append(len(names))
            names.append(label)
            _extend(rows, dict(zip(scores.names, ranking.over_seeds(values).tolist())))
    else:
        [record] = clients.values()
        for model, name in (("local", "alone"), ("global", "global"), ("personal", "personal")):
            heat.append(len(names))
            names.append(name)
            _extend(rows, dict(zip(record.names, record.scores(model).tolist())))
    for label, record in clients.items() if changes_too else ():
        start = f"{label}: " if len(runs) > 1 else ""
        for kind, other in REFERENCES.items():
            gains = record.gains(kind)
            if np.isfinite(gains).any() and np.nan_to_num(gains).any():
                changes.append(len(names))
                names += [f"{start}change vs {other}", f"{start}worse vs {other} beyond chance"]
                _extend(rows, dict(zip(record.names, gains.tolist())))
                flags = record.table.numbers(f"hurt_vs_{kind}")
                _extend(rows, dict(zip(record.names, flags.tolist())))
    return Matrix(names, heat, changes, [rows[name] for name in order])


def _extend(rows: dict[str, list[Any]], values: dict[str, float]) -> None:
    for name, row in rows.items():
        row.append(number(values.get(name)))


def everyone(runs: Runs, clients: Averages) -> Safe | None:
    """Return the section with the table of all clients; script.js fills it in, sorts and searches it."""
    found = matrix(runs, clients, MOST_ROWS, changes_too=len(runs) == 1)
    if not found.rows:
        return None
    drawn = found._replace(rows=[[_short(x) for x in row] for row in found.rows])
    content = {**drawn._asdict(), "up": first(runs).higher_is_better, "file": FILE}
    beyond = " Beyond chance: 1 where the paired test names the client." if found.changes else ""
    words = (
        f"Test {metric(runs)} of every client. A score is the stronger coloured the farther it is from the "
        "mean of the client's scores: blue is better, orange worse. A heading sorts, and once more the other "
        f"way.{beyond}{over_seeds(runs)}"
    )
    full = len(found.rows) == MOST_ROWS
    more = f" Of very many clients the first {MOST_ROWS:,} are here; clients.csv has all." if full else ""
    return section(
        "everyone",
        "Every client",
        tag(
            "div",
            tag("input", type="search", placeholder="find a client", aria_label="find a client", id="find"),
            tag("button", "download as CSV", type="button", id="download"),
            tag("span", id="shown", role="status"),
            class_="choices",
        ),
        tag("div", tag("table", id="matrix"), class_="scroll", tabindex="0"),
        tag("button", "show more", type="button", id="more", hidden=""),
        embedded("rows", content),
        how(words + more),
    )


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def write_everyone(runs: Runs, path: Path) -> None:
    """Write the table of all clients as a CSV file."""
    runs = checked(runs)
    found = matrix(runs, averages(runs))
    write_csv(path, (["" if x is None else x for x in row] for row in found.rows), found.names)
