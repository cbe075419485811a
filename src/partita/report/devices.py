"""Classes of devices: what each can hold, what it sends, and how its clients do."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from partita.report import figures as draw
from partita.report.figures import Figure
from partita.report.html import (
    Safe,
    figure,
    how,
    section,
    table,
    tag,
)
from partita.report.rows import Result, Runs, mean, metric
from partita.report.words import bytes_, count, score, share, units

MODELS = {"personal": "its own model", "global": "the global model", "local": "training alone"}


def devices(runs: Runs) -> tuple[dict[str, Figure], Safe | None]:
    """The figure by name, and the section; none where all devices hold the whole model."""
    found = {label: _classes(seeds) for label, seeds in runs.items()}
    if not any(found.values()):
        return {}, None
    made = draw.kept({"devices": _bars(runs, found)})
    several = len(runs) > 1
    head = ["run"] * several + [
        "class",
        "clients",
        "capacity",
        "memory",
        "down",
        "up",
        "a turn takes",
        *MODELS.values(),
    ]
    rows = [
        [*([label] if several else []), name, *_cells(runs[label], name)]
        for label, names in found.items()
        for name in names
    ]
    words = (
        "Capacity: the memory that training takes on such a device (parameters and activations, each with "
        "its gradient), as a share of what the whole model takes. Memory: what the device needs, which is "
        "that, or more where a frozen piece that its samples pass is larger. Down and up: what one turn "
        "sends. The scores are means over the class's clients."
    )
    return made, section(
        "devices",
        "Devices",
        figure("devices", "mean test score of each class of devices") if made else tag("p", ""),
        table(head, rows, words=(0, 1) if several else (0,)),
        how(words),
    )


def _classes(seeds: Sequence[Result]) -> list[str]:
    """The names of the classes, as the runs have them."""
    return list(dict.fromkeys(name for run in seeds for name in run.summary().get("classes") or {}))


def _read(seeds: Sequence[Result], name: str, *keys: str) -> float | None:
    """The mean over the seeds of one figure of a class."""

    def one(run: Result) -> Any:
        found: Any = (run.summary().get("classes") or {}).get(name)
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    return mean(map(one, seeds))


def _cells(seeds: Sequence[Result], name: str) -> list[str]:
    return [
        count(_read(seeds, name, "clients")),
        share(_read(seeds, name, "capacity")),
        *(bytes_(_read(seeds, name, key)) for key in ("memory", "bytes_down", "bytes_up")),
        units(_read(seeds, name, "delay")),
        *(score(_read(seeds, name, "test", model)) for model in MODELS),
    ]


def _bars(runs: Runs, found: dict[str, list[str]]) -> Figure | None:
    """A group of bars for each class, a colour for each run."""
    traces = []
    for i, (label, names) in enumerate(found.items()):
        values = [_read(runs[label], name, "test", "personal") for name in names]
        if any(v is not None for v in values):
            traces.append(
                {
                    "type": "bar",
                    "name": escape(label),
                    "x": [escape(name) for name in names],
                    "y": values,
                    "marker": {"color": f"@{draw.colour(i)}"},
                    "hovertemplate": f"{escape(label)}<br>%{{x}}: %{{y:.4f}}<extra></extra>",
                }
            )
    if not traces:
        return None
    layout = {
        "barmode": "group",
        "xaxis": draw.titled("class of devices"),
        "yaxis": draw.titled(f"test {metric(runs)}, its own model"),
        "showlegend": len(traces) > 1,
    }
    return {"data": traces, "layout": layout}
