"""The tables and figures of Fed+: Kundu et al. (2022), Table 2 and Figures 1 to 4."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from partita.engine.record import Record, lookup, mean, numbers
from partita.recipes.tables import Runs, Table, mean_std, score
from partita.report.charts import Chart, Panel, Series, curve

PLUS = ("fedavg_plus", "fedgeomed_plus", "fedcomed_plus")
NAMES = ("scaffold", "pfedme", "perfedavg", "apfl", *PLUS)
PAPER = {  # Table 2, in the order of NAMES
    "robust-N10": (81.4, 89.4, 87.3, 88.3, 87.0, 91.5, 80.5),
    "robust-N50": (82.3, 85.5, 85.7, 81.3, 86.7, 91.4, 79.4),
    "personal-N10": (72.0, 72.3, 70.6, 75.7, 71.9, 78.3, 66.7),
    "personal-N50": (63.8, 66.3, 68.9, 72.7, 69.4, 76.2, 52.3),
    "regression": (2764, 4268, 2780, 1606, 1966, 1048, 1074),
}
PARTIES = {  # the accuracy of Fed+ by the number of parties, the mean of its three variants (section 5.2)
    "synthetic": {3: 70.22, 15: 90.73, 30: 98.03},
    "mnist": {100: 69.80, 500: 81.34, 1000: 83.36},
    "femnist": {20: 25.16, 100: 68.71, 200: 78.66},
}
PART = "Over the parties that took part; one that never had a turn has nothing but its zero start."


def table_2(runs: Runs, datasets: Sequence[str], title: str, scale: float, digits: int) -> Table:
    """Return ours / the paper's, and beside them every party alone."""
    rows = []
    for name in datasets:
        *ours, alone = (
            score(runs[f"{name}-{method}"], scale=scale, digits=digits) for method in (*NAMES, "local")
        )
        rows.append((name, *(f"{a} / {b:g}" for a, b in zip(ours, PAPER[name])), alone))
    return Table(title, ("ours / the paper's", *NAMES, "alone"), rows)


def scores_table(runs: Runs) -> Table:
    """Return the accuracy over samples, and the mean over parties, of those that took part."""
    rows: list[tuple[str, ...]] = []
    for name, seeds in runs.items():
        accuracies = (map(_accuracy, seeds), map(_by_party, seeds), map(_share, seeds))
        rows.append((name, *(mean_std(of, 100, 1) for of in accuracies)))
    columns = ("method", "over samples", "mean over parties", "took part, %")
    return Table("Test accuracy, % (Figure 4)", columns, rows, PART)


def parties_table(runs: Runs, name: str, numbers: Sequence[int]) -> Table:
    """Return the accuracy of Fed+ by the number of parties, as section 5.2 does: the mean of the three."""
    rows: list[tuple[str, ...]] = []
    for parties in sorted(numbers):
        three = zip(*(runs[f"{method}-N{parties}"] for method in PLUS))
        means = [float(np.mean([_accuracy(run) for run in of])) for of in three]
        share = mean_std(map(_share, runs[f"{PLUS[0]}-N{parties}"]), 100, 1)
        paper = PARTIES[name].get(parties)
        rows.append((str(parties), mean_std(means, 100, 1), "-" if paper is None else f"{paper:.1f}", share))
    columns = ("parties", "ours", "the paper's", "took part, %")
    return Table("Accuracy of Fed+ by number of parties, %", columns, rows, PART)


def figure_4(runs: Runs, name: str, numbers: Sequence[int]) -> Chart:
    """Return test accuracy over rounds, a curve for each method (Figure 4), and Fed+ by number of parties."""

    def accuracy(row: Mapping[str, Any]) -> Any:
        return row["test.personal"]

    most, ordered = f"-N{numbers[0]}", sorted(numbers)
    curves = [
        curve(variant.removesuffix(most), seeds, accuracy, scale=100)
        for variant, seeds in runs.items()
        if variant.endswith(most)
    ]
    bars = []
    for method in PLUS:
        ends = [np.array([100 * _accuracy(run) for run in runs[f"{method}-N{n}"]]) for n in ordered]
        spreads = [float(of.std(ddof=1)) if len(of) > 1 else 0.0 for of in ends]
        bars.append(Series(method, [str(n) for n in ordered], [of.mean() for of in ends], spreads, "bar"))
    return Chart(
        f"Methods with 90 % stragglers: {name} (Figure 4)",
        [
            Panel(f"{name}, {numbers[0]} parties", "round", "test accuracy, %", curves),
            Panel("Fed+ by number of parties", "parties", "test accuracy, %", bars),
        ],
        "Left: over all parties, also those without a turn until then, who still have their zero start. "
        "Right: at the end, over the parties that took part.",
    )


