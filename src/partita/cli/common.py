"""What `run`, `compare` and `split` have in common: a request, its runs, and how they are shown."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from partita.cli import screen, tables
from partita.cli.options import RunOptions
from partita.core import check
from partita.engine.callbacks import Callback
from partita.engine.description import describe
from partita.engine.divergence import headlines, learned_nothing
from partita.engine.record import Record, read_json
from partita.engine.stopping import Stopped, Terminated, terminable
from partita.engine.store.files import json_text, plain, write_json
from partita.recipes import RECIPES, Experiment, Study, Table, find
from partita.recipes.experiment import build
from partita.recipes.expressions import parse
from partita.recipes.study import run_study
from partita.recipes.tables import Runs
from partita.report import compare, header, ranking
from partita.track import tracker
from partita.workers import requested

NOTHING_LEARNED, OUT_OF_TIME = 1, 124
"""Exit codes beside 0, 2 and 128 + the number of a signal; 124 is that of `timeout`."""
MOST_SEEDS = 10_000
RECIPE = "recipe.json"
COMPUTING = ("device", "executor", "workers", "shares", "memory", "data_on", "precision", "deterministic")
"""Options that are arguments of `federate`: what computes."""
NOT_KEPT = "Nothing is kept: with --out FOLDER there are a page, tables and checkpoints."


class Request:
    """A recipe with the options of a command."""

    def __init__(self, recipe: str, options: RunOptions) -> None:
        if options.data_dir is not None:
            if not options.data_dir.is_dir():
                raise check.fail("--data-dir", str(options.data_dir), "a folder that exists")
            os.environ["PARTITA_DATA"] = str(options.data_dir)
        settings = parse(options.set_ or [])
        if options.size is not None:
            settings["size"] = options.size
        first = settings.pop("seed", 0) if options.seed is None else options.seed
        check.integer("--seeds", options.seeds, low=1, high=MOST_SEEDS)
        check.integer("seed", first, low=0, high=check.LARGEST - options.seeds)
        requested("--workers", options.workers)  # refused before anything is written
        self.recipe, self.options, self.settings = recipe, options, settings
        self.seeds = tuple(range(first, first + options.seeds))
        self._make = find(recipe)

    def build(self, seed: int) -> Experiment | Study:
        """Return what the recipe makes of the settings, for a seed."""
        made: Experiment | Study = build(self._make, {**self.settings, "seed": seed})
        return made

    def note(self, folder: Path | None) -> None:
        """Write recipe.json into the folder of a run: how it was asked for, to ask for it again."""
        if folder is not None:
            recipe = self.recipe if self.recipe in RECIPES else str(Path(self.recipe).resolve())
            data_dir = self.options.data_dir and str(self.options.data_dir.resolve())
            asked = {"recipe": recipe, "set": self.options.set_ or [], "size": self.options.size}
            write_json(folder / RECIPE, {**asked, "seed": self.seeds[0], "data_dir": data_dir})

    @classmethod
    def noted(cls, folder: Path) -> Request:
        """Return the request that a run was made by; refuse a folder that does not tell."""
        if not (folder / RECIPE).is_file():
            allowed = "a run of `partita run`, or run.personalize(data) in Python"
            raise check.fail("RUN", str(folder), allowed, f"it has no {RECIPE}, so its method is not known")
        asked = read_json(folder / RECIPE)
        words, data_dir = asked.get("set"), asked.get("data_dir")
        if not isinstance(asked.get("recipe"), str) or not isinstance(words, list):
            raise check.fail("file", str(folder / RECIPE), "a recipe and its settings, as a run writes them")
        place = None if data_dir is None else Path(data_dir)
        options = RunOptions(set_=words, size=asked.get("size"), seed=asked.get("seed"), data_dir=place)
        return cls(asked["recipe"], options)

    def experiment(self, seed: int) -> Experiment:
        """Return the recipe's experiment; refuse a study."""
        made = self.build(seed)
        if not isinstance(made, Experiment):
            allowed = "a recipe of one experiment; a study is run by `partita run`"
            raise check.fail("recipe", self.recipe, allowed)
        return made

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `federate` that the options are."""
        names = (*COMPUTING, "resume", "out", "max_time")
        return {"progress": self.options.progress, **{name: getattr(self.options, name) for name in names}}

    def run_study(
        self, study: Callable[[int], Study], about: Mapping[str, Any], **arguments: Any
    ) -> tuple[Runs, Sequence[Table]]:
        """Run a study for all seeds; `about` is written to study.json, beside recipe and settings."""
        options = self.options
        asked = {"recipe": self.recipe, "settings": plain(describe(self.settings)), **about}
        with stoppable(options.out, options.max_time):
            return run_study(
                study,
                self.seeds,
                about=asked,
                announce=announcer(options.as_json, options.quiet),
                listen=partial(trackers, options.track),
                alone=options.alone,
                **self.arguments(),
                **arguments,
            )


def trackers(names: Sequence[str] | None, folder: Path | None) -> list[Callback]:
    """Return the callbacks of --track."""
    return [tracker(name, folder) for name in names or ()]


def announcer(as_json: bool, quiet: bool) -> Callable[[str], None]:
    """Return a function that prints progress to the error stream, or nothing."""
    return (lambda text: None) if as_json or quiet else partial(typer.echo, err=True)  # noqa: ARG005


def show_study(runs: Runs, figures: Sequence[Table], options: RunOptions) -> None:
    """Print the scores of all variants, the comparison client by client, and the study's own tables."""
    rows, pairs = (compare.table(runs), compare.paired(runs)) if runs else ([], [])
    diverged = show_diverged(runs, options.as_json)
    if options.as_json:
        content = {"diverged": diverged, "table": rows, "paired": pairs}
        typer.echo(json_text({**content, "tables": [table._asdict() for table in figures]}))
        return
    console = screen.console()
    if runs:
        where = ranking.standing(runs)
        console.print(tables.comparison(rows, where.clearly_best, console.width))
        if where.pairs:
            console.print(tables.pairs(where))
        for words in header.said(runs):
            console.print(Text(words))
    for figure in figures:
        console.print(tables.figure(figure))
    if options.out is not None:
        typer.echo(
            f"Results in {options.out}: " + (f"open {options.out}/report.html" if runs else "tables.md")
        )
    else:
        typer.echo(NOT_KEPT)


