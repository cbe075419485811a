"""What `run` and `compare` have in common: what was asked for, and how to show what came of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from partita.cli import screen, tables
from partita.core import check
from partita.engine.callbacks import Callback
from partita.engine.description import describe
from partita.engine.divergence import headlines, learned_nothing
from partita.engine.record import Record
from partita.engine.stopping import Stopped, Terminated, terminable
from partita.engine.store.files import json_text, plain
from partita.recipes import Experiment, Study, Table, find
from partita.recipes.experiment import build
from partita.recipes.expressions import parse
from partita.report import compare
from partita.track import tracker

NOTHING_LEARNED, OUT_OF_TIME = 1, 124
"""Exit codes beside 0, 2 and 128 + the number of a signal; 124 is that of `timeout`."""
MOST_SEEDS = 10_000


@dataclass(frozen=True)
class Ask:
    """A recipe, its settings and its seeds."""

    recipe: str
    make: Callable[..., Any]
    settings: Mapping[str, Any]
    seeds: tuple[int, ...]

    @staticmethod
    def of(
        recipe: str,
        assignments: Sequence[str] | None,
        size: str | None,
        seed: int | None,
        seeds: int,
        data_dir: Path | None,
    ) -> Ask:
        """From the options of a command."""
        if data_dir is not None:
            if not data_dir.is_dir():
                raise check.fail("--data-dir", str(data_dir), "a folder that exists")
            os.environ["PARTITA_DATA"] = str(data_dir)
        settings = parse(list(assignments or ()))
        if size is not None:
            settings["size"] = size
        first = settings.pop("seed", 0) if seed is None else seed
        check.integer("--seeds", seeds, low=1, high=MOST_SEEDS)
        check.integer("seed", first, low=0, high=check.LARGEST - seeds)
        return Ask(recipe, find(recipe), settings, tuple(range(first, first + seeds)))

    def build(self, seed: int) -> Experiment | Study:
        """What the recipe makes of the settings, for a seed."""
        made: Experiment | Study = build(self.make, {**self.settings, "seed": seed})
        return made

    @property
    def about(self) -> dict[str, Any]:
        """For study.json."""
        return {"recipe": self.recipe, "settings": plain(describe(self.settings))}


def trackers(names: Sequence[str] | None, folder: Path | None) -> list[Callback]:
    """The callbacks of --track."""
    return [tracker(name, folder) for name in names or ()]


def announcer(as_json: bool, quiet: bool) -> Callable[[str], None]:
    """Says which run of a study begins."""
    return (lambda text: None) if as_json or quiet else (lambda text: typer.echo(text, err=True))  # noqa: ARG005


def show_study(
    runs: Mapping[str, Sequence[Record]], figures: Sequence[Table], *, as_json: bool, out: Path | None
) -> None:
    """Scores of all variants, the comparison client by client, the study's own tables."""
    rows, pairs = (compare.table(runs), compare.paired(runs)) if runs else ([], [])
    told = show_diverged(runs, as_json)
    if as_json:
        found = {"diverged": told, "table": rows, "paired": pairs, "tables": [t._asdict() for t in figures]}
        typer.echo(json_text(found))
        return
    console = screen.console()
    if runs:
        console.print(tables.comparison(rows, console.width))
        if pairs:
            console.print(tables.pairs(pairs))
    for figure in figures:
        console.print(tables.figure(figure))
    if out is not None:
        typer.echo(f"Results in {out}: " + (f"open {out}/report.html" if runs else "tables.md"))


def bar(as_json: bool, quiet: bool) -> bool | None:
    """No progress bar for machines; else whatever the terminal can show."""
    return False if as_json or quiet else None


def show_diverged(runs: Mapping[str, Sequence[Record]], as_json: bool) -> list[str]:
    """What must be read before all figures: that training diverged. Beside JSON, on the error stream."""
    told = headlines(runs)
    console = screen.console(stderr=as_json)
    for words in told:
        console.print(Text(words, style="bold red"))
    return told


def leave(runs: Iterable[Record]) -> None:
    """End the command; a run that has learned nothing does not look like success."""
    if learned_nothing(runs):
        raise typer.Exit(NOTHING_LEARNED)


@contextlib.contextmanager
def stoppable(out: Path | None, max_time: str | None = None) -> Iterator[None]:
    """Ctrl-C, SIGTERM, SIGHUP and the end of --max-time say how to go on."""
    left = "nothing was kept: no --out" if out is None else f"go on with --out {out} --resume"
    try:
        with terminable():
            yield
    except KeyboardInterrupt:
        _say(f"partita: stopped; {left}")
        raise typer.Exit(130) from None
    except Terminated as end:
        _say(f"partita: stopped by a signal; {left}")
        raise typer.Exit(int(end.code or 0)) from None
    except Stopped as end:
        _say(f"partita: stopped {end.where} after --max-time {max_time}; {left}")
        raise typer.Exit(OUT_OF_TIME) from None


def _say(text: str) -> None:
    """To whoever still reads it: after SIGHUP there may be no terminal, which is no reason to fail."""
    try:
        typer.echo(text, err=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what is left to flush at the end goes nowhere
