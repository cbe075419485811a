"""Speedup over the number of GPUs, as a drawing that takes the colors of the page it stands in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from partita.engine.store.output import MARK

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 680, 420, 60, 150, 30, 58  # pixels
GAP = 19  # between two names
COLOURS = ("#00897b", "#e64a19", "#5e6ad2", "#9e6a03")
STYLE = """
  .scaling-svg { --ink: var(--md-default-fg-color, #263238); --line: #90a4ae;
    --faint: var(--md-default-fg-color--light, #607d8b); }
  @media (prefers-color-scheme: dark) {
    .scaling-svg { --ink: var(--md-default-fg-color, #eceff1); --line: #607d8b;
      --faint: var(--md-default-fg-color--light, #b0bec5); }
  }
  .scaling-svg text { font: 15px system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif;
    fill: var(--ink); }
  .scaling-svg .small { font-size: 14px; fill: var(--faint); }
  .scaling-svg .middle { text-anchor: middle; }
  .scaling-svg .end { text-anchor: end; }
  .scaling-svg path { fill: none; stroke-width: 2.5; stroke-linejoin: round; }
  .scaling-svg .grid { stroke: var(--line); stroke-width: 0.5; }
  .scaling-svg .ideal { stroke: var(--faint); stroke-width: 1.5; stroke-dasharray: 5 5; }
"""


class Axes(NamedTuple):
    """Logarithmic axes: GPUs from 1 to `gpus`, speedups from `low` to `high`."""

    gpus: float
    low: float
    high: float

    def x(self, gpus: float) -> float:
        """Return how many pixels from the left a number of GPUs stands."""
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(gpus) / math.log(self.gpus)

    def y(self, speedup: float) -> float:
        """Return how many pixels from the top a speedup stands."""
        place = math.log(speedup / self.low) / math.log(self.high / self.low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * place


def svg(gpus: Sequence[int], curves: Mapping[str, Sequence[float]]) -> str:
    """Return a drawing of the speedups that each name has with so many GPUs."""
    smallest = min(x for values in curves.values() for x in values)
    axes = Axes(max(gpus), 10.0 ** math.floor(math.log10(min(0.5, smallest))), max(gpus))
    ends = "; ".join(f"{name}: at most {max(values):.3g}" for name, values in curves.items())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-labelledby="scaling-title scaling-desc">',
        f"<!-- {MARK} -->",
        '<title id="scaling-title">Speedup over the number of GPUs</title>',
        f'<desc id="scaling-desc">{escape(ends)}</desc>',
        f'<style>{STYLE}</style><g class="scaling-svg">',
        *_grid(axes),
        _path(axes, gpus, gpus, 'class="ideal"'),
        _text("ideal", axes.x(max(gpus) / 4) - 10, axes.y(max(gpus) / 4), "small end"),
    ]
    names = _apart([axes.y(values[-1]) for values in curves.values()])
    for (name, values), colour, y in zip(curves.items(), COLOURS, names):
        parts.append(_path(axes, gpus, values, f'style="stroke: {colour}"'))
        parts.append(_text(name, axes.x(gpus[-1]) + 8, y + 5))
    return "\n".join([*parts, "</g></svg>", ""])


def _grid(axes: Axes) -> Iterator[str]:
    """Yield lines at powers of ten, their numbers, and what they count."""
    left, right, bottom = axes.x(1), axes.x(axes.gpus), axes.y(axes.low)
    for value in _powers(1, axes.gpus):
        x = axes.x(value)
        yield f'<path class="grid" d="M{x:.1f} {bottom:.1f}V{axes.y(axes.high):.1f}"/>'
        yield _text(f"{value:,g}", x, bottom + 20, "small middle")
    for value in _powers(axes.low, axes.high):
        y = axes.y(value)
        yield f'<path class="grid" d="M{left:.1f} {y:.1f}H{right:.1f}"/>'
        yield _text(f"{value:,g}", left - 8, y + 5, "small end")
    yield _text("GPUs", (left + right) / 2, bottom + 44, "middle")
    yield _text("times as fast as one GPU", left - 40, TOP - 14)


def _powers(low: float, high: float) -> list[float]:
    return [10.0**e for e in range(round(math.log10(low)), math.floor(math.log10(high) + 1e-9) + 1)]


def _path(axes: Axes, gpus: Sequence[float], values: Sequence[float], style: str) -> str:
    points = " ".join(f"{axes.x(w):.1f},{axes.y(value):.1f}" for w, value in zip(gpus, values))
    return f'<path {style} d="M{points}"/>'


def _text(text: str, x: float, y: float, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _apart(heights: Sequence[float]) -> list[float]:
    """Move names that would lie over each other apart, downwards."""
    moved, last = dict[int, float](), -math.inf
    for i in sorted(range(len(heights)), key=lambda i: heights[i]):
        last = moved[i] = max(heights[i], last + GAP)
    return [moved[i] for i in range(len(heights))]
