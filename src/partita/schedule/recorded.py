"""Files of recorded times: lines of numbers, perhaps below a heading."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterator
from pathlib import Path

from partita.core import check


def text(field: str, path: str) -> str:
    """Return what a file holds."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # spreadsheets may begin a file with a mark
    except (OSError, ValueError) as error:
        raise check.fail(field, path, f"a readable file ({error})") from None


def digest(field: str, path: str) -> str:
    """Return what tells the content of a file from another."""
    return hashlib.sha256(text(field, path).encode()).hexdigest()[:16]


def rows(field: str, path: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines that are not empty, with their numbers, but for a heading."""
    lines = enumerate(csv.reader(text(field, path).splitlines()), start=1)
    filled = [(number, row) for number, row in lines if any(cell.strip() for cell in row)]
    yield from filled[1:] if filled and as_number(filled[0][1][-1]) is None else filled


def as_number(cell: str) -> float | None:
    """Return the number that a cell holds, if it holds one."""
    try:
        return float(cell)
    except ValueError:
        return None
