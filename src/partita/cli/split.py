"""`partita split`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from partita.cli import listing, screen
from partita.cli.common import (
    Ask,
    announcer,
    bar,
    leave,
    show_diverged,
    stoppable,
    trackers,
)
from partita.cli.options import (
    DataDir,
    Deterministic,
    Device,
    Executor,
    MaxTime,
    Memory,
    Out,
    Precision,
    Quiet,
    Resume,
    Seeds,
    Set,
    Size,
    Track,
)
from partita.core import check
from partita.engine.store.files import json_text
from partita.recipes import Experiment, Study
from partita.recipes import Table as Figure
from partita.recipes.advice import (
    LEGEND,
    Split,
    advice,
    figures,
    table,
    text,
)
from partita.recipes.splits import candidates, names, splits
from partita.recipes.study import run_study
from partita.recipes.tables import Runs
from partita.recipes.versus import separate
from partita.report import compare


def split(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A recipe of one experiment, such as digits, or a Python file with experiment().",
            autocompletion=listing.complete_recipe,
        ),
    ],
    parts: Annotated[
        str | None,
        typer.Option(
            help="Parts to try, separated by commas: input, output, adapter, norm, a pattern such as "
            "'head.*', or several together as input+norm. Without it: those that the model has."
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="A method with a personal part; a call sets options: fedsim(personal_lr=0.1). "
            "It takes the other options of the recipe's own method."
        ),
    ] = "fedalt",
    rounds: Annotated[
        int | None, typer.Option(help="Rounds of each run, in place of the recipe's: fewer are quicker.")
    ] = None,
    seeds: Seeds = 1,
    solver_steps: Annotated[
        int,
        typer.Option(help="Steps in which clients fit their part, to see what is left for the shared one."),
    ] = 20,
    set_: Set = None,
    size: Size = None,
    seed: Annotated[int | None, typer.Option(help="The first seed.")] = None,
    out: Out = None,
    data_dir: DataDir = None,
    device: Device = "auto",
    executor: Executor = "auto",
    memory: Memory = None,
    precision: Precision = "tf32",
    deterministic: Deterministic = False,
    track: Track = None,
    resume: Resume = False,
    max_time: MaxTime = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all figures and the advice as JSON and nothing else.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Which part of the model should be personal? A short run for each candidate, a table, a recommendation.

    The two ends are always among them: nothing personal (one global model, `fedavg`) and everything (each
    client alone, `local`). For each split: the score, the worst tenth of the clients, who is hurt, the share
    of parameters that is personal, the memory that a client needs, and how much is left to learn for the
    shared part once every client has fitted its own (near zero: personalize less).

    Example: `partita split digits --rounds 30 --out runs/split`
    """
    ask = Ask.of(recipe, set_, size, seed, seeds, data_dir)
    wanted = separate(parts or "")
    first = _experiment(ask, ask.seeds[0])
    found, remarks = candidates(first, wanted)

    asked: dict[str, Any] = {"method": method, "rounds": rounds, "solver_steps": solver_steps}
    plan = splits(first, wanted, **asked)  # what is wrong is said before anything else

    def study(number: int) -> Study:
        return plan if number == ask.seeds[0] else splits(_experiment(ask, number), wanted, **asked)

    announce = announcer(as_json, quiet)
    for remark in remarks:
        announce(remark)
    with stoppable(out, max_time):
        runs, _ = run_study(
            study,
            ask.seeds,
            about={**ask.about, "parts": wanted, **asked},
            out=out,
            resume=resume,
            announce=announce,
            listen=partial(trackers, track),
            device=device,
            executor=executor,
            memory=memory,
            precision=precision,
            deterministic=deterministic,
            progress=bar(as_json, quiet),
            max_time=max_time,
        )
    rows = figures(runs, names(found))
    _show(runs, rows, remarks, as_json=as_json)
    if out is not None and not as_json:
        typer.echo(f"Results in {out}: open {out}/report.html; tables.md")
    leave(run for seeds in runs.values() for run in seeds)


def _experiment(ask: Ask, seed: int) -> Experiment:
    made = ask.build(seed)
    if not isinstance(made, Experiment):
        raise check.fail("recipe", ask.recipe, "a recipe of one experiment; a study is run by `partita run`")
    return made


def _show(runs: Runs, rows: Sequence[Split], remarks: Sequence[str], *, as_json: bool) -> None:
    taken, diverged = advice(runs, rows), show_diverged(runs, as_json)
    if as_json:
        told = {
            "diverged": diverged,
            "splits": [row._asdict() for row in rows],
            "recommendation": taken._asdict(),
            "remarks": remarks,
            "paired": compare.paired(runs),
        }
        typer.echo(json_text(told))
        return
    console = screen.console()
    console.print(_table(table(runs, rows, taken), console.width))
    console.print(Text(LEGEND, style="dim"))
    console.print(Text(f"\n{text(taken)}\n"))


def _table(given: Figure, width: int) -> Table:
    """As narrow as it gets; deviations where there is room for them."""
    made = Table(title=escape(given.title), box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for i, column in enumerate(given.columns):
        made.add_column(escape(column.replace(" ", "\n")), justify="right" if i else "left", no_wrap=i > 0)
    for cells in given.rows:
        made.add_row(*(escape(cell if width >= 90 else cell.partition(" ±")[0]) for cell in cells))
    return made
