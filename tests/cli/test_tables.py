"""Tables in a terminal: nothing is cut, whatever its width."""

from __future__ import annotations

import functools
import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

import partita as pt
from partita.cli import catalogue, listing, split, tables, workers
from partita.cli.bench import command
from partita.cli.bench.measure import Row
from partita.engine.workers.messages import Facts
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


def letters(*parts: Any, width: int) -> str:
    """Return all that is printed, without what a frame and a broken line add; cells may change places."""
    return "".join(sorted(c for c in printed(*parts, width=width) if c.isalnum() or c in "+-.%_…"))


NAMES = tuple(f"THE_TRAGEDY_OF_KING_RICHARD_THE_SECOND_BOLINGBROKE_{i}" for i in range(4))


@pytest.mark.usefixtures("brief_baselines")
def test_long_names_of_clients_and_metrics_are_not_cut_on_80_columns() -> None:
    data = replace(pt.data.digits(clients=4, test=0.4, validation=0), names=NAMES)
    work = {"rounds": 1, "steps": 1, "batch": 8, "metric": ["balanced_accuracy", "accuracy"]}
    run = pt.federate(pt.models.mlp(64, 8, 10), data, pt.fedalt("output", lr=0.1), **work)
    summary = run.summary()
    for table in (tables.scores(run, summary), tables.further(summary), tables.gains(run)):
        assert letters(table, width=80) == letters(table, width=400)


def test_parts_machines_and_speeds_are_not_cut_on_80_columns() -> None:
    versions = {"python": "3.12.7", "torch": "2.6.0+cu124", "partita": "0.1.0"}
    facts = Facts("gpu-node-017.cluster.example.org", 64, 2**39, ("NVIDIA H100 80GB HBM3",), versions)
    row = Row("transformer", 1733.0, 202_321.0, "compiled graph", {"steps": 0.6}, 1.2e13, 0.03, one_model=1e4)
    cells = ("→ input+norm+classifier.fc2.weight", *(f"{x}.1234" for x in range(5)), "12.5%", "1.25 GB")
    names = ("part", "score", "worst tenth", "hurt vs global", "hurt vs alone", "epochs", "share", "memory")
    figure = Table("Candidate splits", names, [cells])
    shown = (workers._table([facts]), command.table([row], "cpu", "textbook loop"), split._table(figure, 80))
    for table in shown:
        assert letters(table, width=80) == letters(table, width=400)


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
