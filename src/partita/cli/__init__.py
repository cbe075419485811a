"""The command line. Each file here holds a few commands; this one puts them together."""

from __future__ import annotations

import sys
import warnings
from typing import Any, NoReturn

import typer

from partita.cli import compare as comparing
from partita.cli import listing
from partita.cli import run as running
from partita.cli import split as splitting
from partita.cli.bench import command as benching
from partita.cli.process import keep_freed_memory
from partita.core import early

app = typer.Typer(
    help="Personalized federated learning among clients that differ.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

app.command()(running.demo)
app.command()(running.run)
app.command()(comparing.compare)
app.command()(splitting.split)
app.command()(comparing.report)
app.command("list")(listing.list_)
app.command()(listing.show)
app.command()(benching.bench)


def main() -> None:
    """Entry point: errors of the user are one line and exit code 2."""
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
    """What typer finds wrong with the arguments knows its message; its class has no public name."""
    message = getattr(error, "format_message", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()  # type: ignore[attr-defined]
    elif message is not None:
        typer.echo(f"partita: {' '.join(message().split())} (try --help)", err=True)
    elif isinstance(error, MemoryError) or "allocate memory" in str(error):
        typer.echo(
            "partita: not enough memory for what was asked: fewer clients, or a smaller model", err=True
        )
    elif isinstance(error, ValueError | OSError):
        text = " ".join(str(error).split()) or type(error).__name__
        typer.echo(f"partita: {text}", err=True)
    else:
        raise error
    sys.exit(2)


def _warning(message: Warning | str, *_: Any) -> None:
    typer.echo(f"partita: warning: {message}", err=True)
