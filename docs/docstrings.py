"""Docstrings as pages show them: an extension of griffe, which mkdocstrings reads the sources with.

Our docstrings are written for the terminal. Lists of `name   meaning` become tables, doctests become code,
and a function whose arguments declare an `Option` gets the table that `partita show` prints.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any

import griffe

_ROW = re.compile(r"(?P<name>[\w.*]+(?:, [\w.*]+)*)(?: {2,}|: +)(?P<text>\S.*)")
_NAMES = re.compile(r"\w+(?:, \w+)*$")


class Docstrings(griffe.Extension):
    """Called by griffe for every object that it has read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """The docstring with tables and code in place."""
        text = "" if obj.docstring is None else obj.docstring.value
        parts = [_part(p) for p in re.split(r"\n\s*\n", text)]
        if isinstance(obj, griffe.Function) and not obj.name.startswith("_"):
            parts.append(_options(obj))
            if obj.path == "partita.api.federate":  # its arguments are the fields of a dataclass
                obj.parameters = _parameters()
            for parameter in obj.parameters:
                parameter.annotation = _plain(parameter.annotation)
        made = "\n\n".join(p for p in parts if p)
        if obj.docstring is not None:
            obj.docstring.value = made
        elif made:
            obj.docstring = griffe.Docstring(made, parent=obj)


def _parameters() -> griffe.Parameters:
    """The arguments of `federate`, as a call has them."""
    from partita import federate

    kinds = {"POSITIONAL_OR_KEYWORD": "positional_or_keyword", "KEYWORD_ONLY": "keyword_only"}
    found = [
        griffe.Parameter(
            name,
            kind=griffe.ParameterKind[kinds[p.kind.name]],
            annotation=str(p.annotation),
            default=None if p.default is p.empty else repr(p.default),
        )
        for name, p in inspect.signature(federate).parameters.items()
    ]
    return griffe.Parameters(*found)


def _plain(annotation: Any) -> Any:
    """Annotated[float, Option(...)] without the option: the table has it."""
    if isinstance(annotation, griffe.ExprSubscript) and annotation.canonical_name == "Annotated":
        inside = annotation.slice
        return inside.elements[0] if isinstance(inside, griffe.ExprTuple) else inside
    return annotation


def _part(text: str) -> str:
    # as code: in a table, Markdown would take {...} for the cell's attributes
    text = re.sub(r"(?<!`)(\{[^{}`]*\})(?!`)", r"`\1`", text) if not text.startswith(">>>") else text
    if text.lstrip().startswith(">>>"):
        return f"```pycon\n{text}\n```"
    lines = text.splitlines()
    rows: list[tuple[str, str]] = []
    for line in lines:
        row = _ROW.match(line)
        if row and "  " in line.strip() and row["name"]:
            rows.append((row["name"], row["text"]))
        elif _NAMES.match(line):
            rows.append((line, ""))
        elif rows and line.startswith("  "):
            rows[-1] = (rows[-1][0], f"{rows[-1][1]} {line.strip()}".strip())
        else:
            return text
    return _table(("", "meaning"), [(f"`{name}`", meaning) for name, meaning in rows]) if rows else text


def _options(obj: griffe.Function) -> str:
    """The arguments as the function itself declares them."""
    from partita.cli import catalogue

    try:
        found = import_module(obj.module.path)
        for name in obj.path.removeprefix(f"{obj.module.path}.").split("."):
            found = getattr(found, name)
        told = catalogue.options(found) if obj.parent is obj.module else []
    except (ImportError, AttributeError, TypeError, ValueError, NameError, KeyError):
        return ""
    if not any(option["range"] for option in told):  # nothing is declared, and its docstring says it all
        return ""
    rows = [
        (f"`{o['name']}`", "required" if o["required"] else f"`{o['default']!r}`", o["range"], o["text"])
        for o in told
    ]
    return _table(("option", "default", "range", "meaning"), rows)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
