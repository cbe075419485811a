"""What was followed beside scores: a figure for each number over the rounds, and for each loss on a line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from partita.report import figures as draw
from partita.report.figures import Figure, Trace
from partita.report.html import Safe, figure, how, section, tag
from partita.report.rows import Result, Row, Runs, mean, number

# what an aggregator says of every round alike, or in the numbers of clients: nothing to draw
DULL = ("f", "m", "buckets", "chosen")
LINE = ("line_loss", "loss")


class Words(NamedTuple):
    """What a figure is called, what its axis shows, and how it is read."""

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
    """The figures by name, and the section that holds them; none where nothing was measured."""
    made: dict[str, Figure] = {}
    cells = list[Safe]()
    for name, key in _found(runs):
        words = _words(name, key)
        drawn = _line(runs, words) if (name, key) == LINE else _over_rounds(runs, name, key, words)
        if drawn is not None:
            place = f"{name}.{key}"
            made[place] = drawn
            cells.append(tag("div", tag("h3", words.title), figure(place, words.title), how(words.how)))
    if not cells:
        return {}, None
    return made, section("measures", "Measures", tag("div", *cells, class_="grid"))


def _found(runs: Runs) -> list[tuple[str, str]]:
    """The names and keys that have something to draw, in the order in which they come."""
    found: dict[tuple[str, str], None] = {}
    rows = (row for seeds in runs.values() for run in seeds for row in run.metrics)
    for name, key, value in (item for row in rows for item in _items(row)):
        if number(value) is not None or (name, key) == LINE:
            found.setdefault((name, key))
    banded = [name for name, key in found if key == "std" and (name, "mean") in found]
    return [pair for pair in found if not (pair[1] == "std" and pair[0] in banded)]


def _items(row: Row) -> Iterator[tuple[str, str, Any]]:
    """Of a row of metrics: the measure, what it calls the number, the number or list."""
    for name, values in _mapping(row.get("measures")).items():
        for key, value in _mapping(values).items():
            yield str(name), str(key), value
    for key, value in _mapping(row.get("aggregation")).items():
        if str(key).rpartition(".")[2] not in DULL:
            yield "aggregation", str(key), value


def _read(name: str, key: str) -> Callable[[Row], Any]:
    def read(row: Row) -> Any:
        parent = row.get("aggregation") if name == "aggregation" else _mapping(row.get("measures")).get(name)
        return _mapping(parent).get(key)

    return read


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _words(name: str, key: str) -> Words:
    if (name, key) in KNOWN:
        return KNOWN[name, key]
    if name == "aggregation":
        last = KNOWN.get((name, key.rpartition(".")[2]))
        if last is not None:  # of an aggregator inside another one, or of some layers
            return last._replace(title=f"{last.title} ({key})")
        return Words(f"Aggregation: {key}", key, "What the aggregator said in the round of each evaluation.")
    if name == "svcca":
        return Words(
            f"Similarity of {key} across clients",
            "SVCCA",
            "How alike what this layer puts out is for any two clients' models, on the same samples; 1: the "
            "same up to a linear map. A layer that stays alike need not be shared.",
        )
    return Words(f"{name}: {key}", key, f"What the measure {name} found at each evaluation.")


# ---- over the rounds


def _over_rounds(runs: Runs, name: str, key: str, words: Words) -> Figure | None:
    """A line per label. Its band: the spread over clients where it was measured, else over the seeds."""
    found = {label: _series(seeds, name, key) for label, seeds in runs.items()}
    values = [row["mean"] for series in found.values() for row in series]
    if not values:
        return None
    log = min(values) > 0 and max(values) > 100 * min(values)
    traces = list[Trace]()
    for i, (label, series) in enumerate(found.items()):
        shown = label if len(runs) > 1 else words.axis
        lines = draw.band(series, shown, draw.colour(i), draw.dash(i), ".3~g", ("round",))
        traces += [_above(line, min(values) / 10) for line in lines] if log else lines
    axis = {**draw.titled(f"{words.axis} (log scale)" if log else words.axis)}
    axis |= {"type": "log", "exponentformat": "power"} if log else {}
    layout = {"hovermode": "x unified", "xaxis": draw.titled("round"), "yaxis": axis}
    return {"data": traces, "layout": layout}


def _series(seeds: Sequence[Result], name: str, key: str) -> list[Row]:
    series = draw.series(seeds, _read(name, key))
    if key != "mean":
        return series
    spread = {row["round"]: row["mean"] for row in draw.series(seeds, _read(name, "std"))}
    return [{**row, "std": spread.get(row["round"], row["std"])} for row in series]


def _above(trace: Trace, least: float) -> Trace:
    """A log scale has no place for what is not above zero."""
    return {**trace, "y": [max(y, least) for y in trace["y"]]}


# ---- on a line


def _line(runs: Runs, words: Words) -> Figure | None:
    """The last loss between the clients' own models and the aggregated one, the mean over the seeds."""
    traces = list[Trace]()
    for i, (label, seeds) in enumerate(runs.items()):
        last = [line for line in map(_last_line, seeds) if line is not None]
        same = [loss for lam, loss in last if lam == last[0][0]]
        if same:
            points = {"x": last[0][0], "y": [mean(at) for at in zip(*same)]}
            name = label if len(runs) > 1 else words.axis
            traces.append({**draw.line(name, draw.colour(i), draw.dash(i), ".4~g"), **points})
    if not traces:
        return None
    ticks: dict[str, Any] = {"tickvals": [0, 0.5, 1], "ticktext": ["own model", "halfway", "aggregated"]}
    ticks |= {"range": [-0.1, 1.14], "ticklabeloverflow": "allow"}  # room for the words at both ends
    layout = {
        "hovermode": "x unified",
        "xaxis": {**draw.titled("λ"), **ticks},
        "yaxis": draw.titled(words.axis),
    }
    return {"data": traces, "layout": layout}


def _last_line(run: Result) -> tuple[list[float], list[float]] | None:
    for row in reversed(run.metrics):
        found = _mapping(_mapping(row.get("measures")).get(LINE[0]))
        lam, loss = (found.get(key) for key in ("lambda", LINE[1]))
        if isinstance(lam, list) and isinstance(loss, list) and len(lam) == len(loss) > 1:
            pairs = [(number(a), number(b)) for a, b in zip(lam, loss)]
            there = [(a, b) for a, b in pairs if a is not None and b is not None]
            if there:
                return [a for a, _ in there], [b for _, b in there]
    return None
