"""Tables in a terminal: nothing is cut, whatever its width."""

from __future__ import annotations

import functools
import io
from typing import Any

import pytest
from rich.console import Console

from partita.cli import catalogue, listing, tables
from partita.recipes import Table
from partita.recipes.embracing import capacity_tables

capacities = functools.cache(lambda: capacity_tables(0))
MANY = Table(
    "Test accuracy of the global model, %, in mixes of devices and with many words in its title (Tables 3-6)",
    ("case", *(f"column{i} [x]" for i in range(14))),
    [(str(case), *(f"{case}.{i:02d} ± 0.12" for i in range(14))) for case in range(3)],
    "A note that is longer than the screen is wide, which wraps as the title does, and loses nothing at all.",
)


def printed(*parts: Any, width: int) -> str:
    file = io.StringIO()
    console = Console(width=width, file=file, emoji=False)
    for part in parts:
        console.print(part) if not callable(part) else part(console)
    return file.getvalue()


@pytest.mark.parametrize("width", [40, 80, 120, 1000])
def test_no_word_of_a_study_s_table_is_broken(width: int) -> None:
    for table in (MANY, *capacities()):
        text = printed(tables.figure(table), width=width)
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
        words = " ".join([table.title, table.note, *table.columns, *(c for row in table.rows for c in row)])
        assert set(words.split()) <= {*text.split(), *text.replace(", part ", " part ").split()}


def test_a_wide_table_comes_in_parts_that_name_their_rows() -> None:
    text = printed(tables.figure(MANY), width=80)
    parts = [line for line in text.splitlines() if line.split() and line.split()[0] == "case"]
    assert len(parts) > 1
    assert "part 1 of" in text
    assert "part 1 of" not in printed(tables.figure(MANY), width=400)
    whole, weak = capacities()[0], printed(tables.figure(capacities()[0]), width=80)
    assert weak.count("moderate") == 2 * sum(row[1] == "moderate" for row in whole.rows)


@pytest.mark.parametrize("width", [60, 80, 100, 120, 140, 160, 200])
def test_no_score_of_a_comparison_is_cut(width: int) -> None:
    score = {"mean": 0.91234, "std": 0.01234}
    chance = {"beyond_chance": 12.3}
    row = {
        "label": "fedalt personal=output, local steps 20, lr 0.05",
        "seeds": 3,
        "metric": "accuracy",
        "diverged": True,
        **dict.fromkeys(("personal", "local", "global", "worst_tenth"), score),
        "hurt_vs_global": 12.3,
        "hurt_vs_local": 33.3,
        "scored": 1000,
        "interval": (0.9, 0.92),
        "chance_vs_global": chance,
        "chance_vs_local": chance,
        "epochs": 123.0,
        "seconds": 1234.5,
        "training": "still rising at the end",
    }
    text = printed(tables.comparison([row, {**row, "label": "b"}], None, width), width=width)
    assert "…" not in text
    assert text.count("0.9123 ± 0.0123") >= 2
    assert ("1234.5" in text) == (width >= 200)


def test_methods_by_other_names_lose_nothing_on_80_columns() -> None:
    """An expression such as that of FFA-LoRA is longer than a line."""
    table = listing._table(catalogue.known(), catalogue.ELSEWHERE, 28)
    narrow, wide = (sorted("".join(printed(table, width=w).split())) for w in (80, 1000))
    assert narrow == wide


def test_pages_of_the_catalogue_lose_nothing_on_80_columns() -> None:
    for kind, chapter in catalogue.KINDS.items():
        entries = catalogue.entries(kind)
        draw = [listing._table(entries, chapter.title, 28)]
        for entry in entries:
            facts = catalogue._facts(kind, chapter, entry["name"], chapter.parts()[entry["name"]])
            draw.append(lambda console, facts=facts: listing._page(console, facts))
        narrow, wide = (sorted("".join(printed(*draw, width=w).split())) for w in (80, 1000))
        assert narrow == wide