def took_part(run: Record) -> np.ndarray:
    """Return for each party whether it has had a turn, be it one that was dropped; others have their start.

    Cohorts are drawn alike under all methods, so that these are the same parties for each of them.
    """
    taken: np.ndarray = run.table.numbers("reports") + run.table.numbers("late") > 0
    return taken


def _accuracy(run: Record) -> float:
    """Return the test accuracy over all samples of the parties that took part; NaN where there is none."""
    scores, samples = run.scores(), run.table.numbers("n_test")
    known = took_part(run) & np.isfinite(scores) & (samples > 0)
    return float(np.average(scores[known], weights=samples[known])) if known.any() else np.nan


def _by_party(run: Record) -> float | None:
    """Return the mean test accuracy of the parties that took part; None where there is none."""
    return mean(run.scores()[took_part(run)])


def _share(run: Record) -> float:
    return float(took_part(run).mean())


def jumps_table(runs: Runs) -> Table:
    """Return Figures 1 to 3 in figures; the report has the pictures."""
    rows: list[tuple[str, ...]] = []
    for name, seeds in runs.items():
        columns = zip(*map(_aggregation, seeds))  # figures × seeds
        rows.append((name, *(mean_std(column, digits=3) for column in columns), score(seeds)))
    titles = ("method", "change, mean", "change, largest", "loss before", "loss after", "test accuracy, %")
    note = "Change of weights at aggregation; training loss of the cohort before (λ = 0) and after (λ = 1)."
    return Table("What aggregation does (Figures 1 to 3), over all rounds", titles, rows, note)


def _aggregation(run: Record) -> tuple[float | None, ...]:
    """Return the mean and the largest change, and the mean loss before and after; None where there is none.

    Rounds without a finite value, as after training has diverged, do not count.
    """
    change = numbers(map(_measured("aggregation_change", "mean"), run.metrics))
    lines = [line for line in map(_measured("line_loss", "loss"), run.metrics) if line]
    return mean(change), max(change, default=None), *(mean(line[end] for line in lines) for end in (0, -1))


# ---- Figures 1 to 3


def figures_1_to_3(runs: Runs) -> list[Chart]:
    """Return Figures 1 to 3, each with a panel for each method."""
    changes, scores, lines = [], [], []
    for name, seeds in runs.items():
        mean, deviation = (curve(name, seeds, _measured("aggregation_change", k)) for k in ("mean", "std"))
        spread = [v or 0.0 for v in deviation.y] if len(deviation.y) == len(mean.y) else ()
        changes.append(Panel(name, "round", "change of weights", [mean._replace(spread=spread)]))
        accuracy = curve(name, seeds, lambda row: row["test.personal"], scale=100)
        scores.append(Panel(name, "round", "test accuracy, %", [accuracy]))
        lines.append(Panel(name, "λ", "training loss", _way(name, seeds)))
    return [
        Chart(
            "Change of weights at aggregation (Figure 1)",
            changes,
            "Mean over the cohort, with one deviation.",
        ),
        Chart("Training over rounds (Figure 2)", scores),
        Chart(
            "The way from the local to the aggregated model (Figure 3)",
            lines,
            "Loss of the cohort in the last round, from its own models (λ = 0) to the aggregate (λ = 1), and "
            "at the aggregate of the round before. A right end above the left one: the full step hurts.",
        ),
    ]


def _measured(measure: str, key: str) -> Callable[[Mapping[str, Any]], Any]:
    """Return what reads a number of a measure from a row of metrics; None where it has none."""
    return lambda row: lookup(row, "measures", measure, key)


def _way(name: str, seeds: Sequence[Record]) -> list[Series]:
    """Return the loss along λ after the last round, and where the round before ended: means over seeds."""
    read = _measured("line_loss", "loss")
    ways = [[read(row) for row in run.metrics if read(row)] for run in seeds]
    ways = [way for way in ways if len(way) > 1]
    if not ways:
        return []
    last = np.array([way[-1] for way in ways], dtype=float)  # seeds × values of λ
    before = float(np.mean(np.array([way[-2][-1] for way in ways], dtype=float)))
    lam = np.linspace(0, 1, last.shape[1]).tolist()
    spread = last.std(0, ddof=1).tolist() if len(last) > 1 else ()
    return [
        Series(name, lam, last.mean(0).tolist(), spread),
        Series("the aggregate before", [0.0, 1.0], [before, before]),
    ]
