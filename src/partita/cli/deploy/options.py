"""What the commands of `partita deploy` share: their options, the experiment, and the log."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from partita.cli import listing
from partita.cli.common import Request
from partita.cli.options import RunOptions, path
from partita.recipes import Experiment

MINUTE = 60.0

Recipe = Annotated[
    str,
    typer.Argument(
        metavar="EXPERIMENT.py",
        help="A Python file with a function experiment(), the same on all machines; or a recipe's name.",
        autocompletion=listing.complete_recipe,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting, such as rounds=100 or algorithm.lr=0.05, on all machines alike. Repeatable.",
        autocompletion=listing.complete_set,
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure-loopback",
        help="Without TLS and keys, for trials: only on 127.0.0.1, where every user of this machine can "
        "pose as any client.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Write no log; errors are still told.")]
RosterFile = Annotated[
    Path,
    typer.Option(
        "--roster", help="roster.toml, as `partita deploy keys` writes it.", parser=path, metavar="PATH"
    ),
]
SiteFile = Annotated[
    Path,
    typer.Option(
        "--site",
        help="site.toml of this client, as `partita deploy keys` writes it.",
        parser=path,
        metavar="PATH",
    ),
]


def experiment_of(recipe: str, settings: Sequence[str] | None) -> Experiment:
    """Return the experiment of a file or a recipe, with its settings changed."""
    request = Request(recipe, RunOptions(set_=list(settings or [])))
    return request.experiment(request.seeds[0])


class Repeated(logging.Filter):
    """Leaves out a line that was written less than a minute ago, such as that a client is not there yet."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line is to be written."""
        text, now = record.getMessage(), time.monotonic()
        self._last = {t: when for t, when in self._last.items() if now - when < MINUTE}
        return self._last.setdefault(text, now) == now


@contextlib.contextmanager
def logged(quiet: bool, *handlers: logging.Handler) -> Iterator[None]:
    """Write what happens to the error stream, line by line, and hand it to further handlers."""
    log, level = logging.getLogger("partita"), logging.getLogger("partita").level
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%dT%H:%M:%SZ"))
    lines.formatter.converter = time.gmtime  # type: ignore[union-attr]
    lines.setLevel(logging.ERROR if quiet else logging.INFO)
    log.setLevel(logging.INFO)
    used = [lines, *handlers]
    for handler in used:
        handler.addFilter(Repeated())
        log.addHandler(handler)
    try:
        yield
    finally:
        log.setLevel(level)
        for handler in used:
            log.removeHandler(handler)
