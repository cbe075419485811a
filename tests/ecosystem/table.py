"""The table of docs/ecosystem.md: which foreign models are stacked, and what a user must say."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "ecosystem.md"
COLUMNS = {
    "model": "model",
    "package": "package",
    "executor": "runs",
    "difference": "difference to the loop",
    "say": "what you must say",
}
BEGIN, END = "<!-- table: make test-ecosystem -->\n", "<!-- end of table -->"
Rows = dict[str, dict[str, str]]


def read() -> Rows:
    """Return the rows of the document by model."""
    rows: Rows = {}
    for line in _table().splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[cells[0]] = dict(zip(COLUMNS, cells, strict=True))
    return rows


def write(rows: Rows) -> None:
    """Put these rows into the document; those of other models stay, in the order of the list of models."""
    from foreign import MODELS

    known = {**read(), **{name: {"model": name, **row} for name, row in rows.items()}}
    lines = [COLUMNS.values(), ["---"] * len(COLUMNS)]
    lines += [[known[name][column] for column in COLUMNS] for name in MODELS if name in known]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    PAGE.write_text(PAGE.read_text().replace(_table(), text))


def _table() -> str:
    match = re.search(f"{re.escape(BEGIN)}(.*?){re.escape(END)}", PAGE.read_text(), re.DOTALL)
    assert match, f"{PAGE.name} has no place for the table"
    return match[1]
