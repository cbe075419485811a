"""The HTML report of one or several runs: a pure function of their records."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from partita.core import check
from partita.engine.record import Record
from partita.engine.store.files import failed
from partita.engine.store.output import new_page

if TYPE_CHECKING:
    from partita.report.charts import Chart

__all__ = ["write", "write_page"]

Table = tuple[str, Sequence[str], Sequence[Sequence[str]], str]
"""A table of a study: title, columns, rows, a note."""


def write(
    runs: Mapping[str, Sequence[Record]],
    path: str | Path,
    *,
    title: str | None = None,
    tables: Sequence[Table] = (),
    charts: Sequence[Chart] = (),
) -> Path:
    """Write a page that opens offline: who gains from personalization, who loses, and what it cost.

    `runs` maps a label ("fedalt", "fedavg") to its runs, one per seed; several are compared. `tables` and
    `charts` of a study stand below the verdict. The file is written whole or not at all, and
    replaces nothing but another page of Partita's.

        report.write({"fedalt": [run]}, "report.html")
    """
    from partita.report.page import page  # the page's parts load when one is made

    target = new_page("path", path)
    write_whole(target, page(runs, title, tables, charts))
    return target


def write_page(
    runs: Mapping[str, Sequence[Record]],
    path: Path,
    tables: Sequence[Table] = (),
    charts: Sequence[Chart] = (),
) -> None:
    """Write the page beside figures that are on disk already; without plotly, warn and write none."""
    try:
        write(runs, path, tables=tables, charts=charts)
    except ModuleNotFoundError as error:
        if error.name != "plotly":
            raise
        check.warn(
            f"{path.name} was not written: plotly is not installed; later: partita report {path.parent}"
        )


def write_whole(target: Path, content: str | bytes) -> None:
    """Write a file through a temporary one beside it, so that nobody ever reads half of it."""
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    except OSError as error:
        raise OSError(f"{target}: the folder cannot be written ({error.strerror})") from error
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(content.encode() if isinstance(content, str) else content)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # mkstemp's file is for its owner only; a report is an ordinary file
        os.replace(name, target)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError):  # a full disk does not name the file
            raise failed(error, f"cannot write {target}") from error
        raise
