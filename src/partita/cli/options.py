"""Options of the commands; those that `run`, `compare` and `split` share are declared once."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from partita.cli import listing
from partita.engine.settings import Settings, declarations


def path(text: str) -> Path:
    """Return a path as it was written. An empty one, of a variable that is not set, is refused."""
    if not text:
        raise typer.BadParameter("expected a path, and this is an empty text")
    return Path(text)


def meaning(setting: str) -> str:
    """Return what a setting of `federate` means, as its declaration says it, in the words of a shell."""
    text = declarations(Settings)[setting][1].text.partition("; or a function of")[0]
    text = text.replace("`out`", "--out").replace("(None: ", "(default: ")
    text = text if text.startswith("'") else text[:1].upper() + text[1:]
    return re.sub(r"'([\w.:]+)'|`([^`]*)`", r"\1\2", text) + "."


def _path_option(text: str) -> Any:
    return typer.Option(help=text, parser=path, metavar="PATH")


Seed = Annotated[int, typer.Option(help=meaning("seed"))]
Out = Annotated[
    Path | None, _path_option("New or empty folder for the results. Without it, nothing is kept.")
]
Device = Annotated[str, typer.Option(help=meaning("device"))]
Executor = Annotated[str, typer.Option(help=meaning("executor"))]
Precision = Annotated[str, typer.Option(help=meaning("precision"))]
Profile = Annotated[bool, typer.Option("--profile", help=meaning("profile"))]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Continue what is in --out after an interruption, or with more rounds."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON, and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
Page = Annotated[
    Path | None,
    _path_option("File to write. Default: report.html in the folder, or in the current one for several."),
]
SingleRecipe = Annotated[
    str,
    typer.Argument(
        help="A recipe of one experiment, such as digits, or a Python file with a function experiment().",
        autocompletion=listing.complete_recipe,
    ),
]


@dataclass(frozen=True)
class RunOptions:
    """What `run`, `compare` and `split` have in common."""

    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a setting, such as rounds=100 or algorithm.lr=0.05. Repeatable.",
            autocompletion=listing.complete_set,
        ),
    ] = None
    size: Annotated[str | None, typer.Option(help="small, medium or paper, for recipes that have sizes.")] = (
        None
    )
    seed: Annotated[
        int | None, typer.Option(help="First seed: everything random depends on it. Default: 0.")
    ] = None
    seeds: Annotated[int, typer.Option(help="Number of seeds: the first one and those after it.")] = 1
    out: Out = None
    data_dir: Annotated[
        Path | None, _path_option("Folder of the real datasets. Default: the variable PARTITA_DATA.")
    ] = None
    device: Device = "auto"
    executor: Executor = "auto"
    workers: Annotated[str | None, typer.Option(metavar="N|ray:N|ray:auto", help=meaning("workers"))] = None
    shares: Annotated[int | None, typer.Option(help=meaning("shares"))] = None
    alone: Annotated[
        bool,
        typer.Option(
            "--alone",
            help="Make one run after another. By default the runs of a method, all seeds and settings of it, "
            "and the trials of a search, train as one batch where that can be, with the results that each "
            "has alone.",
        ),
    ] = False
    memory: Annotated[str | None, typer.Option(help=meaning("memory"))] = None
    data_on: Annotated[str, typer.Option(help=meaning("data_on"))] = "auto"
    precision: Precision = "tf32"
    deterministic: Annotated[bool, typer.Option("--deterministic", help=meaning("deterministic"))] = False
    track: Annotated[
        list[str] | None, typer.Option(help="Also report to tensorboard, mlflow or wandb. Repeatable.")
    ] = None
    resume: Resume = False
    max_time: Annotated[
        str | None,
        typer.Option(
            help="Stop after the round in which this time is over, such as 90min or 2h: a checkpoint is left "
            "in --out for --resume, and the exit code is 124."
        ),
    ] = None
    as_json: Json = False
    quiet: Quiet = False

    @property
    def progress(self) -> bool | None:
        """False where no progress bar is wanted; None leaves it to the terminal."""
        return False if self.as_json or self.quiet else None


def takes_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the fields of RunOptions as options; it receives them as one argument, `options`."""
    hints = get_type_hints(RunOptions, include_extras=True)
    shared = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(RunOptions)
    ]
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.name != "options"]

    @functools.wraps(command)
    def called(**arguments: Any) -> None:
        options = RunOptions(**{p.name: arguments.pop(p.name) for p in shared})
        command(**arguments, options=options)

    called.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in (*own, *shared)}
    return called
