"""The command line: each file holds a few commands, and this one puts them together."""

from __future__ import annotations

import sys
import warnings
from typing import Any, NoReturn

import typer

from partita.cli import compare as comparing
from partita.cli import data as getting
from partita.cli import deploy as deploying
from partita.cli import listing, workers
from partita.cli import personalize as personalizing
from partita.cli import run as running
from partita.cli import split as splitting
from partita.cli import tune as tuning
from partita.cli.bench import command as benching
from partita.core import early
from partita.core.process import keep_freed_memory

app = typer.Typer(
    help="Personalized federated learning among clients that differ in data, speed, device size and honesty. "
    "Begin with `partita demo`; `partita COMMAND --help` explains a command and has an example.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

for command in (
    running.demo,
    running.run,
    comparing.compare,
    tuning.tune,
    splitting.split,
    personalizing.personalize,
    comparing.report,
):
    app.command()(command)
app.command("list")(listing.list_)
for command in (listing.show, benching.bench):
    app.command()(command)
app.add_typer(getting.app, name="data")
app.add_typer(workers.app, name="workers")
app.add_typer(deploying.app, name="deploy")


def main() -> None:
    """Run a command; an error of the user is one line, with exit code 2."""
    early.loaded()
    keep_freed_memory()
    warnings.showwarning = _warning  # type: ignore[assignment]
    try:
        sys.exit(app(standalone_mode=False))
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(early.STOPPED)
    except Exception as error:
        _refuse(error)


def _refuse(error: Exception) -> NoReturn:
    """Print an error of the user and exit with code 2; raise any other."""
    message = getattr(error, "format_message", None)  # of typer's own, whose class has no public name
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()  # type: ignore[attr-defined]
    elif message is not None:
        typer.echo(f"partita: {' '.join(message().split())} (try --help)", err=True)
    elif isinstance(error, MemoryError) or "allocate memory" in str(error):
        typer.echo(
            "partita: not enough memory: try fewer clients, a smaller cohort or a smaller model", err=True
        )
    elif isinstance(error, ValueError | OSError):
        text = " ".join(str(error).split()) or type(error).__name__
        typer.echo(f"partita: {text}", err=True)
    else:
        raise error
    sys.exit(2)


def _warning(message: Warning | str, *_: Any) -> None:
    typer.echo(f"partita: warning: {message}", err=True)
