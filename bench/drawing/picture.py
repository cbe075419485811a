"""The figures of a bench, and the charts of a study, as pictures that an installed browser draws."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Sequence
from html import escape, unescape
from pathlib import Path
from urllib.parse import unquote

from drawing import figures as draw
from drawing.figures import Bench
from drawing.page import failures, verdict
from partita.engine.store.output import MARK
from partita.report.charts import Chart, charts
from partita.report.figures import kept
from partita.report.html import figure, join, tag
from partita.report.page import document
from partita.report.words import shorten

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTH, EDGE, TITLE, LIMIT, LONGEST = 1000, 32, 84, 120, 120  # pixels, seconds, characters
PANELS, PANEL_HEIGHT = 3, 330
DRAWN = """
document.documentElement.dataset.theme = "light";
const waiting = setInterval(() => {
  if (!("drawn" in document.documentElement.dataset)) return;
  clearInterval(waiting);
  Promise.all([...document.querySelectorAll("[data-figure]")].map((place) => Plotly.toImage(
    place, { format: "svg", width: place.clientWidth, height: place.clientHeight })))
    .then((drawn) => { document.body.textContent = JSON.stringify(drawn); });
}, 50);
"""


def browser() -> str | None:
    """Return the path of a browser that is installed, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def svg(bench: Bench) -> str:
    """Return both figures below each other, with a title."""
    rows = bench.rows
    heights = {"speeds": draw.height(rows, len(draw.others(bench)) + 1), "phases": draw.height(rows, 2)}
    figures = kept({"speeds": draw.speeds(bench), "phases": draw.phases(rows)})
    places = join([figure(name, name, heights[name]) for name in figures])
    drawn = _drawn(document("bench", places, figures, DRAWN))
    notes = [f"No bar for {shorten(line, LONGEST)}." for line in failures(rows)]
    return _together(drawn, [heights[name] for name in figures], verdict(bench), bench.machine, notes)


def of_chart(chart: Chart) -> str:
    """Return a chart of a study: its panels side by side, in its columns or up to `PANELS`, with a title."""
    figures, _ = charts([chart])
    titles = [panel.title for i, panel in enumerate(chart.panels) if f"chart-1-{i + 1}" in figures]
    across = min(chart.columns or PANELS, len(figures))
    width = (WIDTH - 2 * EDGE) // across
    style = {"style": f"width: {width}px"}
    places = join([tag("div", figure(name, name, PANEL_HEIGHT), **style) for name in figures])
    parts, y = [_line(chart.title, 36, 18, "#1d2126", "600")], 44
    for i, (image, title) in enumerate(zip(_drawn(document("chart", places, figures, DRAWN)), titles)):
        x, top = EDGE + i % across * width, y + i // across * (PANEL_HEIGHT + 34)
        parts.append(_line(title, top + 20, 14, "#1d2126", "600", x))
        parts.append(image.replace("<svg ", f'<svg x="{x}" y="{top + 26}" ', 1))
    rows = -(-len(figures) // across)
    return _page(parts, y + rows * (PANEL_HEIGHT + 34) + EDGE // 2)


def png(picture: str) -> bytes:
    """Return an SVG as pixels, at twice its size."""
    width, height = re.search(r'width="(\d+)" height="(\d+)"', picture).groups()  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory(prefix="partita-") as folder:
        source, target = Path(folder) / "bench.svg", Path(folder) / "bench.png"
        source.write_text(picture, encoding="utf-8")
        size = (f"--window-size={width},{height}", "--force-device-scale-factor=2", "--hide-scrollbars")
        _browse(source, f"--screenshot={target}", *size)
        return _marked(target.read_bytes())


def _marked(picture: bytes) -> bytes:
    """Add a chunk of text that says who wrote the file, before the last chunk, which ends a PNG file."""
    body = b"tEXtSoftware\0" + MARK.encode()
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return picture[:-12] + chunk + picture[-12:]


def _drawn(page: str) -> list[str]:
    """Return the figures of a page as SVG."""
    with tempfile.TemporaryDirectory(prefix="partita-") as folder:
        source = Path(folder) / "bench.html"
        source.write_text(page, encoding="utf-8")
        size = f"--window-size={WIDTH},2000"
        page_after = _browse(source, "--dump-dom", "--virtual-time-budget=20000", size)
    body = re.search(r"<body>(\[.*\])\s*</body>", page_after, re.DOTALL)
    if body is None:
        raise OSError(f"{browser()} has not drawn the figures: a .html file shows them")
    return [unquote(url.partition(",")[2]) for url in json.loads(unescape(body[1]))]


def _together(
    drawn: Sequence[str], heights: Sequence[int], title: str, machine: str, notes: Sequence[str]
) -> str:
    parts = [_line(title, 42, 20, "#1d2126", "600"), _line(machine, 64)]
    y = TITLE
    for image, height in zip(drawn, heights):
        parts.append(image.replace("<svg ", f'<svg x="{EDGE}" y="{y}" ', 1))
        y += height
    for note in notes:
        y += 20
        parts.append(_line(note, y))
    return _page(parts, y + EDGE)


def _page(parts: Sequence[str], height: int) -> str:
    top = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}">'
    return "\n".join(
        [
            top,
            f"<!-- {MARK} -->",
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def _line(
    text: str, y: int, size: int = 13, colour: str = "#5d646e", weight: str = "400", x: int = EDGE
) -> str:
    font = f'font-family="Inter, system-ui, sans-serif" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x}" y="{y}" {font} fill="{colour}">{escape(text)}</text>'


def _browse(page: Path, *options: str) -> str:
    program = browser()
    assert program is not None
    safe = ["--no-sandbox"] if os.geteuid() == 0 else []  # a browser's sandbox refuses to work for root
    words = [program, "--headless", "--disable-gpu", *safe, *options, page.as_uri()]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, check=True).stdout
    except subprocess.SubprocessError as error:
        raise OSError(f"{program} has failed to draw the figures: a .html file shows them") from error
