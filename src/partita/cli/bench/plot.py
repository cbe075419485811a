"""`partita bench --plot FILE`: a page, or a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from partita.cli.bench.compare import Row
from partita.core import check
from partita.engine.store.output import new_page

KINDS = (".html", ".svg", ".png")


def checked(path: Path) -> Path:
    """A file that can be made, or a ValueError, before anything is measured."""
    from partita.cli.bench.picture import BROWSERS, browser

    if path.suffix not in KINDS:
        raise check.fail("--plot", str(path), f"a file that ends in {', '.join(KINDS)}")
    new_page("--plot", path)
    if path.suffix != ".html" and browser() is None:
        names = ", ".join(BROWSERS)
        raise check.fail(
            "--plot", str(path), f"a file that ends in .html: of {names}, which draw pictures, none is here"
        )
    return path


def plot(rows: Sequence[Row], path: Path, machine: str, other: str) -> Path:
    """Write the figures; `other` is what the loop is called."""
    from partita.cli.bench import page, picture
    from partita.report import write_whole

    if path.suffix == ".html":
        write_whole(path, page.page(rows, machine, other))
        return path
    drawn = picture.svg(rows, machine, other)
    write_whole(path, drawn if path.suffix == ".svg" else picture.png(drawn))
    return path
