"""Output that overwrites nothing of others: folders must be new or empty, pages new or written by Partita.

A run that is resumed goes on in the folder that it made.
"""

from __future__ import annotations

import os
import re
from os import PathLike
from pathlib import Path

from partita.core import check
from partita.engine.store.files import make_folder

MARK = "Made by Partita"
"""What every page and picture that Partita writes contains."""
STARTS = (b"<!doctype html>", b"<svg ", b"\x89PNG")
RUN, STUDY = "config.json", "study.json"


def new_folder(
    field: str, folder: str | PathLike[str], *, left: str = "", outside: Path | None = None
) -> Path:
    """Make a folder if it does not exist; refuse one that holds anything, hidden files included.

    left     a pattern of the names that Partita may have left there when it was killed
    outside  a folder that it must not be in: a copy would be copied into itself
    """
    path = check.path(field, folder)
    names = sorted(os.listdir(path)) if path.is_dir() else []
    foreign = [name for name in names if not re.fullmatch(left, name)]
    if foreign:
        raise check.fail(field, str(folder), f"a new or an empty folder: this one holds {_contents(foreign)}")
    if outside is not None and not path.is_file() and _is_inside(path, outside):
        raise check.fail(field, str(folder), f"a folder outside of {outside}")
    return make_folder(field, path)


def _is_inside(path: Path, folder: Path) -> bool:
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError):  # what is no path cannot be made either, and is refused then
        return False


def _contents(names: list[str]) -> str:
    for file, what in ((STUDY, "a study already"), (RUN, "a run already")):
        if file in names:
            return what
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]!r}{more}"


def new_page(field: str, path: str | PathLike[str]) -> Path:
    """Return a path that a page can be written to: of a new file, or of a page that Partita wrote."""
    target = Path(path)
    if target.is_dir():
        raise check.fail(field, str(path), "a file such as report.html, this is a folder")
    if not target.parent.is_dir():
        raise check.fail(field, str(path), "a file in a folder that exists")
    if os.path.lexists(target) and not _is_ours(target):
        allowed = "a new file, or a page that Partita wrote: something else is there, which is kept"
        raise check.fail(field, str(path), allowed)
    return target


def _is_ours(path: Path) -> bool:
    if not path.is_file():  # a device, or a link to nothing
        return False
    content = path.read_bytes()
    return content.startswith(STARTS) and MARK.encode() in content
