"""What the pages need at build time, so that they need no script and no outside host when they are read.

Equations: $…$ and $$…$$ become MathML, which browsers draw themselves. Pictures: `{{ svg FILE }}` becomes the
drawing itself, which then takes the colors of the page.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

# Fences, code spans and HTML comments stay as they are; a dollar after a backslash is a dollar.
_PIECES = re.compile(
    r"(?P<code>^(?P<fence>[ ]*(?:```+|~~~+)).*?^(?P=fence)[ ]*$"
    r"|(?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`)|<!--.*?-->)"
    r"|^\{\{ svg (?P<svg>\S+) \}\}$"
    r"|(?<!\\)\$\$(?P<display>.+?)(?<!\\)\$\$"
    r"|(?<![\\$\w])\$(?P<inline>[^\s$](?:[^$\n]*?[^\s\\$])?)\$(?![\w$])",
    re.DOTALL | re.MULTILINE,
)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs with the text of every page."""
    return _PIECES.sub(_render, markdown)


def _render(found: re.Match[str]) -> str:
    if found["code"] is not None:
        return found["code"]
    if found["svg"] is not None:
        drawing = (Path(__file__).parent / found["svg"]).read_text()
        return f'<div class="round">{" ".join(drawing.split())}</div>'
    if found["display"] is not None:
        return f'<div class="equation">{_math(found["display"], "block")}</div>'
    return _math(found["inline"], "inline")


def _math(latex: str, display: str) -> str:
    made = convert(" ".join(latex.split()), display=display)
    if "\\" in made or "<mi>&</mi>" in made:  # a command that the converter does not know, passed through
        raise ValueError(f"equation {latex!r}: not understood by latex2mathml")
    return str(made)
