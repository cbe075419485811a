"""Virtual time: when scores were reached, who was at work meanwhile, and whom the server waited for."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from partita.report import figures as draw
from partita.report import histograms
from partita.report.figures import Figure
from partita.report.html import (
    Safe,
    figure,
    how,
    section,
    table,
    tag,
    tiles,
)
from partita.report.rows import (
    Means,
    Result,
    Row,
    Runs,
    clock,
    federated,
    higher_is_better,
    mean,
    metric,
    number,
    numbers,
    virtual_time,
)
from partita.report.words import (
    MISSING,
    count,
    deviation,
    listed,
    p_value,
    share,
    shorten,
    units,
)

SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)  # of the best last score
MOST_NAMED, MOST_SLOW, FEWEST, CLEAR = 4, 3, 10, 0.05
Times = Mapping[str, Sequence[dict[str, float] | None]]  # for each label, when it reached each target


def time(runs: Runs, means: Means) -> tuple[dict[str, Figure], Safe | None]:
    """The figures by name, and the section; none where the clock only counted rounds.

    Clients that train alone wait for nobody: they have no place in it but as a level.
    """
    if all(virtual_time(run) is None for seeds in federated(runs).values() for run in seeds):
        return {}, None
    made = draw.kept(
        {
            "time.scores": draw.curves_in_time(runs, metric(runs)),
            "time.active": _active(runs),
            "time.delays": histograms.delays(runs),
            "time.ages": histograms.ages(runs),
        }
    )
    runs = federated(runs)  # the figures above have all: a label keeps its colour
    means = {label: rows for label, rows in means.items() if label in runs}
    goals = targets(runs)
    times = {label: [reached(seeds, goal) for goal in goals] for label, seeds in runs.items()}
    return made, section(
        "time",
        "Virtual time",
        _paragraph(_first(runs, goals, times)),
        _grid(made, ("time.scores", "time.active"), SEEDS if _several(runs) else ""),
        *_reached(runs, goals, times),
        *_clocks(runs),
        _grid(made, ("time.delays", "time.ages")),
        *_slow(runs, means),
    )


SEEDS = " Bands are one standard deviation over the seeds; a line goes as far as all of its seeds do."
FIGURES = {
    "time.scores": (
        "Score against virtual time",
        "The learning curves against virtual time, whose unit is that of the delays; the seconds it took to "
        "compute are another matter.",
    ),
    "time.active": (
        "Clients at work",
        "The share of the clients that were at work, each point since the evaluation before. A server that "
        "waits for the slow ones leaves the fast ones idle.",
    ),
    "time.delays": (
        "How long a turn takes",
        "From a client's request to the arrival of its upload; of all uploads that the server took in. Runs "
        "whose turns all take the same time are not drawn.",
    ),
    "time.ages": (
        "Staleness",
        "How many steps the server had taken since a client's download when its upload arrived. Runs without "
        "stale uploads are not drawn.",
    ),
}


def _grid(made: Mapping[str, Figure], names: Sequence[str], more: str = "") -> Safe | None:
    cells = list[Safe]()
    for name in (name for name in names if name in made):
        title, words = FIGURES[name]
        cells.append(tag("div", tag("h3", title), figure(name, title), how(words + more)))
    return tag("div", *cells, class_="grid") if cells else None


def _active(runs: Runs) -> Figure | None:
    traces, timed = list[draw.Trace](), federated(runs)
    for i, (label, seeds) in enumerate(runs.items()):
        if label not in timed:
            continue
        found = draw.series(seeds, draw.cell("active"), "time")
        name = label if len(runs) > 1 else "clients at work"
        traces += draw.band(found, name, draw.colour(i), draw.dash(i), ".1%", ("time",))
    axis = {**draw.titled("share of the clients"), "tickformat": ".0%", "range": [0, 1.03]}
    return draw.in_time(traces, axis)


def _several(runs: Runs) -> bool:
    return any(len(seeds) > 1 for seeds in runs.values())


def _paragraph(words: str) -> Safe | None:
    return tag("p", words) if words else None


# ---- when a score was reached


def targets(runs: Runs) -> list[float]:
    """Round scores on the way to the best last one, the easiest first; none where scores have no zero."""
    higher = higher_is_better(runs)
    last = numbers(mean(map(_last, seeds)) for seeds in runs.values())
    best = (max if higher else min)(last, default=0.0)
    if best <= 0:
        return []
    exact = [best * s if higher else best / s for s in SHARES]
    step, found = 10.0 ** (math.floor(math.log10(best)) - 1), list[float]()
    while len(set(found)) < len(SHARES):
        # away from the best, so that it is reached; a little is rounding
        cut = math.floor if higher else math.ceil
        slack = 1e-9 if higher else -1e-9
        found = [float(f"{cut(x / step + slack) * step:.9g}") for x in exact]
        step /= 10
    return found


def _last(run: Result) -> float | None:
    found = numbers(row.get("test.personal") for row in run.metrics)
    return found[-1] if found else None


def time_to(run: Result, goal: float, higher: bool) -> float | None:
    """The virtual time of the first evaluation that reached a score."""
    sign = 1.0 if higher else -1.0
    for row in run.metrics:
        value, at = number(row.get("test.personal")), number(row.get("time"))
        if value is not None and at is not None and sign * value >= sign * goal:
            return at
    return None


def reached(seeds: Sequence[Result], goal: float) -> dict[str, float] | None:
    """When a score was reached, over the seeds; None unless all of them did."""
    higher = higher_is_better({"": seeds})
    found = numbers(time_to(run, goal, higher) for run in seeds)
    if len(found) < len(seeds):
        return None
    return {"mean": statistics.fmean(found), "std": statistics.stdev(found) if len(found) > 1 else 0.0}


def _first(runs: Runs, goals: Sequence[float], times: Times) -> str:
    """X reaches 0.90 after 35 units of virtual time, Y after 120. Of the hardest goal that most reach."""
    if not goals:
        return ""
    there = {g: [label for label in runs if times[label][g] is not None] for g in range(len(goals))}
    # a single run reaches all of them; the last tenth may be luck
    hardest = max(there, key=lambda g: (len(there[g]), g))
    choice = SHARES.index(0.9) if len(runs) == 1 else hardest
    order = sorted(there[choice], key=lambda label: _mean(times[label][choice]))
    if not order:
        return ""
    after = {label: units(_mean(times[label][choice])) for label in order}
    names = {label: shorten(label, 60) for label in runs}
    start = order[0]
    of = f" of {units(mean(map(virtual_time, runs[start])))}" if len(runs) == 1 else ""
    words = f"{names[start]} reaches {metric(runs)} {_shown(goals)[choice]} after {after[start]}{of} "
    words += "units of virtual time"
    others = [f"{names[label]} after {after[label]}" for label in order[1:]]
    if len(others) > MOST_NAMED:
        others = [f"the last of {len(order)}, {names[order[-1]]}, after {after[order[-1]]}"]
    missing = [names[label] for label in runs if label not in order]
    return ", ".join([words, *others]) + (f"; {_not(missing)}." if missing else ".")


def _not(missing: Sequence[str]) -> str:
    if len(missing) > MOST_NAMED:
        return f"{len(missing)} others do not"
    return f"{listed(list(missing))} {'does' if len(missing) == 1 else 'do'} not"


def _mean(value: dict[str, float] | None) -> float:
    return math.inf if value is None else value["mean"]


def _shown(goals: Sequence[float]) -> list[str]:
    """All with as many decimals."""
    decimals = max(len(f"{goal:.9f}".rstrip("0").partition(".")[2]) for goal in goals)
    return [f"{goal:,.{decimals}f}" if min(goals) >= 1e-6 else f"{goal:.3g}" for goal in goals]


def _reached(runs: Runs, goals: Sequence[float], times: Times) -> list[Safe]:
    if not goals:
        return []
    soonest = [min(map(_mean, column)) for column in zip(*times.values())]
    rows = [
        [
            label,
            *(_when(at, len(runs[label]), len(runs) > 1 and _mean(at) == s) for at, s in zip(found, soonest)),
        ]
        for label, found in times.items()
    ]
    sign = "≥" if higher_is_better(runs) else "≤"
    several = _several(runs)
    note = f"Virtual time of the first evaluation with a personal {metric(runs)} of at least that much"
    note = note if sign == "≥" else note.replace("at least", "at most")
    note += "; mean ± standard deviation over the seeds" if several else ""
    note += f". {MISSING}: not reached" + (" by every seed." if several else ".")
    return [
        tag("h3", "Time to a score"),
        table(["", *(f"{sign}\u00a0{goal}" for goal in _shown(goals))], rows),
        tag("p", " ".join(filter(None, [note, _even(runs)])), class_="how"),
    ]


def _when(value: dict[str, float] | None, seeds: int, first: bool) -> object:
    if value is None:
        return MISSING
    shown = units(value["mean"])
    shown += f" ± {deviation(value, shown)}" if seeds > 1 else ""
    return tag("b", shown) if first else shown


# ---- what the clock showed


def _clocks(runs: Runs) -> list[Safe]:
    """A line per label, or tiles for one; what no run recorded, or what is zero in all, is left out."""
    columns = [(name, [read(seeds) for seeds in runs.values()], show) for name, read, show in COLUMNS]
    kept = [
        (name, [show(value) for value in values])
        for name, values, show in columns
        if any(values) or (name in ALWAYS and numbers(values))
    ]
    if not kept:
        return []
    if len(runs) == 1:
        return [tag("h3", "The clock"), tiles([(name, shown[0]) for name, shown in kept])]
    rows = [[label, *(shown[i] for _, shown in kept)] for i, label in enumerate(runs)]
    found = [tag("h3", "The clock"), table(["", *(name for name, _ in kept)], rows)]
    if _several(runs):
        found.append(
            tag("p", "Means over the seeds; the longest delay and oldest upload of all.", class_="how")
        )
    return found


def _even(runs: Runs) -> str:
    """Who had no delays: on its clock a unit is a round."""
    plain = [label for label, seeds in runs.items() if all(virtual_time(run) is None for run in seeds)]
    if not plain:
        return ""
    names = listed([shorten(label, 60) for label in plain])
    return f"{names} ran without delays: each round takes one unit."


Read = Callable[[Sequence[Result]], float | None]


def _fact(*keys: str) -> Read:
    return lambda seeds: mean(clock(run, *keys) for run in seeds)


def _most(*keys: str) -> Read:
    return lambda seeds: max(numbers(clock(run, *keys) for run in seeds), default=None)


COLUMNS: list[tuple[str, Read, Callable[[object], str]]] = [
    ("virtual time", _fact("time"), units),
    ("server steps per unit", _fact("updates_per_time"), units),
    ("clients at work", _fact("active"), share),
    ("mean delay", _fact("delay", "mean"), units),
    ("longest delay", _most("delay", "max"), units),
    ("mean staleness", _fact("staleness", "mean"), units),
    ("oldest upload", _most("staleness", "max"), count),
    ("uploads too late", _fact("late"), count),
    ("uploads lost", _fact("lost"), count),
    ("rounds abandoned", _fact("abandoned"), count),
]
ALWAYS = ("virtual time",)


# ---- slow clients


def _slow(runs: Runs, means: Means) -> list[Safe]:
    found = {label: slow(rows, higher_is_better(runs)) for label, rows in means.items()}
    lines = [
        tag("p", tag("b", f"{shorten(label, 60)}: ") if len(runs) > 1 else None, words, class_="how")
        for label, words in found.items()
        if words
    ]
    if len(lines) > MOST_NAMED:
        return [tag("details", tag("summary", "Slow clients"), *lines)]
    return [tag("h3", "Slow clients"), *lines] if lines else []


def slow(rows: Sequence[Row], higher: bool) -> str:
    """Who takes longest and how often it reported; whether slow clients score differently."""
    timed = [row for row in rows if number(row.get("delay")) is not None]
    delays = [float(row["delay"]) for row in timed]
    if not delays or math.isclose(min(delays), max(delays), rel_tol=1e-6):
        return ""
    order = sorted(timed, key=lambda row: -float(row["delay"]))[:MOST_SLOW]
    named = [f"{_called(row)} ({_turns(row['delay'], row.get('reports'))})" for row in order]
    usual = _turns(mean(delays), mean(row.get("reports") for row in rows))
    words = f"The longest mean delays are those of {listed(named)}; a client on average: {usual}."
    words += _late(rows)
    never = sum(number(row.get("reports")) == 0 for row in rows)
    words += f" {count(never)} of {count(len(rows))} clients never reported." if never else ""
    # where slow uploads were dropped, the delays of the others say little
    return words + _do_worse(rows, "reports" if _late(rows) else "delay", higher)


def _late(rows: Sequence[Row]) -> str:
    found = sorted((row for row in rows if number(row.get("late"))), key=lambda row: -float(row["late"]))
    named = [f"{_called(row)} ({count(row['late'])})" for row in found[:MOST_SLOW]]
    return f" Most often too late: {listed(named)}." if named else ""


def _called(row: Row) -> str:
    name = shorten(str(row["client"]), 40)
    return f"client {name}" if name[:1].isdecimal() else name


def _turns(delay: object, reports: object) -> str:
    return f"{units(delay)}, {count(reports)} report" + ("" if number(reports) == 1 else "s")


def _do_worse(rows: Sequence[Row], by: str, higher: bool) -> str:
    """Whether delay or reports go with the score, over the clients and with numbers; nothing of few."""
    pairs = [(number(row.get(by)), number(row.get("personal"))) for row in rows]
    there = [(x, own) for x, own in pairs if x is not None and own is not None]
    if len(there) < FEWEST or any(len(set(values)) == 1 for values in zip(*there)):
        return ""
    from scipy.stats import spearmanr  # heavy; as the test of a comparison

    found = spearmanr(*zip(*there))
    rho, p = float(found.statistic), float(found.pvalue)
    who = "Slow clients" if by == "delay" else "Clients that report rarely"
    verdict = "score worse" if (rho < 0) == (higher == (by == "delay")) else "score better"
    verdict = verdict if p < CLEAR else "do not score clearly differently"
    told = f"{rho:+.2f}".replace("-", "−")
    equals = "" if p < 0.001 else "= "
    return f" {who} {verdict} (rank correlation of {by} and score {told}, p {equals}{p_value(p)})."
