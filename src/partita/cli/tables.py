"""Tables that the commands print."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from partita.engine.record import Record, Summary, gain, personal_part
from partita.recipes import Table as Figure


def scores(run: Record, summary: Summary) -> Table:
    """Return the local, global and personal scores, and how many clients the personal model hurts."""
    part = personal_part(summary)
    table = Table(
        title=f"{escape(summary['algorithm'])}: {summary['clients']} clients, {summary['rounds']} rounds, "
        f"seed {summary['seed']}",
        caption=(f"personal: {escape(part)}\n" if part else "") + f"{summary['seconds']:.1f} s, "
        f"{summary['client_steps_per_second']:,.0f} client steps per second{_byzantine(summary)}"
        + "".join(f";{line[1:]}" for line in summary.abandoned())
        + _newcomers(summary),
    )
    table.add_column("model")
    table.add_column(escape(f"test {summary['metric']}"), justify="right")
    table.add_column("worst tenth of clients", justify="right")
    table.add_column("clients better off with it", justify="right")
    names = {"local": "each client alone", "global": "one global model", "personal": "personal models"}
    scores = {k: v for k, v in summary["test"].items() if v is not None}
    better = max if run.higher_is_better else min
    best = better(scores.values(), default=None)
    for kind, name in names.items():
        value, hurt = summary["test"][kind], summary["hurt"].get(f"vs_{kind}")
        shown, worst = ("-" if score is None else f"{score:.4f}" for score in (value, run.worst_tenth(kind)))
        table.add_row(
            name,
            f"[bold green]{shown}[/bold green]" if value is not None and value == best else shown,
            worst,
            "" if hurt is None else f"{hurt} of {summary['scored']}",
        )
    return table


def newcomers(result: Record, rows: int = 20) -> Table:
    """Return the scores of clients that came after training, the first of them."""
    shown = list(result.table[:rows])
    rest = f"{len(result.clients) - rows} more" if len(result.clients) > rows else ""
    table = Table(
        title=f"Clients that came after training ({escape(str(result.facts['metric']))})", caption=rest
    )
    for column in ("client", "training samples", "test samples", "global", "personal"):
        table.add_column(column, justify="right")
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
    table = Table(title="Who gains and who loses most")
    for column in ("client", "training samples", "alone", "global", "personal", "gain"):
        table.add_column(column, justify="right")
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


def comparison(rows: Sequence[Mapping[str, Any]], width: int = 80) -> Table:
    """Return a row for each method or variant, the best one marked, with as many columns as fit."""
    seeds, metric = max(row["seeds"] for row in rows), rows[0]["metric"]
    over = "1 seed" if seeds == 1 else f"mean ± deviation of {seeds} seeds"
    table = Table(
        title=escape(f"test {metric}, {over}"),
        caption="hurt: clients that do worse with their personal model",
        box=SIMPLE_HEAD,
    )
    table.add_column("method", overflow="fold")
    columns = {name: [cell(row) for row in rows] for name, cell in _columns(wide=width >= 140).items()}
    for least, name in ((100, "seconds"), (80, "worst\ntenth"), (80, "hurt vs\nalone"), (60, "alone")):
        if width < least:
            del columns[name]
    filled = {name: cells for name, cells in columns.items() if set(cells) != {"-"}}
    for name in filled:
        table.add_column(name, justify="right", no_wrap=True)
    for i, row in enumerate(rows):
        mark = " [red](diverged)[/red]" if row["diverged"] else ""
        table.add_row(escape(row["label"]) + mark, *(cells[i] for cells in filled.values()))
    return table


def _columns(wide: bool) -> dict[str, Callable[[Mapping[str, Any]], str]]:
    def personal(row: Mapping[str, Any]) -> str:
        text = _spread(row["personal"], True)
        return f"[bold green]{text}[/bold green]" if row["best"] else text

    def hurt(row: Mapping[str, Any], key: str) -> str:
        return "-" if row[key] is None else f"{row[key]:.3g}/{row['scored']:g}"

    return {
        "alone": lambda row: _spread(row["local"], wide),
        "global": lambda row: _spread(row["global"], wide),
        "personal": personal,
        "worst\ntenth": lambda row: _spread(row["worst_tenth"], wide),
        "hurt vs\nglobal": lambda row: hurt(row, "hurt_vs_global"),
        "hurt vs\nalone": lambda row: hurt(row, "hurt_vs_local"),
        "seconds": lambda row: f"{row['seconds'] or 0:.1f}",
    }


def pairs(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return every method against the best, client by client."""
    against = escape(rows[0]["against"])
    table = Table(
        title=f"Personal models client by client, against {against}",
        caption="clients (of each seed, where seeds have different ones); differences: positive is better",
        box=SIMPLE_HEAD,
    )
    table.add_column("method", overflow="fold")
    for column in ("better", "equal", "worse", "median", "mean", "Wilcoxon p"):
        table.add_column(column, justify="right")
    for row in rows:
        counts = [str(row[k]) for k in ("better", "equal", "worse")]
        means = ["-" if row[k] is None else f"{row[k]:+.4f}" for k in ("median", "mean")]
        table.add_row(escape(row["label"]), *counts, *means, "-" if row["p"] is None else f"{row['p']:.2g}")
    return table


def figure(source: Figure) -> Table:
    """Return a table of a study."""
    table = Table(title=escape(source.title), caption=escape(source.note) or None, box=SIMPLE_HEAD)
    for i, column in enumerate(source.columns):
        table.add_column(escape(column), justify="left" if i == 0 else "right", overflow="fold")
    for row in source.rows:
        table.add_row(*map(escape, row))
    return table


def _spread(score: Mapping[str, float] | None, with_std: bool) -> str:
    if score is None:
        return "-"
    return f"{score['mean']:.4f}" + (f" ± {score['std']:.4f}" if with_std and score["std"] else "")
