"""Which split to take: a pure function of the records of `splits`.

The best mean score decides, on validation samples where there are some. Splits that come within one
standard error of it, client by client, count as equally good (the one-standard-error rule of Breiman et al.
1984, on paired differences); of those the one with the smallest personal part is taken, then the one with the
least memory. Nothing is recommended while a candidate still rises, or is not known to have converged: the
longest trained would win.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from partita.engine import verdict
from partita.engine.record import Record, gain, human_bytes, lookup, mean
from partita.recipes.gradient_left import left
from partita.recipes.tables import Runs, Table
from partita.recipes.versus import ALONE, GLOBAL
from partita.report import compare

NONE, ALL = "none", "all"
VALIDATION = "personal_validation"  # of clients.csv
NEAR_ZERO = 0.1  # of the gradient of the same parameters where nothing is personal
FEW_CLIENTS, FEW_SAMPLES = 10, 10
TEST_DECIDES = "There are no validation samples: test samples have decided, so the best score is flattered."
LEGEND = (
    "none: one global model; all: each client alone. hurt: clients that do worse than with one of these. "
    "epochs: local passes of a client over its training samples, in all rounds. "
    "share: of the parameters that are personal; memory: of a client in training. "
    "left: mean ‖F_m(θ)‖, the gradient of the shared part θ once each client has fitted its own part, "
    "relative to that of the same parameters in the global model; for the untrained θ (start) and at the end."
    " Near zero at the start: personalize less."
)
COLUMNS = (
    "part",
    "score",
    "worst tenth",
    "hurt vs global",
    "hurt vs alone",
    "epochs",
    "share",
    "memory",
    "left, start",
    "left, end",
)


class Split(NamedTuple):
    """The figures of a split; means over the seeds, None where nothing was counted.

    part, label     as it was asked for, and its name among the runs
    score           {'mean', 'std'} of the clients' own models, over all test samples
    worst_tenth     what nine clients in ten reach
    hurt_vs_global  clients that do worse than with one global model
    hurt_vs_local   clients that do worse than alone
    clients         how many have a score
    share           of the parameters that are personal
    memory          bytes of a client in training
    left            ‖F_m(θ)‖ at the start and the end, bare and relative to the global model: `gradient_left`
    validation      the mean score on validation samples, which decides where there are some
    epochs          local passes of a client over its training samples, in all rounds
    """

    part: str
    label: str
    score: dict[str, float] | None
    worst_tenth: dict[str, float] | None
    hurt_vs_global: float | None
    hurt_vs_local: float | None
    clients: float | None
    share: float | None
    memory: float | None
    left: dict[str, float] | None
    validation: float | None = None
    epochs: float | None = None

    @property
    def mean(self) -> float | None:
        """The mean score."""
        return None if self.score is None else self.score["mean"]

    @property
    def cost(self) -> tuple[float, ...]:
        """What decides among splits of equal score: the least personalization, then the least memory.

        Not the clients hurt: a split of the same score hurts some by chance, the two extremes none against
        themselves.
        """
        return tuple(math.inf if x is None else x for x in (self.share, self.memory))


class Advice(NamedTuple):
    """The recommended part, the reason, and notes of caution."""

    part: str | None
    reason: str
    notes: list[str]


def figures(runs: Runs, parts: Mapping[str, str]) -> list[Split]:
    """Return a row for each split; `parts` are their names by the labels of the runs."""
    rows = {row["label"]: row for row in compare.table(runs)}
    return [_figures(runs, label, part, rows[label]) for label, part in parts.items()]


def advice(runs: Runs, rows: Sequence[Split]) -> Advice:
    """Return which split to take, and the reason; none where a candidate has not trained enough."""
    better = max if _higher(runs) else min
    scored = [row for row in rows if row.mean is not None]
    validated = all(row.validation is not None for row in scored)

    column = VALIDATION if validated else "personal"

    def decisive(row: Split) -> float:
        return (row.validation if validated else row.mean) or 0.0

    if not scored:
        return Advice(None, "No split has a score: no client has test samples, or all runs failed.", [])
    notes = _too_few(runs) if validated else [*_too_few(runs), TEST_DECIDES]
    trainings = {_name(row): [run.facts.get("training") for run in runs[row.label]] for row in scored}
    if early := verdict.untrained(trainings):
        return Advice(None, f"It is too early to recommend a split: {early}.", [*_little_left(rows), *notes])
    best = better(scored, key=decisive)
    tied = [row for row in scored if row is best or _within_noise(runs, best.label, row.label, column)]
    taken = min(tied, key=lambda row: row.cost)
    reason = f"{_reached(taken, runs)} {_rival(taken, best, scored, better, decisive)}".strip()
    return Advice(taken.part, reason, [*_little_left(rows, taken), *notes])


def table(runs: Runs, rows: Sequence[Split], advised: Advice) -> Table:
    """Return the figures for people, with the advice below."""
    first = next(iter(runs.values()))
    over = f"{rows[0].clients or 0:g} clients, {len(first)} seed{'s' * (len(first) > 1)}"
    title = f"Candidate splits: test {first[0].summary()['metric']}, {over}"
    cells = [_cells(row, row.part == advised.part) for row in rows]
    return Table(title, COLUMNS, cells, f"{text(advised)}\n\n{LEGEND}")


def text(advised: Advice) -> str:
    """Return the advice as a paragraph and a list."""
    head = "No recommendation." if advised.part is None else f"Recommended: {advised.part}."
    notes = "".join(f"\n- {note}" for note in advised.notes)
    return f"{head} {advised.reason}" + (f"\n{notes}" if notes else "")


# ---- figures of a split


def _figures(runs: Runs, label: str, part: str, row: Mapping[str, Any]) -> Split:
    facts = [run.summary() for run in runs[label]]
    counts = [f["parameters"] for f in facts if f.get("parameters")]
    gradients = _left(runs, label)
    return Split(
        part,
        label,
        row["personal"],
        row["worst_tenth"],
        _hurt(runs, label, GLOBAL),
        _hurt(runs, label, ALONE),
        row["scored"],
        mean(c["personal"] / max(1, c["shared"] + c["personal"]) for c in counts),
        mean(f.get("client_memory") for f in facts),
        {k: statistics.fmean(g[k] for g in gradients) for k in gradients[0]} if gradients else None,
        mean(lookup(f, "validation", "personal") for f in facts),
        mean(lookup(f, "training", "epochs", "mean") for f in facts),
    )


def _left(runs: Runs, label: str) -> list[dict[str, float]]:
    """Return what is left to learn, for each seed that has measured it."""
    within = None if label == GLOBAL else label
    pairs = [(a, b) for a, b in zip(runs[label], runs[GLOBAL]) if a.metrics and b.metrics]
    measured = [left(a.metrics[-1], b.metrics[-1], within) for a, b in pairs]
    return [values for values in measured if values is not None]


def _hurt(runs: Runs, label: str, reference: str) -> float | None:
    """Return how many clients do worse than in the reference's run of the same seed, a mean over seeds."""
    if label == reference:
        return None
    leads = [list(_leads(a, b).values()) for a, b in zip(runs[label], runs[reference])]
    return mean(sum(lead < 0 for lead in seed) for seed in leads if seed)


