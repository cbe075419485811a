"""What was measured beside scores: a figure for each number over the rounds, and for each loss on a line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from partita.engine.record import Record, lookup, mean, number
from partita.report import figures as draw
from partita.report.figures import Figure, Trace
from partita.report.html import Safe, grid, panel, section
from partita.report.rows import Row, Runs

NOT_DRAWN = ("f", "m", "buckets", "chosen")
"""What an aggregator says of every round alike, or in the numbers of clients."""
LINE = ("line_loss", "loss")
BESIDE = {
    "gradient_inversion": ("mse", "guess", "match"),
    "membership": ("auc_low", "auc_high", "member_loss", "newcomer_loss"),
}
"""What a measure says beside the numbers that are drawn."""


class Words(NamedTuple):
    """The title of a figure, what its axis shows, and how it is read."""

    title: str
    axis: str
    how: str


KNOWN = {
    ("gradient_norm", "total"): Words(
        "Gradient left for the shared part",
        "length of the mean gradient",
        "The length of the clients' mean gradient once each has solved for its own part. It falls to zero as "
        "the shared part is learned.",
    ),
    ("gradient_norm", "mean"): Words(
        "Gradients of single clients",
        "mean length of the gradients",
        "What each client alone would still change in the shared part, on average. Near zero: the personal "
        "part alone fits everyone, so personalize less.",
    ),
    ("aggregation_change", "mean"): Words(
        "Jump at aggregation",
        "distance",
        "How far clients' models move when the server has aggregated: the mean over those who took part, and "
        "one standard deviation. Spikes where the score falls: aggregation throws clients back.",
    ),
    ("gradient_inversion", "error"): Words(
        "What the server reconstructs",
        "error, as a share of that of a guess",
        "How far samples that were reconstructed from an upload are from the real ones, over the error of a "
        "guess that does not look. 0: they are the samples; 1: nothing was learned. A better attack finds "
        "more.",
    ),
    ("gradient_inversion", "recovered"): Words(
        "Samples that the server reconstructs",
        "share of samples",
        "Samples whose reconstruction has less than a tenth of the error of a guess that does not look.",
    ),
    ("gradient_inversion", "labels"): Words(
        "Labels that the server knows",
        "share of samples",
        "How many labels behind an upload the server has right: inferred from the last layer, or known.",
    ),
    ("membership", "auc"): Words(
        "Who took part, by the loss of the model",
        "area under the curve",
        "The chance that a client that took part has a lower loss than one that was held out. 0.5: the model "
        "does not tell them apart. The interval is auc_low to auc_high; a test with shadow runs finds more.",
    ),
    ("membership", "advantage"): Words(
        "Advantage over guessing who took part",
        "true less false positives",
        "The share of members, less that of held-out clients, among as many clients as there are members: "
        "those with the least loss. 0 is chance.",
    ),
    LINE: Words(
        "Loss on the way to the aggregate",
        "loss",
        "The clients' mean loss at the last evaluation, from each one's own model to the aggregated one. "
        "A right end above the left one: the full step to the aggregate hurts.",
    ),
    ("aggregation", "iterations"): Words(
        "Iterations of the aggregator",
        "iterations",
        "How many iterations the aggregator took in the round of each evaluation. At its limit all the time: "
        "it stops before it is done.",
    ),
    ("aggregation", "moved"): Words(
        "Last move of the aggregator",
        "distance",
        "How far the aggregate still moved in its last iteration: the smaller, the closer to its limit.",
    ),
}


def measures(runs: Runs) -> tuple[dict[str, Figure], Safe | None]:
    """Return the figures by name, and the section that holds them; none where nothing was measured."""
    figures: dict[str, Figure] = {}
    cells = list[Safe]()
    for name, key in _drawable(runs):
        words = _words(name, key)
        figure = _line(runs, words) if (name, key) == LINE else _over_rounds(runs, name, key, words)
        if figure is not None:
            figures[f"{name}.{key}"] = figure
            cells.append(panel(f"{name}.{key}", words.title, words.how))
    return figures, section("measures", "Measures", grid(cells)) if cells else None


def _drawable(runs: Runs) -> list[tuple[str, str]]:
    """Return the names and keys that have something to draw, in the order in which they come."""
    pairs: dict[tuple[str, str], None] = {}
    rows = (row for seeds in runs.values() for run in seeds for row in run.metrics)
    for name, key, value in (item for row in rows for item in _items(row)):
        if number(value) is not None or (name, key) == LINE:
            pairs[name, key] = None
    # a deviation is the band of its mean
    return [(name, key) for name, key in pairs if not (key == "std" and (name, "mean") in pairs)]


def _items(row: Row) -> Iterator[tuple[str, str, Any]]:
    """Yield of a row of metrics the measure, what it calls the number, the number or list."""
    for name, values in _mapping(row.get("measures")).items():
        for key, value in _mapping(values).items():
            if key not in BESIDE.get(str(name), ()):
                yield str(name), str(key), value
    for key, value in _mapping(row.get("aggregation")).items():
        if str(key).rpartition(".")[2] not in NOT_DRAWN:
            yield "aggregation", str(key), value


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _read(name: str, key: str) -> draw.Read:
    path = ("aggregation", key) if name == "aggregation" else ("measures", name, key)
    return lambda row: lookup(row, *path)


def _words(name: str, key: str) -> Words:
    if (name, key) in KNOWN:
        return KNOWN[name, key]
    if name == "aggregation":
        inner = KNOWN.get((name, key.rpartition(".")[2]))
        if inner is not None:  # of an aggregator inside another one, or of some layers
            return inner._replace(title=f"{inner.title} ({key})")
        return Words(f"Aggregation: {key}", key, "What the aggregator said in the round of each evaluation.")
    if name == "svcca":
        return Words(
            f"Similarity of {key} across clients",
            "SVCCA",
            "How similar the outputs of this layer are for two clients' models, on the same samples; 1: the "
            "same up to a linear map. A layer that stays similar need not be shared.",
        )
    return Words(f"{name}: {key}", key, f"What the measure {name} found at each evaluation.")


def _over_rounds(runs: Runs, name: str, key: str, words: Words) -> Figure | None:
    """Return a line per label, with a band: over clients where that was measured, else over seeds."""
    series = {label: _series(seeds, name, key) for label, seeds in runs.items()}
    values = [row["mean"] for rows in series.values() for row in rows]
    if not values:
        return None
    log = min(values) > 0 and max(values) > 100 * min(values)
    traces = list[Trace]()
    for i, (label, rows) in enumerate(series.items()):
        title = label if len(runs) > 1 else words.axis
        traces += draw.band(rows, title, draw.colour(i), draw.dash(i), ".3~g", ("round",))
    if not log:
        return draw.overlay(traces, draw.titled("round"), draw.titled(words.axis))
    # a log scale has no place for what is not above zero
    traces = [{**trace, "y": [max(y, min(values) / 10) for y in trace["y"]]} for trace in traces]
    axis = {**draw.titled(f"{words.axis} (log scale)"), "type": "log", "exponentformat": "power"}
    return draw.overlay(traces, draw.titled("round"), axis)


def _series(seeds: Sequence[Record], name: str, key: str) -> list[Row]:
    series = draw.series(seeds, _read(name, key))
    if key != "mean":
        return series
    deviations = {row["round"]: row["mean"] for row in draw.series(seeds, _read(name, "std"))}
    return [{**row, "std": deviations.get(row["round"], row["std"])} for row in series]


def _line(runs: Runs, words: Words) -> Figure | None:
    """Return the last loss between clients' own models and the aggregated one, averaged over the seeds."""
    traces = list[Trace]()
    for i, (label, seeds) in enumerate(runs.items()):
        lines = [line for line in map(_last_line, seeds) if line is not None]
        if lines:
            places = lines[0][0]
            losses = [losses for x, losses in lines if x == places]
            points = {"x": places, "y": [mean(column) for column in zip(*losses)]}
            name = label if len(runs) > 1 else words.axis
            traces.append({**draw.line(name, draw.colour(i), draw.dash(i), ".4~g"), **points})
    if not traces:
        return None
    ticks: dict[str, Any] = {"tickvals": [0, 0.5, 1], "ticktext": ["own model", "halfway", "aggregated"]}
    ticks |= {"range": [-0.1, 1.14], "ticklabeloverflow": "allow"}  # room for the words at both ends
    return draw.overlay(traces, {**draw.titled("λ"), **ticks}, draw.titled(words.axis))


def _last_line(run: Record) -> tuple[list[float], list[float]] | None:
    """Return the places and the losses of the last evaluation that has them."""
    for row in reversed(run.metrics):
        places, losses = (lookup(row, "measures", LINE[0], key) for key in ("lambda", LINE[1]))
        if isinstance(places, list) and isinstance(losses, list) and len(places) == len(losses) > 1:
            pairs = [(number(a), number(b)) for a, b in zip(places, losses)]
            points = [(a, b) for a, b in pairs if a is not None and b is not None]
            if points:
                return [a for a, _ in points], [b for _, b in points]
    return None
