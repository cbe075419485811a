"""Virtual time: when scores were reached, who was at work meanwhile, and whom the server waited for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from partita.engine.record import Record, lookup, mean, numbers, spread
from partita.report import figures as draw
from partita.report import histograms
from partita.report.figures import Figure
from partita.report.html import Safe, grid, note, panel, section, table, tag, tiles
from partita.report.rows import Averages, Row, Runs, federated, first, metric, several_seeds
from partita.report.words import MISSING, count, counted, deviation, listed, p_value, share, shorten, units

SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)
"""The shares of the best last score that the table has times for."""
MOST_NAMED, MOST_SLOW, FEWEST, CLEAR = 4, 3, 10, 0.05
Times = Mapping[str, Sequence[dict[str, float] | None]]
"""For each label, when it reached each target."""
SEEDS = " Bands are one standard deviation over the seeds; a line goes as far as all of its seeds do."
FIGURES = {
    "time.scores": (
        "Score against virtual time",
        "The learning curves against virtual time, whose unit is that of the delays; it says nothing of the "
        "seconds that the computation took.",
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


def time(runs: Runs, clients: Averages) -> tuple[dict[str, Figure], Safe | None]:
    """Return the figures by name, and the section; none where the clock only counted rounds.

    Clients that train alone wait for nobody: they appear as a level line only.
    """
    timed = federated(runs)
    if all(run.facts.virtual_time is None for seeds in timed.values() for run in seeds):
        return {}, None
    figures = draw.kept(
        {
            "time.scores": draw.curves_in_time(runs, metric(runs)),
            "time.active": _active(runs, timed),
            "time.delays": histograms.delays(runs),
            "time.ages": histograms.ages(runs),
        }
    )
    goals = targets(timed)
    times = {label: [reached(seeds, goal) for goal in goals] for label, seeds in timed.items()}
    words = _who_is_first(timed, goals, times)
    if all(run.facts.get("deployed") for seeds in timed.values() for run in seeds):
        words = f"{words} The clients are real: a unit of virtual time is a second.".strip()
    return figures, section(
        "time",
        "Virtual time",
        tag("p", words) if words else None,
        _grid(figures, ("time.scores", "time.active"), SEEDS if several_seeds(timed) else ""),
        *_reached(timed, goals, times),
        *_clocks(timed),
        _grid(figures, ("time.delays", "time.ages")),
        *_slow({label: record for label, record in clients.items() if label in timed}, len(timed) > 1),
    )


def _grid(figures: Mapping[str, Figure], names: Sequence[str], more: str = "") -> Safe | None:
    drawn = [(name, *FIGURES[name]) for name in names if name in figures]
    return grid([panel(name, title, words + more) for name, title, words in drawn])


def _active(runs: Runs, timed: Runs) -> Figure | None:
    traces = draw.bands(runs, draw.cell("active"), "clients at work", ".1%", ("time",), timed)
    axis = {**draw.titled("share of the clients"), "tickformat": ".0%", "range": [0, 1.03]}
    return draw.in_time(traces, axis)


# ---- when a score was reached


def targets(runs: Runs) -> list[float]:
    """Return round scores on the way to the best last one, the easiest first; none for scores below zero."""
    higher = first(runs).higher_is_better
    last = numbers(mean(map(_last, seeds)) for seeds in runs.values())
    best = (max if higher else min)(last, default=0.0)
    if best <= 0:
        return []
    exact = [best * s if higher else best / s for s in SHARES]
    step, goals = 10.0 ** (math.floor(math.log10(best)) - 1), list[float]()
    while len(set(goals)) < len(SHARES):
        # away from the best, so that it is reached; a little is rounding
        cut, slack = (math.floor, 1e-9) if higher else (math.ceil, -1e-9)
        goals = [float(f"{cut(x / step + slack) * step:.9g}") for x in exact]
        step /= 10
    return goals


def _last(run: Record) -> float | None:
    scores = numbers(row.get(f"{run.watched}.personal") for row in run.metrics)
    return scores[-1] if scores else None


def reached(seeds: Sequence[Record], goal: float) -> dict[str, float] | None:
    """Return when a score was reached, over the seeds; None unless all of them did."""
    times = [run.time_to(goal) for run in seeds]
    return None if None in times else spread(times)


def _who_is_first(runs: Runs, goals: Sequence[float], times: Times) -> str:
    """Say 'X reaches 0.90 after 35 units of virtual time, Y after 120', for the hardest goal of most runs."""
    if not goals:
        return ""
    who = {g: [label for label in runs if times[label][g] is not None] for g in range(len(goals))}
    # a single run reaches all of them; the last tenth may be luck
    goal = SHARES.index(0.9) if len(runs) == 1 else max(who, key=lambda g: (len(who[g]), g))
    order = sorted(who[goal], key=lambda label: _mean(times[label][goal]))
    if not order:
        return ""
    after = {label: units(_mean(times[label][goal])) for label in order}
    names = {label: shorten(label, 60) for label in runs}
    winner = order[0]
    of = f" of {units(mean(run.facts.virtual_time for run in runs[winner]))}" if len(runs) == 1 else ""
    words = f"{names[winner]} reaches {metric(runs)} {_decimals(goals)[goal]} after {after[winner]}{of} "
    words += "units of virtual time"
    others = [f"{names[label]} after {after[label]}" for label in order[1:]]
    if len(others) > MOST_NAMED:
        others = [f"the last of {len(order)}, {names[order[-1]]}, after {after[order[-1]]}"]
    missing = [names[label] for label in runs if label not in order]
    return ", ".join([words, *others]) + (f"; {_do_not(missing)}." if missing else ".")


def _do_not(missing: Sequence[str]) -> str:
    if len(missing) > MOST_NAMED:
        return f"{len(missing)} others do not"
    return f"{listed(list(missing))} {'does' if len(missing) == 1 else 'do'} not"


def _mean(value: dict[str, float] | None) -> float:
    return math.inf if value is None else value["mean"]


def _decimals(goals: Sequence[float]) -> list[str]:
    """Write all goals with as many decimals."""
    decimals = max(len(f"{goal:.9f}".rstrip("0").partition(".")[2]) for goal in goals)
    return [f"{goal:,.{decimals}f}" if min(goals) >= 1e-6 else f"{goal:.3g}" for goal in goals]


def _reached(runs: Runs, goals: Sequence[float], times: Times) -> list[Safe]:
    if not goals:
        return []
    soonest = [min(map(_mean, column)) for column in zip(*times.values())]

    def cell(label: str, time: dict[str, float] | None, best: float) -> object:
        if time is None:
            return MISSING
        words = units(time["mean"])
        words += f" ± {deviation(time, words)}" if len(runs[label]) > 1 else ""
        return tag("b", words) if len(runs) > 1 and time["mean"] == best else words

    rows = [
        [label, *(cell(label, time, best) for time, best in zip(row, soonest))]
        for label, row in times.items()
    ]
    sign, bound = ("≥", "least") if first(runs).higher_is_better else ("≤", "most")
    several = several_seeds(runs)
    words = f"Virtual time of the first evaluation with a personal {metric(runs)} of at {bound} that much"
    words += "; mean ± standard deviation over the seeds" if several else ""
    words += f". {MISSING}: not reached" + (" by every seed." if several else ".")
    return [
        tag("h3", "Time to a score"),
        table(["", *(f"{sign}\u00a0{goal}" for goal in _decimals(goals))], rows),
        note(words + _without_delays(runs)),
    ]


def _without_delays(runs: Runs) -> str:
    labels = [label for label, seeds in runs.items() if all(r.facts.virtual_time is None for r in seeds)]
    names = [shorten(label, 60) for label in labels]
    return f" {listed(names)} ran without delays: each round takes one unit." if names else ""


# ---- what the clock showed

Read = Callable[[Sequence[Record]], float | None]


def _fact(*keys: str) -> Read:
    return lambda seeds: mean(lookup(run.facts, "clock", *keys) for run in seeds)


def _most(*keys: str) -> Read:
    return lambda seeds: max(numbers(lookup(run.facts, "clock", *keys) for run in seeds), default=None)


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


def _clocks(runs: Runs) -> list[Safe]:
    """Return a line per label, or tiles for one; what is zero or not recorded in all runs is left out."""
    columns = {
        name: [show(value) for value in values]
        for name, read, show in COLUMNS
        for values in [[read(seeds) for seeds in runs.values()]]
        if any(values) or (name == "virtual time" and numbers(values))
    }
    if not columns:
        return []
    title = tag("h3", "The clock")
    if len(runs) == 1:
        return [title, tiles((name, cell) for name, [cell] in columns.items())]
    rows = [[label, *cells] for label, *cells in zip(runs, *columns.values())]
    words = "Means over the seeds; the longest delay and oldest upload of all."
    return [title, table(["", *columns], rows), *([note(words)] if several_seeds(runs) else [])]


# ---- slow clients


def _slow(clients: Averages, several: bool) -> list[Safe]:
    lines = [
        tag("p", tag("b", f"{shorten(label, 60)}: ") if several else None, words, class_="how")
        for label, words in ((label, slow(record)) for label, record in clients.items())
        if words
    ]
    if len(lines) > MOST_NAMED:
        return [tag("details", tag("summary", "Slow clients"), *lines)]
    return [tag("h3", "Slow clients"), *lines] if lines else []


def slow(clients: Record) -> str:
    """Say who takes longest and how often it reported; whether slow clients score differently."""
    delays, reports = clients.table.numbers("delay"), clients.table.numbers("reports")
    timed = np.flatnonzero(np.isfinite(delays))
    if not len(timed) or math.isclose(delays[timed].min(), delays[timed].max(), rel_tol=1e-6):
        return ""
    slowest = timed[np.argsort(-delays[timed], kind="stable")][:MOST_SLOW]
    named = [f"{_name(clients.clients[i])} ({_turns(delays[i], reports[i])})" for i in slowest.tolist()]
    words = f"The longest mean delays are those of {listed(named)}; "
    words += f"a client on average: {_turns(mean(delays), mean(reports))}."
    late = _late(clients)
    never = int((reports == 0).sum())
    words += f"{late} {count(never)} of {count(len(reports))} clients never reported." if never else late
    # where slow uploads were dropped, the delays of the others say little
    return words + _do_worse(clients, "reports" if late else "delay")


def _late(clients: Record) -> str:
    late = np.nan_to_num(clients.table.numbers("late"))
    order = np.argsort(-late, kind="stable")[:MOST_SLOW]
    named = [f"{_name(clients.clients[i])} ({count(late[i])})" for i in order.tolist() if late[i] > 0]
    return f" Most often too late: {listed(named)}." if named else ""


def _name(row: Row) -> str:
    name = shorten(str(row["client"]), 40)
    return f"client {name}" if name[:1].isdecimal() else name


def _turns(delay: object, reports: object) -> str:
    return f"{units(delay)}, {counted(reports, 'report')}"


def _do_worse(clients: Record, column: str) -> str:
    """Say with numbers whether delay or reports go with the score, over the clients; nothing of few."""
    x, scores = clients.table.numbers(column), clients.scores("personal")
    known = np.isfinite(x) & np.isfinite(scores)
    x, scores = x[known], scores[known]
    if len(x) < FEWEST or not np.ptp(x) or not np.ptp(scores):
        return ""
    from scipy.stats import spearmanr  # heavy; as the test of a comparison

    result = spearmanr(x, scores)
    rho, p = float(result.statistic), float(result.pvalue)
    who = "Slow clients" if column == "delay" else "Clients that report rarely"
    verdict = (
        "score worse" if (rho < 0) == (clients.higher_is_better == (column == "delay")) else "score better"
    )
    verdict = verdict if p < CLEAR else "do not score clearly differently"
    correlation = f"{rho:+.2f}".replace("-", "−")
    equals = "" if p < 0.001 else "= "
    return f" {who} {verdict} (rank correlation of {column} and score {correlation}, p {equals}{p_value(p)})."