def _leads(ours: Record, theirs: Record, column: str = "personal") -> dict[str, float]:
    """Return by client how much better our personal model is, where both have a score in this column."""
    others = dict(zip(theirs.names, theirs.table.numbers(column)))
    scores = zip(ours.names, ours.table.numbers(column))
    pairs = {name: (score, others[name]) for name, score in scores if name in others}
    gaps = {name: float(gain(a, b, ours.higher_is_better)) for name, (a, b) in pairs.items()}
    return {name: gap for name, gap in gaps.items() if not math.isnan(gap)}


def _higher(runs: Runs) -> bool:
    return next(iter(runs.values()))[0].higher_is_better


def _within_noise(runs: Runs, best: str, label: str, column: str) -> bool:
    """Return whether the mean lead of the best, client by client, is at most its standard error."""
    by_client: dict[str, list[float]] = {}
    for ours, theirs in zip(runs[best], runs[label]):
        for client, lead in _leads(ours, theirs, column).items():
            by_client.setdefault(client, []).append(lead)
    leads = [statistics.fmean(seeds) for seeds in by_client.values()]
    if not leads:
        return False
    error = statistics.stdev(leads) / math.sqrt(len(leads)) if len(leads) > 1 else 0.0
    return statistics.fmean(leads) <= error


# ---- words


