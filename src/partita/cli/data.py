"""`partita data list` and `partita data get`: the real datasets of the recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn
from rich.text import Text

from partita.cli import screen
from partita.core import check
from partita.data.real import data_folder
from partita.data.sources import SOURCES, get
from partita.engine.store.files import json_text
from partita.recipes import NEEDS

app = typer.Typer(
    help="The real datasets that some recipes need: what there is, and getting it.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


def complete_dataset(incomplete: str) -> list[str]:
    """Complete names of datasets."""
    return [name for name in SOURCES if name.startswith(incomplete)]


Name = Annotated[
    str, typer.Argument(help="A name that `partita data list` prints.", autocompletion=complete_dataset)
]
Folder = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Folder of the archives. Default: the variable PARTITA_DATA, or a cache."
    ),
]


@app.command("list")
def list_(
    name: Annotated[
        str | None,
        typer.Argument(
            help="All about one dataset. Default: a line for each.", autocompletion=complete_dataset
        ),
    ] = None,
    to: Folder = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON, and nothing else.")
    ] = False,
) -> None:
    """List the real datasets: clients, samples, recipes that use them, and whether they are here.

    Example: `partita data list`
    """
    chosen = list(SOURCES) if name is None else [check.choice("name", name, SOURCES)]
    rows = [_facts(each, to) for each in chosen]
    console = screen.console()
    if as_json:
        typer.echo(json_text(rows))
        return
    for row in rows:
        here = ("here", "green") if row["here"] else ("not here", "dim")
        console.print(Text.assemble((row["name"], "bold"), "  ", here), soft_wrap=True)
        console.print(Text(f"    {row['about']}: {row['clients']}, {row['samples']}"), soft_wrap=True)
        console.print(Text(f"    recipes: {', '.join(row['recipes']) or 'none'}"), soft_wrap=True)
        for address in [row["page"]] if name is None else dict.fromkeys([row["page"], *row["from"]]):
            console.print(Text(f"    {address}", style="dim"), soft_wrap=True)
    console.print(f"\nfolder: {data_folder(to)}", soft_wrap=True, highlight=False)
    console.print(f"Get one: [bold]partita data get {name or 'NAME'}[/bold]", highlight=False)


@app.command("get")
def get_(
    name: Name,
    to: Folder = None,
    files: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="DIR", help="Convert the publishers' files in this folder; no download."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Get it again, even if it is here.")] = False,
) -> None:
    """Download a dataset, check it, and write it in the form that recipes and `pt.data.real` read.

    Example: `partita data get heart_disease`
    """
    facts = _facts(check.choice("name", name, SOURCES), to)
    if facts["here"] and not force:
        typer.echo(f"{facts['file']} is here already; --force gets it again")
        return
    console = screen.console(stderr=True)
    console.quiet = not console.is_terminal  # rich before 14.3 ends a disabled bar with an empty line
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def progress(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bars.add_task(file, total=total)
            bars.update(tasks[file], completed=done)

        path = get(name, to, files=files, progress=progress)
    typer.echo(f"{path}: {facts['samples']}, {facts['clients']}")
    if facts["recipes"]:
        elsewhere = "" if to is None else f" --data-dir {to}"
        typer.echo(f"Use it: partita run {facts['recipes'][0]}{elsewhere}")


def _facts(name: str, folder: Path | None) -> dict[str, Any]:
    source, path = SOURCES[name], data_folder(folder) / f"{name}.npz"
    return {
        "name": name,
        "about": source.about,
        "clients": source.clients,
        "samples": source.samples,
        "recipes": [recipe for recipe, (_, names) in NEEDS.items() if name in names],
        "page": source.page,
        "from": [file.url for file in source.files] or [source.page],
        "file": str(path),
        "here": path.is_file(),
        "get": f"partita data get {name}",
    }
