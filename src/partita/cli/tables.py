"""Tables that the commands print."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from partita.engine.record import (
    Record,
    Summary,
    further_metrics,
    gain,
    lookup,
    number,
    personal_part,
    score_text,
    undefined,
)
from partita.engine.verdict import ending, estimate
from partita.recipes import Table as Figure
from partita.report.ranking import Standing

PADDING = 3  # between two columns
SIDES = 1  # left and right of a table


def scores(run: Record, summary: Summary) -> Table:
    """Return the local, global and personal scores with their intervals, and how long each has trained."""
    part = personal_part(summary)
    table = Table(
        title=f"{escape(summary['algorithm'])}: {summary['clients']} clients, {summary['rounds']} rounds, "
        f"seed {summary['seed']}",
        caption=(f"personal: {escape(part)}\n" if part else "") + f"{summary['seconds']:.1f} s, "
        f"{summary['client_steps_per_second']:,.0f} client steps per second{_byzantine(summary)}"
        + "".join(f";{line[1:]}" for line in summary.abandoned())
        + "".join(f"\n{line.strip()}" for line in summary.privacy())
        + _newcomers(summary)
        + "".join(f"\n{escape(words)}" for words in undefined(summary)),
        box=SIMPLE_HEAD,
    )
    table.add_column("model", no_wrap=True)
    metric = summary["metric"].replace("_", "_\n")  # a long name leaves no room for the last column
    for name in (f"test\n{metric}", "95 % interval", "worst\ntenth", "local\nepochs"):
        table.add_column(escape(name), justify="right", no_wrap=True)
    table.add_column("training", overflow="fold")
    names = {"local": "each client alone", "global": "one global model", "personal": "personal models"}
    for kind, name in names.items():
        baselines = summary.get("baselines") or {}
        training = baselines[kind] if kind in baselines else summary.get("training")
        ends = lookup(summary, "intervals", kind) or (None, None)
        numbers = [summary["test"][kind], *ends, run.worst_tenth(kind)]
        value, low, high, worst = ("-" if x is None else f"{x:.3f}" for x in numbers)
        epochs = number(lookup(training, "epochs", "mean"))
        interval = "-" if low == "-" else f"{low} to {high}"
        length = "-" if epochs is None else f"{epochs:,.3g}"
        table.add_row(name, value, interval, worst, length, ending(training))
    return table


def further(summary: Summary) -> Table | None:
    """Return the scores by the metrics beyond the first; None where there is one metric."""
    table = Table(title="Other metrics (test)", box=SIMPLE_HEAD)
    for i, column in enumerate(("metric", "each client alone", "one global model", "personal models")):
        table.add_column(column, justify="right" if i else "left", overflow="fold")
    for name, means in further_metrics(summary).items():
        table.add_row(escape(name), *map(score_text, means.values()))
    return table if table.rows else None


def losers(summary: Summary) -> Table | None:
    """Return the three things about clients that are worse off; None where nothing was compared."""
    table = Table(title="Clients worse off with their personal model", box=SIMPLE_HEAD)
    for i, column in enumerate(("", "in the sample", "beyond chance", "truly lose (95 %)")):
        table.add_column(column, justify="right" if i else "left", overflow="fold")
    for kind, name in (("global", "vs global"), ("local", "vs alone")):
        hurt, chance = summary["hurt"].get(f"vs_{kind}"), lookup(summary, "chance", f"vs_{kind}")
        if hurt is not None:
            beyond = lookup(chance, "beyond_chance")
            known = "-" if beyond is None else str(beyond)
            table.add_row(name, f"{hurt} of {summary['scored']}", known, estimate(chance) or "-")
    return table if table.rows else None


def newcomers(result: Record, rows: int = 20) -> Table:
    """Return the scores of clients that came after training, the first of them."""
    shown = list(result.table[:rows])
    rest = f"{len(result.clients) - rows} more" if len(result.clients) > rows else ""
    table = Table(
        title=f"Clients that came after training ({escape(str(result.facts['metric']))})", caption=rest
    )
    for column in ("client", "training samples", "test samples", "global", "personal"):
        table.add_column(column, justify="right", overflow="fold")
    for row in shown:
        cells = ["-" if row[k] is None else f"{row[k]:.4f}" for k in ("global", "personal")]
        table.add_row(escape(row["client"]), str(row["n_train"]), str(row["n_test"]), *cells)
    return table


def _newcomers(summary: Summary) -> str:
    came = summary.get("newcomers")
    if not came:
        return ""
    names = {"local": "alone", "global": "global model", "personal": "personal models"}
    scores = [f"{name} {came['test'][k]:.4f}" for k, name in names.items() if came["test"][k] is not None]
    return f"\n{came['clients']} newcomers, not in training: {', '.join(scores)}"


def _byzantine(summary: Summary) -> str:
    attack = summary.get("byzantine")
    if not attack:
        return ""
    count = f"{attack['clients']} of {summary['clients']} clients are Byzantine"
    return f"; {count} ({escape(str(attack['attack']))}): scores of the others"


def gains(run: Record, rows: int = 3) -> Table:
    """Return the clients whose personal model gains and loses most, against the better of the two others."""
    table = Table(
        title="Who gains and who loses most",
        caption="change vs the better of alone and global; see the page for what is chance",
    )
    for column in ("client", "training samples", "alone", "global", "personal", "change"):
        table.add_column(column, justify="right", overflow="fold")
    better = max if run.higher_is_better else min
    scored: list[tuple[float, dict[str, Any]]] = []
    for row in run.clients:
        if not row["byzantine"] and None not in (row["local"], row["global"], row["personal"]):
            other = better(row["local"], row["global"])
            scored.append((float(gain(row["personal"], other, run.higher_is_better)), row))
    scored.sort(key=lambda pair: -pair[0])
    shown = scored if len(scored) <= 2 * rows else [*scored[:rows], *scored[-rows:]]
    for i, (gained, row) in enumerate(shown):
        colour = "green" if gained > 0 else "red" if gained < 0 else ""
        cells = [f"{row[k]:.3f}" for k in ("local", "global", "personal")]
        change = f"[{colour}]{gained:+.3f}[/{colour}]" if colour else f"{gained:+.3f}"
        table.add_row(escape(row["client"]), str(row["n_train"]), *cells, change, end_section=i == rows - 1)
    return table


NARROW = (
    "seconds",
    "training",
    "beyond\nchance vs\nalone",
    "worse vs\nalone\n(sample)",
    "95 %\ninterval",
    "worst\ntenth",
    "beyond\nchance vs\nglobal",
    "alone",
)
"""Columns of a comparison that a narrow screen leaves to the page, the first ones first."""
LABEL = 18  # of a method's name, on one line


def comparison(rows: Sequence[Mapping[str, Any]], best: str | None, width: int = 80) -> Table:
    """Return a row for each method or variant, with as many columns as fit.

    best  the label to mark: one that is better beyond chance, if there is such
    """
    seeds, metric = max(row["seeds"] for row in rows), rows[0]["metric"]
    over = "1 seed" if seeds == 1 else f"mean ± deviation of {seeds} seeds"
    table = Table(
        title=escape(f"test {metric}, {over}"),
        caption="worse: clients with a personal score below the reference's; beyond: not by chance "
        "(10 % false discoveries)",
        box=SIMPLE_HEAD,
    )
    table.add_column("method", overflow="fold")
    filled: dict[str, list[str]] = {}
    for dropped in ((), *(NARROW[:n] for n in range(len(NARROW) + 1))):
        cells_of = _columns(best, wide=not filled)  # deviations of all scores go first
        columns = {k: [cell(row) for row in rows] for k, cell in cells_of.items() if k not in dropped}
        filled = {name: cells for name, cells in columns.items() if set(cells) != {"-"}}
        sizes = [max(map(_line, (name, *cells))) + PADDING for name, cells in filled.items()]
        if SIDES + LABEL + PADDING + sum(sizes) <= width:
            break
    for name in filled:
        table.add_column(name, justify="right", no_wrap=True)
    for i, row in enumerate(rows):
        mark = " [red](diverged)[/red]" if row["diverged"] else ""
        table.add_row(escape(row["label"]) + mark, *(cells[i] for cells in filled.values()))
    return table


def _columns(best: str | None, wide: bool) -> dict[str, Callable[[Mapping[str, Any]], str]]:
    def personal(row: Mapping[str, Any]) -> str:
        text = _spread(row["personal"], True)
        return f"[bold green]{text}[/bold green]" if row["label"] == best else text

    def worse(row: Mapping[str, Any], kind: str) -> str:
        key = f"hurt_vs_{kind}"
        return "-" if row[key] is None else f"{row[key]:.3g}/{row['scored']:g}"

    def beyond(row: Mapping[str, Any], kind: str) -> str:
        chance = row[f"chance_vs_{kind}"]
        return "-" if chance is None else f"{chance['beyond_chance']:.3g}"

    def interval(row: Mapping[str, Any]) -> str:
        ends = row["interval"]
        return "-" if ends is None else f"{ends[0]:.3f} to {ends[1]:.3f}"

    return {
        "personal": personal,
        "95 %\ninterval": interval,
        "alone": lambda row: _spread(row["local"], wide),
        "global": lambda row: _spread(row["global"], wide),
        "worst\ntenth": lambda row: _spread(row["worst_tenth"], wide),
        "worse vs\nglobal\n(sample)": lambda row: worse(row, "global"),
        "beyond\nchance vs\nglobal": lambda row: beyond(row, "global"),
        "worse vs\nalone\n(sample)": lambda row: worse(row, "local"),
        "beyond\nchance vs\nalone": lambda row: beyond(row, "local"),
        "local\nepochs": lambda row: "-" if row["epochs"] is None else f"{row['epochs']:,.3g}",
        "training": lambda row: row["training"] or "-",
        "seconds": lambda row: f"{row['seconds'] or 0:.1f}",
    }


def pairs(where: Standing) -> Table:
    """Return every pair of methods: the mean difference with its interval, corrected for all pairs."""
    table = Table(
        title="Every pair of methods, client by client",
        caption=f"{where.clients} clients; intervals and p-values hold for all pairs at once",
        box=SIMPLE_HEAD,
    )
    for column in ("better on average", "than"):
        table.add_column(column, overflow="fold")
    for column in ("difference (95 %)", "p"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for pair in where.pairs:
        verdict = "clear" if pair.clear else "too early" if pair.early else "not clear"
        cells = (escape(pair.first), escape(pair.second), str(pair.difference), f"{pair.p_mean:.2g}", verdict)
        table.add_row(*cells)
    return table


@dataclass(frozen=True)
class figure:
    """A table of a study; one that is wider than the screen comes in parts, and no word of it is broken."""

    source: Figure

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        """Yield the parts."""
        shares = _shares(self.source, options.max_width)
        for i, columns in enumerate(shares):
            part = f", part {i + 1} of {len(shares)}" if len(shares) > 1 else ""
            table = Table(title=escape(self.source.title + part), box=SIMPLE_HEAD)
            table.caption = escape(self.source.note) if i == len(shares) - 1 else None
            cells = [[row[j] for row in (self.source.columns, *self.source.rows)] for j in columns]
            for j, width in zip(columns, _widths(cells, options.max_width)):
                name = escape(self.source.columns[j])
                table.add_column(name, justify="right" if j else "left", overflow="fold", width=width)
            for row in self.source.rows:
                table.add_row(*(escape(row[j]) for j in columns))
            yield table


def _shares(source: Figure, width: int) -> list[list[int]]:
    """Return the columns of each part of a table: those that tell the rows apart, and as many as fit."""
    least = [_longest_word([name, *cells]) + PADDING for name, *cells in zip(source.columns, *source.rows)]
    keys = next((n for n in range(1, len(least)) if len({r[:n] for r in source.rows}) == len(source.rows)), 1)
    room = width - SIDES - sum(least[:keys])
    shares: list[list[int]] = [[]]
    for column in range(keys, len(least)):
        if shares[-1] and sum(least[j] for j in [*shares[-1], column]) > room:
            shares.append([])
        shares[-1].append(column)
    return [[*range(keys), *share] for share in shares]


def _widths(columns: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the widths of columns: one line each, or the longest word and a share of what is left."""
    natural = [max(_line(escape(cell)) for cell in cells) for cells in columns]
    least = [_longest_word(cells) for cells in columns]
    room = width - SIDES - PADDING * len(columns)
    if sum(natural) <= room:
        return natural
    spare, wished = max(0, room - sum(least)), sum(natural) - sum(least)
    return [low + spare * (high - low) // max(1, wished) for low, high in zip(least, natural)]


def _line(cell: str) -> int:
    """Return the length of the longest line of a cell, without its colours."""
    return max(cell_len(line) for line in Text.from_markup(cell).plain.split("\n"))


def _longest_word(cells: Sequence[str]) -> int:
    return max((cell_len(word) for cell in cells for word in cell.split()), default=1)


def _spread(score: Mapping[str, float] | None, with_std: bool) -> str:
    if score is None:
        return "-"
    return f"{score['mean']:.4f}" + (f" ± {score['std']:.4f}" if with_std and score["std"] else "")
