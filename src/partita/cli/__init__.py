"""The command line. Each file here holds a few commands; this one puts them together."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import typer

from partita.cli import catalogue, comparing, running

app = typer.Typer(
    help="Personalized federated learning among clients that differ.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

app.command()(running.demo)
app.command()(running.run)
app.command()(comparing.compare)
app.command()(comparing.report)
app.command("list")(catalogue.list_)
app.command()(catalogue.show)


def main() -> None:
    """Entry point: errors of the user are one line and exit code 2."""
    warnings.showwarning = _warning  # type: ignore[assignment]
    try:
        app()
    except (ValueError, OSError) as error:
        typer.echo(f"partita: {error}", err=True)
        sys.exit(2)


def _warning(message: Warning | str, *_: Any) -> None:
    typer.echo(f"partita: warning: {message}", err=True)
