"""Classes of devices: what each can hold, what it sends, and how its clients do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from partita.engine.record import Record, lookup, mean
from partita.report import figures as draw
from partita.report.figures import Figure
from partita.report.html import Safe, figure, how, section, table
from partita.report.rows import Runs, metric
from partita.report.words import bytes_, count, score, share, units

COLUMNS: list[tuple[str, tuple[str, ...], Callable[[object], str]]] = [
    ("clients", ("clients",), count),
    ("capacity", ("capacity",), share),
    ("memory", ("memory",), bytes_),
    ("down", ("bytes_down",), bytes_),
    ("up", ("bytes_up",), bytes_),
    ("a turn takes", ("delay",), units),
    ("its own model", ("test", "personal"), score),
    ("the global model", ("test", "global"), score),
    ("training alone", ("test", "local"), score),
]
HOW = (
    "Capacity: the memory that training takes on such a device (parameters and activations, each with "
    "its gradient), as a share of what the whole model takes. Memory: what the device needs, which is "
    "that, or more where a frozen piece that its samples pass is larger. Down and up: what one turn "
    "sends. The scores are means over the class's clients."
)


def devices(runs: Runs) -> tuple[dict[str, Figure], Safe | None]:
    """Return the figure by name, and the section; none where all devices hold the whole model."""
    classes = {label: _classes(seeds) for label, seeds in runs.items()}
    if not any(classes.values()):
        return {}, None
    figures = draw.kept({"devices": _bars(runs, classes)})
    several = len(runs) > 1
    rows = [
        [*[label] * several, name, *(show(_mean(runs[label], name, *keys)) for _, keys, show in COLUMNS)]
        for label, names in classes.items()
        for name in names
    ]
    return figures, section(
        "devices",
        "Devices",
        figure("devices", "mean test score of each class of devices") if figures else None,
        table(["run"] * several + ["class", *(name for name, *_ in COLUMNS)], rows, range(1 + several)),
        how(HOW),
    )


def _classes(seeds: Sequence[Record]) -> list[str]:
    """Return the names of the classes, in the order of the runs."""
    return list(dict.fromkeys(name for run in seeds for name in run.facts.get("classes") or {}))


def _mean(seeds: Sequence[Record], name: str, *keys: str) -> float | None:
    """Return one figure of a class, averaged over the seeds."""
    return mean(lookup(run.facts, "classes", name, *keys) for run in seeds)


def _bars(runs: Runs, classes: dict[str, list[str]]) -> Figure | None:
    """Return a group of bars for each class, a colour for each run."""
    traces = []
    for i, (label, names) in enumerate(classes.items()):
        scores = [_mean(runs[label], name, "test", "personal") for name in names]
        if any(x is not None for x in scores):
            trace = {
                "type": "bar",
                "name": escape(label),
                "x": [escape(name) for name in names],
                "y": scores,
                "marker": {"color": f"@{draw.colour(i)}"},
                "hovertemplate": f"{escape(label)}<br>%{{x}}: %{{y:.4f}}<extra></extra>",
            }
            traces.append(trace)
    if not traces:
        return None
    layout = {
        "barmode": "group",
        "xaxis": draw.titled("class of devices"),
        "yaxis": draw.titled(f"test {metric(runs)}, its own model"),
        "showlegend": len(traces) > 1,
    }
    return {"data": traces, "layout": layout}
