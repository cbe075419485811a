"""`partita split`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import JustifyMethod
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from partita.cli import screen
from partita.cli.common import Request, announcer, leave_study, show_diverged
from partita.cli.options import RunOptions, SingleRecipe, takes_run_options
from partita.engine.store.files import json_text
from partita.recipes import Study
from partita.recipes import Table as Figure
from partita.recipes.advice import LEGEND, Split, advice, figures, table, text
from partita.recipes.splits import candidates, names, splits
from partita.recipes.tables import Runs
from partita.recipes.versus import separate
from partita.report import compare


@takes_run_options
def split(
    recipe: SingleRecipe,
    parts: Annotated[
        str | None,
        typer.Option(
            help="Parts to try, separated by commas: input, output, adapter, norm, a pattern such as "
            "'head.*', or several together as input+norm. Default: those of the first four that it has."
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="A method with a personal part; a call sets options, as in fedsim(personal_lr=0.1). Other "
            "options are those of the recipe's own method."
        ),
    ] = "fedalt",
    rounds: Annotated[
        int | None, typer.Option(help="Rounds of each run. Default: those of the recipe; fewer are quicker.")
    ] = None,
    solver_steps: Annotated[
        int,
        typer.Option(help="Steps in which each client fits its part, to measure what is left to learn."),
    ] = 20,
    *,
    options: RunOptions,
) -> None:
    """Find out which part of the model should be personal: a short run for each candidate, and advice.

    The two extremes are always among the candidates: nothing personal (one global model, `fedavg`) and
    everything (each client alone, `local`). For each split, the table has the score, the worst tenth of the
    clients, how many are hurt, the share of personal parameters, the memory that a client needs, and how much
    is left to learn for the shared part once every client has fitted its own (near zero: personalize less).

    Example: `partita split digits --rounds 30 --out runs/split`
    """
    request = Request(recipe, options)
    wanted = separate(parts or "")
    first = request.experiment(request.seeds[0])
    chosen, remarks = candidates(first, wanted)
    asked: dict[str, Any] = {"method": method, "rounds": rounds, "solver_steps": solver_steps}
    plan = splits(first, wanted, **asked)  # refuses what is wrong before anything is printed

    def study(seed: int) -> Study:
        return plan if seed == request.seeds[0] else splits(request.experiment(seed), wanted, **asked)

    announce = announcer(options.as_json, options.quiet)
    for remark in remarks:
        announce(remark)
    runs, _ = request.run_study(study, {"parts": wanted, **asked})
    _show(runs, figures(runs, names(chosen)), remarks, options.as_json)
    if options.out is not None and not options.as_json:
        typer.echo(f"Results in {options.out}: open {options.out}/report.html; tables.md")
    leave_study(runs)


def _show(runs: Runs, rows: Sequence[Split], remarks: Sequence[str], as_json: bool) -> None:
    advised, diverged = advice(runs, rows), show_diverged(runs, as_json)
    if as_json:
        content = {
            "diverged": diverged,
            "splits": [row._asdict() for row in rows],
            "recommendation": advised._asdict(),
            "remarks": remarks,
            "paired": compare.paired(runs),
        }
        typer.echo(json_text(content))
        return
    console = screen.console()
    console.print(_table(table(runs, rows, advised), console.width))
    console.print(Text(LEGEND, style="dim"))
    console.print(Text(f"\n{text(advised)}\n"))


def _table(figure: Figure, width: int) -> Table:
    """Return a table as narrow as possible, with deviations where there is room for them."""
    shown = Table(title=escape(figure.title), box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for i, column in enumerate(figure.columns):
        justify: JustifyMethod = "right" if i else "left"
        shown.add_column(escape(column.replace(" ", "\n")), justify=justify, no_wrap=i > 0, overflow="fold")
    for cells in figure.rows:
        shown.add_row(*(escape(cell if width >= 90 else cell.partition(" ±")[0]) for cell in cells))
    return shown
