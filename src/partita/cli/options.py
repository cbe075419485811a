"""Options that several commands have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from partita.cli import listing
from partita.engine.settings import Settings, declarations
from partita.recipes import RECIPES


def path(text: str) -> Path:
    """A path as it was written; an empty one, of a variable that is not set, is not the current folder."""
    if not text:
        raise typer.BadParameter("expected a path, and this is an empty text")
    return Path(text)


def told(setting: str) -> str:
    """What a setting of `federate` means, as its declaration says it, in the words of a shell."""
    text = declarations(Settings)[setting][1].text.partition("; or a function of")[0]
    text = text.replace("`out`", "--out").replace("(None: ", "(default: ")
    text = text if text.startswith("'") else text[:1].upper() + text[1:]
    return re.sub(r"'([\w.]+)'|`([^`]*)`", r"\1\2", text) + "."


Seed = Annotated[int, typer.Option(help=told("seed"))]
Out = Annotated[
    Path | None,
    typer.Option(
        help="New or empty folder for the results; without it no run is kept.", parser=path, metavar="PATH"
    ),
]
Device = Annotated[str, typer.Option(help=told("device"))]
Executor = Annotated[
    str,
    typer.Option(help=told("executor")),
]
Memory = Annotated[str | None, typer.Option(help=told("memory"))]
Precision = Annotated[str, typer.Option(help=told("precision"))]
Deterministic = Annotated[bool, typer.Option("--deterministic", help=told("deterministic"))]
Profile = Annotated[bool, typer.Option("--profile", help=told("profile"))]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")]
MaxTime = Annotated[
    str | None,
    typer.Option(
        help="Stop after the round in which this is over, such as 90min or 2h: a checkpoint is left in "
        "--out, the exit code is 124, and --resume goes on."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the summary as JSON and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]
Size = Annotated[str | None, typer.Option(help="small, medium or paper, for recipes that have sizes.")]
Seeds = Annotated[int, typer.Option(help="How many seeds: 0, 1, ... (from --seed on).")]
DataDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the real datasets; in place of the variable PARTITA_DATA.",
        parser=path,
        metavar="PATH",
    ),
]
Track = Annotated[
    list[str] | None,
    typer.Option(help="Also report to tensorboard, mlflow or wandb; may be given several times."),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting; may be given several times.",
        autocompletion=listing.complete_set,
    ),
]
Recipe = Annotated[
    str,
    typer.Argument(
        help=f"One of: {', '.join(RECIPES)}; or a Python file with experiment().",
        autocompletion=listing.complete_recipe,
    ),
]
