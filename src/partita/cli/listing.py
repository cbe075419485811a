"""`partita list`, `partita show`, and the completion of the shell."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from partita import attack, augment, transforms
from partita.algorithms import METHODS
from partita.cli import catalogue, screen
from partita.cli.catalogue import KINDS, Facts
from partita.engine.store.files import json_text
from partita.recipes import RECIPES, Experiment
from partita.recipes.expressions import CAPACITIES, MECHANISMS, SCHEDULES

Json = Annotated[bool, typer.Option("--json", help="Print everything as JSON, and nothing else.")]


def complete_name(incomplete: str) -> list[str]:
    """Complete names for `partita show`."""
    entries = [*catalogue.entries(), *catalogue.known()]
    return sorted({e["name"] for e in entries if e["name"].startswith(incomplete)})


def complete_kind(incomplete: str) -> list[str]:
    """Complete kinds for `partita list`."""
    return [kind for kind in KINDS if kind.startswith(incomplete)]


def complete_recipe(incomplete: str) -> list[str]:
    """Complete recipes and Python files for `partita run`."""
    files = [str(path) for path in Path().glob(f"{incomplete}*.py")] if ".." not in incomplete else []
    return [name for name in RECIPES if name.startswith(incomplete)] + sorted(files)


def complete_set(incomplete: str) -> list[str]:
    """Complete keys for `--set`, and values of fields that are parts of the library, such as `attack=`."""
    choices = {
        "algorithm": sorted(name for name in METHODS if name != "pipeline"),
        "attack": attack.__all__,
        "augment": augment.__all__,
        "schedule": SCHEDULES,
        "capacity": CAPACITIES,
        "uploads": [*transforms.__all__, *MECHANISMS],
        "downloads": ["half"],
    }
    fields = [f.name for f in dataclasses.fields(Experiment) if f.name not in ("model", "data")]
    of_recipes = [k for recipe in RECIPES.values() for k in inspect.signature(recipe).parameters]
    of_methods = sorted(f"algorithm.{k}" for m in METHODS.values() for k in inspect.signature(m).parameters)
    keys = [f"{key}=" for key in (*fields, *of_recipes, *of_methods) if key != "algorithm.stages"]
    values = [f"{key}={name}" for key, names in choices.items() for name in names]
    return [text for text in dict.fromkeys([*keys, *values]) if text.startswith(incomplete)]


def list_(
    kind: Annotated[
        str | None,
        typer.Argument(help=f"One of {', '.join(KINDS)}. Default: all.", autocompletion=complete_kind),
    ] = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the names, one per line.")] = False,
) -> None:
    """List all methods, recipes, models, data, and the parts that methods are made of.

    Example: `partita list methods`
    """
    entries = catalogue.entries(kind)
    if as_json:
        typer.echo(json_text(entries))
    elif quiet:
        typer.echo("\n".join(entry["name"] for entry in entries))
    else:
        console, width = screen.console(), max(len(entry["name"]) for entry in entries)
        for each in dict.fromkeys(entry["kind"] for entry in entries):
            console.print(_table([e for e in entries if e["kind"] == each], KINDS[each].title, width))
            if each == "methods":
                console.print(_table(catalogue.known(), catalogue.ELSEWHERE, width))
        console.print("More about one of them: [bold]partita show NAME[/bold]")


def show(
    name: Annotated[
        str, typer.Argument(help="A name that `partita list` prints.", autocompletion=complete_name)
    ],
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the options, one per line.")] = False,
) -> None:
    """Explain a method or another part: equation, paper, when to use it, all options, an example.

    Example: `partita show fedalt`
    """
    pages = catalogue.facts(name)
    if as_json:
        typer.echo(json_text(pages))
        return
    for facts in pages:
        if quiet:
            for option in facts["options"]:
                typer.echo(option["name"] + ("" if option["required"] else f"={option['default']!r}"))
        else:
            _page(screen.console(), facts)


def _table(entries: list[Facts], title: str, width: int) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(min_width=width, no_wrap=True, style="bold")
    table.add_column()
    for entry in entries:
        needed = (
            f" Data: {', '.join(entry['data'])}." if entry.get("data") and entry["kind"] == "recipes" else ""
        )
        table.add_row(entry["name"], Text.assemble(entry["line"], (needed, "dim")))
    table.add_row("", "")
    return table


def _page(console: Console, facts: Facts) -> None:
    """Print everything about one part; what can be copied is never broken into lines."""
    title = KINDS[facts["kind"]].title.removesuffix("s")
    console.print(Text.assemble((facts["name"], "bold"), f"  {title}, {facts['file']}\n"), soft_wrap=True)
    for text in (facts["line"], facts["when"], _reflowed(facts["about"])):
        if text:
            console.print(Text(text), end="\n\n")
    for heading in ("equation", "paper"):
        if facts[heading]:
            _block(console, heading, facts[heading])
    if facts["options"]:
        console.print(_options(facts["options"]))
        console.print()
    for key, heading in (("get", "data"), ("python", "in Python"), ("command", "on the command line")):
        if facts[key]:
            _block(console, heading, facts[key])


def _reflowed(text: str) -> str:
    """Return paragraphs as one line each, except where columns are aligned."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(p if "  " in p else " ".join(p.splitlines()) for p in paragraphs)


def _block(console: Console, heading: str, text: str) -> None:
    console.print(Text(heading, style="bold"))
    for line in text.splitlines():
        console.print(Text(f"    {line}" if line else ""), soft_wrap=True)
    console.print()


def _options(options: list[Facts]) -> Table:
    rows = [
        (
            o["name"],
            o["type"],
            "required" if o["required"] else repr(o["default"]),
            o["range"],
            o["search"],
            o["text"],
        )
        for o in options
    ]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    columns = zip(("option", "type", "default", "range", "search", "meaning"), zip(*rows))
    filled = [(name, cells) for name, cells in columns if any(cells)]
    for name, _ in filled:
        table.add_column(name, header_style="bold", overflow="fold", no_wrap=name in ("option", "default"))
    for row in zip(*(cells for _, cells in filled)):
        table.add_row(*map(Text, row))
    return table
