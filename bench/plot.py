"""Draw the speeds that a bench has measured, and the parts of a round of Partita.

The page (.html) opens offline. Pictures (.svg, .png) are drawn by a Chromium or Chrome that is installed.

    partita bench --json > speed.jsonl            # or: python bench/peers.py --json > speed.jsonl
    python bench/plot.py speed.jsonl --out speed.html
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from adapters.process import Speed
from drawing import page, picture
from drawing.figures import Bench, Row
from partita.core import check
from partita.engine.store.output import new_page
from partita.report import write_whole

KINDS = (".html", ".svg", ".png")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the lines of a bench and write a page or a picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figures", type=Path, help="a file of what a bench printed with --json")
    parser.add_argument("--out", type=Path, default=Path("speed.html"), help="a .html, .svg or .png file")
    options = parser.parse_args(arguments)
    try:
        target = checked(options.out)
        print(f"wrote {draw(read(options.figures), target)}")
    except (ValueError, OSError) as error:
        parser.error(str(error))


def read(path: Path) -> Bench:
    """Read the lines of JSON that a bench printed."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise check.fail("figures", str(path), "at least one line of `partita bench --json`")
    names = [f.name for f in fields(Row) if f.name not in ("peers", "one_model")]
    rows = [
        Row(
            **{name: line[name] for name in names},
            peers={name: Speed(**speed) for name, speed in line.get("peers", {}).items()},
        )
        for line in lines
    ]
    return Bench(rows, lines[0]["machine"], lines[0]["reference"])


def checked(path: Path) -> Path:
    """Return the path if such a file can be made, or raise a ValueError."""
    if path.suffix not in KINDS:
        raise check.fail("--out", str(path), f"a file that ends in {', '.join(KINDS)}")
    new_page("--out", path)
    if path.suffix != ".html" and picture.browser() is None:
        names = ", ".join(picture.BROWSERS)
        raise check.fail(
            "--out", str(path), f"a .html file: pictures need one of {names}, and none is installed"
        )
    return path


def draw(bench: Bench, path: Path) -> Path:
    """Write the page or the picture."""
    if path.suffix == ".html":
        write_whole(path, page.page(bench))
    else:
        drawn = picture.svg(bench)
        write_whole(path, drawn if path.suffix == ".svg" else picture.png(drawn))
    return path


if __name__ == "__main__":
    main()