def _reached(taken: Split, runs: Runs) -> str:
    """Say what the split reaches, against the two extremes."""
    extremes = {NONE: (GLOBAL, "with one global model"), ALL: (ALONE, "alone")}
    against = " and ".join(
        f"{_score(runs, label)} {words}" for part, (label, words) in extremes.items() if part != taken.part
    )
    metric = next(iter(runs.values()))[0].summary()["metric"]
    head = {
        NONE: "Do not personalize: one global model has",
        ALL: "Clients are better off alone: they have",
    }.get(taken.part, f"With {taken.share or 0:.1%} of the parameters personal, clients have")
    return f"{head} a test {metric} of {taken.mean:.4f}, against {against}{_harm(taken)}."


def _score(runs: Runs, label: str) -> str:
    score = mean(run.summary()["test"]["personal"] for run in runs[label])
    return "no score" if score is None else f"{score:.4f}"


def _harm(taken: Split) -> str:
    counts = {"with the global model": taken.hurt_vs_global, "alone": taken.hurt_vs_local}
    phrases = [f"{n:.3g} would do better {other}" for other, n in counts.items() if n is not None]
    return f"; of {taken.clients:g} clients {' and '.join(phrases)}" if phrases and taken.clients else ""


def _rival(
    taken: Split,
    best: Split,
    scored: Sequence[Split],
    better: Callable[..., Split],
    decisive: Callable[[Split], float],
) -> str:
    """Say why no other split is taken."""
    if taken is not best:
        more = f"makes more personal ({best.share or 0:.1%} against {taken.share or 0:.1%} of the parameters)"
        price = more if (best.share or 0) > (taken.share or 0) else "needs more memory"
        return f"{_name(best)} ({best.mean:.4f}) is ahead by no more than the noise, and {price}."
    rest = [row for row in scored if row is not best]
    if not rest:
        return ""
    second = better(rest, key=decisive)
    return f"The next best is {_name(second)} with {second.mean:.4f}."


def _name(row: Split) -> str:
    return {NONE: "one global model", ALL: "training alone"}.get(row.part, row.part)


def _little_left(rows: Sequence[Split], taken: Split | None = None) -> list[str]:
    """Note where ‖F_m(θ)‖ is near zero: of any split at the start, of the one that is taken at the end."""
    notes = [
        f"{row.part}: even beside an untrained shared part the personal part alone fits every client (left "
        f"at the start: {row.left['start']:.2g}), so the shared part has nothing to learn. Personalize less."
        for row in rows
        if row.left is not None and row.left["start"] < NEAR_ZERO
    ]
    if not notes and taken is not None and taken.left is not None and taken.left["end"] < NEAR_ZERO:
        notes.append(
            f"{taken.part}: at the end every client is fitted (left: {taken.left['end']:.2g}); a smaller "
            "personal part may do as well."
        )
    return notes


def _too_few(runs: Runs) -> list[str]:
    """Note where there are too few clients, test samples or seeds to be sure."""
    first = next(iter(runs.values()))
    sizes = [row["n_test"] for row in first[0].clients if row["n_test"]]
    notes = []
    if len(sizes) < FEW_CLIENTS:
        notes.append(
            f"Only {len(sizes)} clients have test samples: too few to tell the splits apart for sure."
        )
    if sizes and statistics.median(sizes) < FEW_SAMPLES:
        median = f"{statistics.median(sizes):g}"
        notes.append(f"Half of the clients have {median} test samples or fewer: too few to tell who is hurt.")
    if len(first) == 1:
        notes.append("One seed: another draw may end differently; --seeds 3 would show it.")
    return notes


# ---- cells


def _cells(row: Split, taken: bool) -> tuple[str, ...]:
    start, end = (None if row.left is None else row.left[time] for time in ("start", "end"))
    worst = None if row.worst_tenth is None else row.worst_tenth["mean"]
    spread = f" ± {row.score['std']:.4f}" if row.score is not None and row.score["std"] else ""
    return (
        f"→ {row.part}" if taken else row.part,
        _cell(row.mean, ".4f") + spread,
        _cell(worst, ".4f"),
        _cell(row.hurt_vs_global, ".3g"),
        _cell(row.hurt_vs_local, ".3g"),
        _cell(row.epochs, ",.0f"),
        _cell(row.share, ".1%"),
        "-" if row.memory is None else human_bytes(row.memory),
        _cell(start, ".3f"),
        _cell(end, ".3f"),
    )


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
