"""Pieces of a page. All text is escaped unless it is `Safe`: made here from parts that were."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any


class Safe(str):
    """Markup; every other string is text."""


def text(value: object) -> Safe:
    """Return text as markup."""
    return value if isinstance(value, Safe) else Safe(escape(str(value), quote=True))


def tag(name: str, *children: object, **attributes: object) -> Safe:
    """Return an element; `class_` is the attribute class, underscores in attributes' names are dashes."""
    pairs = "".join(
        f' {key.strip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items()
    )
    return Safe(f"<{name}{pairs}>{join(children)}</{name}>")


def join(children: Iterable[object], between: str = "") -> Safe:
    """Put pieces one after another; None is left out."""
    return Safe(between.join(text(child) for child in children if child is not None))


def table(head: Sequence[str], rows: Sequence[Sequence[object]], words: Sequence[int] = (0,)) -> Safe:
    """Return a table in a box of its own that scrolls; `words` are the columns with text, not numbers."""
    kinds = ["word" if i in words else "num" for i in range(len(head))]
    top = tag("tr", *(tag("th", name, class_=kind) for name, kind in zip(head, kinds)))
    # small screens show a row as a block, where each number needs its name
    lines = [
        tag(
            "tr",
            *(tag("td", cell, class_=kind, data_name=name) for cell, kind, name in zip(row, kinds, head)),
        )
        for row in rows
    ]
    inner = tag("table", tag("thead", top), tag("tbody", *lines))
    # a box that scrolls must be reachable by the keyboard
    return tag("div", inner, class_="scroll", tabindex="0")


def tiles(pairs: Iterable[tuple[str, str]]) -> Safe:
    """Show pairs of a name and a number side by side."""
    return tag(
        "dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs), class_="tiles"
    )


def section(name: str, title: str, *children: object) -> Safe:
    """Return a part of the page with its heading."""
    return tag("section", tag("h2", title), *children, id=name)


def figure(name: str, label: str, height: int | None = None) -> Safe:
    """Return the place where script.js draws the figure of this name; `height` is in pixels."""
    style = {} if height is None else {"style": f"height: {height}px"}
    return tag("div", class_="figure", role="img", aria_label=label, data_figure=name, **style)


def panel(name: str, title: str, words: str) -> Safe:
    """Return a figure with its title and how to read it, for a grid."""
    return tag("div", tag("h3", title), figure(name, title), how(words))


def grid(cells: Sequence[Safe], columns: int = 0) -> Safe | None:
    """Put cells side by side where there is room, in so many columns (0: as many as fit)."""
    if not cells:
        return None
    if not columns:
        return tag("div", *cells, class_="grid")
    return tag("div", *cells, class_="grid columns", style=f"--columns: {columns}")


def choice(name: str, label: str, options: Mapping[str, str], start: str | None = None) -> Safe | None:
    """Return buttons of which one (the first, or `start`) is pressed: the figures follow.

    There are none where there is nothing to choose.
    """
    if len(options) < 2:
        return None
    start = next(iter(options)) if start is None else start
    buttons = [
        tag(
            "button",
            words,
            type="button",
            data_choice=name,
            data_value=value,
            aria_pressed="true" if value == start else "false",
        )
        for value, words in options.items()
    ]
    return tag("div", tag("span", label), *buttons, class_="choice", role="group", aria_label=label)


def note(words: str) -> Safe:
    """Return a line in small print."""
    return tag("p", words, class_="how")


def how(words: str) -> Safe:
    """Return the line below a figure that says how to read it."""
    return tag("p", tag("b", "How to read this."), " ", words, class_="how")


def data(value: Any) -> Safe:
    """Return a value for a script as JSON that cannot end its element: no <, > or & is left in it."""
    encoded = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        encoded = encoded.replace(sign, f"\\u{ord(sign):04x}")
    return Safe(encoded)


LONG = 20_000
"""Texts from so many characters on travel compressed."""


def embedded(name: str, value: Any) -> Safe:
    """Return an element from which script.js reads a value; long ones are compressed."""
    content = data(value)
    if len(content) < LONG:
        return Safe(f'<script type="application/json" id="{name}">{content}</script>')
    return Safe(f'<script type="text/plain" id="{name}">{packed(content)}</script>')


def packed(content: str) -> Safe:
    """Return a text compressed and in base 85, with no sign that HTML knows."""
    signs = base64.b85encode(zlib.compress(content.encode(), 9)).decode()
    return Safe(signs.translate(str.maketrans("<>&", ".:,")))
