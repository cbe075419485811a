"""The picture of average ranks (Demšar 2006): a scale, the methods at their ranks, bars over equals."""

from __future__ import annotations

import math

from partita.report.html import Safe, tag
from partita.report.ranking import Standing
from partita.report.words import shorten

WIDTH, SIDE, TOP, STEP = 720, 190, 56, 22
"""Of the drawing, the margin for names, the scale's place, the height of a line; in its own units."""


def picture(where: Standing) -> Safe:
    """Return the picture as SVG: the better half of the methods is named on the left, the rest right."""
    order = sorted(where.ranks, key=lambda name: where.ranks[name])
    low = math.floor(where.ranks[order[0]])
    high = max(math.ceil(where.ranks[order[-1]]), low + 1)
    bars = len(where.groups)
    base = TOP + 14 + 9 * bars
    left = order[: (len(order) + 1) // 2]
    height = base + STEP * len(left) + 16

    def x(rank: float) -> float:
        return SIDE + (rank - low) / (high - low) * (WIDTH - 2 * SIDE)

    parts = [_line(x(low), TOP, x(high), TOP)]
    for tick in range(low, high + 1):
        parts += [_line(x(tick), TOP - 5, x(tick), TOP), _text(x(tick), TOP - 10, str(tick), "middle")]
    cd = min(where.critical_difference, high - low)
    if math.isfinite(cd):
        parts += [_line(x(low), 14, x(low + cd), 14, "bar"), _text(x(low + cd) + 8, 18, _cd(where), "start")]
    for i, group in enumerate(where.groups):
        ranks = [where.ranks[name] for name in group]
        y = TOP + 10 + 9 * i
        parts.append(_line(x(min(ranks)) - 4, y, x(max(ranks)) + 4, y, "bar"))
    for i, name in enumerate(order):
        is_left = name in left
        place = i if is_left else len(order) - 1 - i
        y, end = base + STEP * (place + 1), SIDE - 12 if is_left else WIDTH - SIDE + 12
        points = f"{x(where.ranks[name]):.1f},{TOP} {x(where.ranks[name]):.1f},{y} {end},{y}"
        parts.append(tag("polyline", points=points))
        words = f"{shorten(name, 22)}  {where.ranks[name]:.2f}"
        parts.append(_text(end + (-6 if is_left else 6), y + 4, words, "end" if is_left else "start"))
    label = "; ".join(f"{name}: average rank {where.ranks[name]:.2f}" for name in order)
    drawing = tag(
        "svg", *parts, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=label, class_="ranks"
    )
    return tag("div", drawing, class_="scroll plain", tabindex="0")


def _cd(where: Standing) -> str:
    return f"CD {where.critical_difference:.2f}"


def _line(x1: float, y1: float, x2: float, y2: float, kind: str = "axis") -> Safe:
    return tag("line", x1=f"{x1:.1f}", y1=f"{y1:.1f}", x2=f"{x2:.1f}", y2=f"{y2:.1f}", class_=kind)


def _text(x: float, y: float, words: str, anchor: str) -> Safe:
    return tag("text", words, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)