def show_diverged(runs: Runs, as_json: bool) -> list[str]:
    """Print before all figures that training diverged; beside JSON, to the error stream."""
    lines = headlines(runs)
    console = screen.console(stderr=as_json)
    for line in lines:
        console.print(Text(line, style="bold red"))
    return lines


def leave(runs: Iterable[Record]) -> None:
    """End the command with an exit code of its own if a run has learned nothing."""
    if learned_nothing(runs):
        raise typer.Exit(NOTHING_LEARNED)


def leave_study(runs: Runs) -> None:
    """End the command, as `leave`."""
    leave(run for seeds in runs.values() for run in seeds)


@contextlib.contextmanager
def stoppable(out: Path | None, max_time: str | None = None) -> Iterator[None]:
    """Say how to continue after Ctrl-C, SIGTERM, SIGHUP and the end of --max-time."""
    hint = "nothing was kept: no --out" if out is None else f"go on with --out {out} --resume"
    try:
        with terminable():
            yield
    except KeyboardInterrupt:
        _stop("stopped", hint, 130)
    except Terminated as end:
        _stop("stopped by a signal", hint, int(end.code or 0))
    except Stopped as end:
        _stop(f"stopped {end.where} after --max-time {max_time}", hint, OUT_OF_TIME)


def _stop(event: str, hint: str, code: int) -> None:
    """Print a line and exit. After SIGHUP there may be no terminal, which is no reason to fail."""
    try:
        typer.echo(f"partita: {event}; {hint}", err=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what is left to flush at the end goes nowhere
    raise typer.Exit(code) from None
