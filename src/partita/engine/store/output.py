"""Where to write: a folder that is new or empty, a page where there is none but one's own.

What others wrote is never written over. A run that is resumed goes on in the folder that it made.
"""

from __future__ import annotations

import os
import re
from os import PathLike
from pathlib import Path

from partita.core import check
from partita.engine.store.files import make_folder

MARK = "Made by Partita"
"""What every page and picture of ours says somewhere."""
STARTS = (b"<!doctype html>", b"<svg ", b"\x89PNG")
RUN, STUDY = "config.json", "study.json"


def new_folder(
    field: str, folder: str | PathLike[str], *, left: str = "", outside: Path | None = None
) -> Path:
    """The folder, made if it is not there; refused if it holds anything, hidden files included.

    left     a pattern of the names that one's own writing may have left there when it was killed
    outside  a folder that it must not be in: a copy would be copied into itself
    """
    path = check.path(field, folder)
    there = sorted(os.listdir(path)) if path.is_dir() else []
    theirs = [name for name in there if not re.fullmatch(left, name)]
    if theirs:
        raise check.fail(field, str(folder), f"a new or an empty folder: this one holds {_held(theirs)}")
    if outside is not None and not path.is_file() and _is_inside(path, outside):
        raise check.fail(field, str(folder), f"a folder outside of {outside}")
    return make_folder(field, path)


def _is_inside(path: Path, folder: Path) -> bool:
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError):  # what is no path cannot be made either, which is said then
        return False


def _held(names: list[str]) -> str:
    for file, what in ((STUDY, "a study already"), (RUN, "a run already")):
        if file in names:
            return what
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]!r}{more}"


def new_page(field: str, path: str | PathLike[str]) -> Path:
    """The file, if a page can be written there: nothing is there, or a page that Partita wrote."""
    target = Path(path)
    if target.is_dir():
        raise check.fail(field, str(path), "a file such as report.html, this is a folder")
    if not target.parent.is_dir():
        raise check.fail(field, str(path), "a file in a folder that exists")
    if os.path.lexists(target) and not _is_ours(target):
        raise check.fail(
            field,
            str(path),
            "a new file, or a page that Partita wrote: something else is there, which is kept",
        )
    return target


def _is_ours(path: Path) -> bool:
    if not path.is_file():  # a device, or a link to nothing
        return False
    content = path.read_bytes()
    return content.startswith(STARTS) and MARK.encode() in content
