"""Which split to take, and why: a pure function of what the runs of `splits` left.

The best mean score decides. Splits that come within one standard error of it, client by client, count as
equally good (the one-standard-error rule of Breiman et al. 1984, on paired differences); of those the one
with the smallest personal part is taken, then the one with the least memory.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from partita.engine.record import Record, human_bytes
from partita.recipes.gradient_left import left
from partita.recipes.tables import Runs, Table
from partita.recipes.versus import ALONE, GLOBAL
from partita.report import compare
from partita.report.rows import difference, mean, number

NONE, ALL = "none", "all"
NEAR_ZERO = 0.1  # of what is asked of the same parameters where nothing is personal
FEW_CLIENTS, FEW_SAMPLES = 10, 10
LEGEND = (
    "none: one global model; all: each client alone. hurt: clients that do worse than with one of these. "
    "share, memory: of the parameters that are personal; of a client in training. "
    "left: mean ‖F_m(θ)‖, what clients still ask of the shared part θ once each has fitted its own part, by "
    "what they ask of the same parameters in the global model; for the untrained θ (start) and at the end. "
    "Near zero at the start: personalize less."
)
COLUMNS = (
    "part",
    "score",
    "worst tenth",
    "hurt vs global",
    "hurt vs alone",
    "share",
    "memory",
    "left, start",
    "left, end",
)


class Split(NamedTuple):
    """What a split came to; means over the seeds, None where there is nothing to count.

    part, label     as it was asked for, and its name among the runs
    score           {'mean', 'std'} of the clients' own models, over all test samples
    worst_tenth     what nine clients in ten reach
    hurt_vs_global  clients that do worse than with one global model
    hurt_vs_local   clients that do worse than alone
    clients         how many have a score
    share, memory   of the parameters that are personal; bytes in training on a client
    left            ‖F_m(θ)‖ at the start and the end, and by what the global model has: see `gradient_left`
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

    @property
    def mean(self) -> float | None:
        """The score."""
        return None if self.score is None else self.score["mean"]

    @property
    def cost(self) -> tuple[float, ...]:
        """The smaller, the better, among splits of equal score: those personalize least.

        Not by clients hurt: a split of the same score has some by chance, the two ends none against
        themselves.
        """
        share, memory = (math.inf if x is None else x for x in (self.share, self.memory))
        return share, memory


class Advice(NamedTuple):
    """The part to take (None: the runs do not say), why, and what else should be known."""

    part: str | None
    reason: str
    notes: list[str]


def figures(runs: Runs, parts: Mapping[str, str]) -> list[Split]:
    """A row for each split; `parts` are their names by the labels of the runs."""
    rows = {row["label"]: row for row in compare.table(runs)}
    return [_figures(runs, label, part, rows[label]) for label, part in parts.items()]


def advice(runs: Runs, rows: Sequence[Split]) -> Advice:
    """What to take, and why."""
    higher = _higher(runs)
    scored = [row for row in rows if row.mean is not None]
    if not scored:
        return Advice(None, "No split has a score: no client has test samples, or all runs failed.", [])
    best = (max if higher else min)(scored, key=lambda row: row.mean or 0.0)
    tied = [row for row in scored if row is best or _within_noise(runs, best.label, row.label, higher)]
    taken = min(tied, key=lambda row: row.cost)
    reason = f"{_first(taken, runs)} {_second(taken, best, scored, higher)}".strip()
    return Advice(taken.part, reason, [*_little_left(rows, taken), *_too_few(runs)])


def table(runs: Runs, rows: Sequence[Split], found: Advice) -> Table:
    """For people."""
    first = next(iter(runs.values()))
    over = f"{rows[0].clients or 0:g} clients, {len(first)} seed{'s' * (len(first) > 1)}"
    title = f"Candidate splits: test {first[0].summary()['metric']}, {over}"
    shown = [_cells(row, row.part == found.part) for row in rows]
    return Table(title, COLUMNS, shown, f"{text(found)}\n\n{LEGEND}")


def text(found: Advice) -> str:
    """The advice as a paragraph and a list."""
    head = "No recommendation." if found.part is None else f"Recommended: {found.part}."
    notes = "".join(f"\n- {note}" for note in found.notes)
    return f"{head} {found.reason}" + (f"\n{notes}" if notes else "")


# ---- a row


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
    )


def _left(runs: Runs, label: str) -> list[dict[str, float]]:
    """One for each seed that has them."""
    within = None if label == GLOBAL else label
    pairs = [(a, b) for a, b in zip(runs[label], runs[GLOBAL]) if a.metrics and b.metrics]
    found = [left(a.metrics[-1], b.metrics[-1], within) for a, b in pairs]
    return [x for x in found if x is not None]


def _hurt(runs: Runs, label: str, reference: str) -> float | None:
    """Clients that do worse than in the reference's run of the same seed; a mean over the seeds."""
    if label == reference:
        return None
    gaps = [list(_gaps(a, b, _higher(runs)).values()) for a, b in zip(runs[label], runs[reference])]
    return mean(sum(gap < 0 for gap in some) for some in gaps if some)


