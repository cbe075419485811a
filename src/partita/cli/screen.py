"""The terminal, which shows what users named as they named it."""

from __future__ import annotations

from rich.console import Console


def console(stderr: bool = False) -> Console:
    """For tables: `:smile:` in a name is no picture. Names in them go through `rich.markup.escape`."""
    return Console(emoji=False, stderr=stderr)
