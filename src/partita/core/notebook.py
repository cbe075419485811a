"""Show short tables in notebooks, in HTML that suits light and dark themes, and tell whether there is one."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from html import escape

_LINE = "1px solid rgba(128, 128, 128, 0.4)"
_CELL = f"padding: 0.15em 0.8em; border-bottom: {_LINE}; text-align"
_MOST_ROWS = 20


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], note: str = "", more: str = ""
) -> str:
    """Return a table; the first column is a heading of its row, and others are set to the right.

    note  lines below it, with an empty line between two
    more  a text that opens on a click, as it would be printed
    """
    lines = [list(map(str, row)) for row in rows]
    left_out = len(lines) - _MOST_ROWS
    head = "".join(_cell("th", text, i) for i, text in enumerate(columns))
    body = "".join(
        f"<tr>{''.join(_cell('td', text, i) for i, text in enumerate(row))}</tr>"
        for row in lines[:_MOST_ROWS]
    )
    notes = [f"and {left_out} more"] * (left_out > 0) + [text for text in note.split("\n\n") if text]
    return (
        '<div style="overflow-x: auto">'
        + f'<div style="font-weight: 600">{escape(title)}</div>'
        + '<table style="border-collapse: collapse; background: none">'
        + (f"<thead><tr>{head}</tr></thead>" if columns else "")
        + f"<tbody>{body}</tbody></table>"
        + "".join(f'<div style="opacity: 0.75">{escape(text)}</div>' for text in notes)
        + (f"<details><summary>more</summary><pre>{escape(more)}</pre></details>" if more else "")
        + "</div>"
    )


def _cell(tag: str, text: str, column: int) -> str:
    side = "left" if column == 0 else "right"
    return f'<{tag} style="{_CELL}: {side}; background: none">{escape(text)}</{tag}>'


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook; IPython is not imported to find out."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if callable(get_ipython) else None
    return type(shell).__name__ == "ZMQInteractiveShell"