def _gaps(ours: Record, theirs: Record, higher: bool) -> dict[str, float]:
    """By client: how much better our model is."""
    others = {row["client"]: number(row["personal"]) for row in theirs.clients}
    pairs = {row["client"]: (number(row["personal"]), others.get(row["client"])) for row in ours.clients}
    return {k: difference(a, b, higher) for k, (a, b) in pairs.items() if a is not None and b is not None}


def _higher(runs: Runs) -> bool:
    return next(iter(runs.values()))[0].higher_is_better


# ---- who is as good as the best


def _within_noise(runs: Runs, best: str, label: str, higher: bool) -> bool:
    """The mean lead of the best, client by client, is no more than its standard error."""
    leads: dict[str, list[float]] = {}
    for ours, theirs in zip(runs[best], runs[label]):
        for client, gap in _gaps(ours, theirs, higher).items():
            leads.setdefault(client, []).append(gap)
    found = [statistics.fmean(some) for some in leads.values()]
    if not found:
        return False
    error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else 0.0
    return statistics.fmean(found) <= error


# ---- words


def _first(taken: Split, runs: Runs) -> str:
    """What it reaches."""
    ends = {part: _score(runs, label) for part, label in ((NONE, GLOBAL), (ALL, ALONE)) if part != taken.part}
    words = {NONE: "with one global model", ALL: "alone"}
    against = " and ".join(f"{shown} {words[part]}" for part, shown in ends.items())
    metric = next(iter(runs.values()))[0].summary()["metric"]
    head = {
        NONE: "Do not personalize: one global model has",
        ALL: "Clients are better off alone: they have",
    }.get(taken.part, f"With {taken.share or 0:.1%} of the parameters personal, clients have")
    return f"{head} a test {metric} of {taken.mean:.4f}, against {against}{_harm(taken)}."


def _harm(taken: Split) -> str:
    counts = {"with the global model": taken.hurt_vs_global, "alone": taken.hurt_vs_local}
    said = [f"{n:.3g} would do better {other}" for other, n in counts.items() if n is not None]
    return f"; of {taken.clients:g} clients {' and '.join(said)}" if said and taken.clients else ""


def _second(taken: Split, best: Split, scored: Sequence[Split], higher: bool) -> str:
    """Why not another one."""
    if taken is not best:
        return (
            f"{_name(best)} ({best.mean:.4f}) is ahead by no more than the noise, and {_dearer(best, taken)}."
        )
    rest = [row for row in scored if row is not best]
    if not rest:
        return ""
    second = (max if higher else min)(rest, key=lambda row: row.mean or 0.0)
    return f"The next best is {_name(second)} with {second.mean:.4f}."


def _dearer(best: Split, taken: Split) -> str:
    if (best.share or 0) > (taken.share or 0):
        return f"makes more personal ({best.share or 0:.1%} against {taken.share or 0:.1%} of the parameters)"
    return "needs more memory"


def _name(row: Split) -> str:
    return {NONE: "one global model", ALL: "training alone"}.get(row.part, row.part)


def _score(runs: Runs, label: str) -> str:
    found = mean(run.summary()["test"]["personal"] for run in runs[label])
    return "no score" if found is None else f"{found:.4f}"


def _little_left(rows: Sequence[Split], taken: Split) -> list[str]:
    """‖F_m(θ)‖ near zero: of any split at the start, of the one that is taken at the end."""
    found = [
        f"{row.part}: even beside an untrained shared part the personal part alone fits every client (left "
        f"at the start: {row.left['start']:.2g}), so the shared part has nothing to learn. Personalize less."
        for row in rows
        if row.left is not None and row.left["start"] < NEAR_ZERO
    ]
    if not found and taken.left is not None and taken.left["end"] < NEAR_ZERO:
        found.append(
            f"{taken.part}: at the end every client is fitted (left: {taken.left['end']:.2g}); a smaller "
            "personal part may do as well."
        )
    return found


def _too_few(runs: Runs) -> list[str]:
    first = next(iter(runs.values()))
    sizes = [row["n_test"] for row in first[0].clients if row["n_test"]]
    found = []
    if len(sizes) < FEW_CLIENTS:
        found.append(
            f"Only {len(sizes)} clients have test samples: too few to tell the splits apart for sure."
        )
    if sizes and statistics.median(sizes) < FEW_SAMPLES:
        found.append(
            f"Half of the clients have {statistics.median(sizes):g} test samples or fewer: too few to tell "
            "who is hurt."
        )
    if len(first) == 1:
        found.append("One seed: another draw may end otherwise, and --seeds 3 would say.")
    return found


def _cells(row: Split, taken: bool) -> tuple[str, ...]:
    return (
        f"→ {row.part}" if taken else row.part,
        _spread(row.score),
        _cell(None if row.worst_tenth is None else row.worst_tenth["mean"], ".4f"),
        _cell(row.hurt_vs_global, ".3g"),
        _cell(row.hurt_vs_local, ".3g"),
        _cell(row.share, ".1%"),
        "-" if row.memory is None else human_bytes(row.memory),
        *(_cell(None if row.left is None else row.left[time], ".3f") for time in ("start", "end")),
    )


def _cell(value: float | None, shown: str) -> str:
    return "-" if value is None else format(value, shown)


def _spread(found: Mapping[str, float] | None) -> str:
    if found is None:
        return "-"
    return f"{found['mean']:.4f}" + (f" ± {found['std']:.4f}" if found["std"] else "")
