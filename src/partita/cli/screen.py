"""The terminal, which shows names as users wrote them."""

from __future__ import annotations

from rich.console import Console


def console(stderr: bool = False) -> Console:
    """Return a console on which `:smile:` stays text. Names in tables go through `rich.markup.escape`."""
    return Console(emoji=False, stderr=stderr)
