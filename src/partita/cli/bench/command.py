"""How fast it is here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from partita.cli import screen
from partita.cli.bench import METHODS, WORKLOADS, Row, by_method, by_workload
from partita.cli.bench.peers import PEERS, choose
from partita.cli.bench.peers.apart import Speed
from partita.cli.bench.plot import checked, plot
from partita.cli.common import announcer
from partita.cli.options import Executor, Precision, Quiet, path
from partita.core import check
from partita.engine.execute import EXECUTORS
from partita.engine.store.files import json_text
from partita.report.words import shorten, units

LONGEST = 60  # of an error in a table


def bench(
    workloads: Annotated[
        list[str] | None, typer.Argument(help=f"Of: {', '.join(WORKLOADS)} (none: all of them).")
    ] = None,
    methods: Annotated[
        bool,
        typer.Option("--methods", help="Instead compare methods: clients side by side against the loop."),
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    executor: Executor = "auto",
    precision: Precision = "tf32",
    repeats: Annotated[int, typer.Option(help="How often all are measured in turn.")] = 3,
    peers: Annotated[
        str,
        typer.Option(help=f"Other packages: installed, none, or of {', '.join(PEERS)} with commas."),
    ] = "installed",
    picture: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            help="Also draw it: a page (.html), or through a browser a picture (.svg, .png).",
            parser=path,
            metavar="PATH",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each row.")] = False,
    quiet: Quiet = False,
) -> None:
    """How fast are rounds on this machine? Whole rounds against the textbook loop and other packages.

    The textbook loop loads the state, makes a torch.optim.SGD, takes the steps and adds to the average,
    client by client. Steps are of one client; `around` is the share of a round that is not local training;
    FLOP/s are of training, beside what a product of large matrices reaches. On a GPU `auto` is `compiled`.
    Packages that are installed do the same work in turn, each in a process of its own; those that are not
    are named and left out, and one that fails shows its error.

    Example: `partita bench logistic --repeats 1`
    """
    chosen = [check.choice("workload", name, WORKLOADS) for name in workloads or WORKLOADS]
    check.choice("device", device, ("auto", "cpu", "cuda"))
    check.choice("--executor", executor, EXECUTORS)
    check.integer("--repeats", repeats, low=1)
    there, missing = choose(peers)
    if methods and peers not in ("installed", "none"):
        raise check.fail("--peers", peers, "no --methods beside it: peers train by fedavg alone")
    if picture is not None:
        checked(picture)
    here = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    used = "compiled" if executor == "auto" and here == "cuda" else executor
    tell = announcer(as_json, quiet)
    if methods:
        workload = chosen[0] if workloads else "mnist_cnn"
        rows = by_method(list(METHODS), workload, here, used, precision, tell)
    else:
        rows = by_workload(chosen, here, used, precision, repeats, tell, there)
    found = []
    for row in rows:
        found.append(row)
        if as_json:
            about = {"device": here, "precision": precision, "not_installed": [] if methods else missing}
            typer.echo(json_text({**row.facts(), **about}))
    if not as_json:
        screen.console().print(_table(found, here, "loop" if methods else "textbook"))
    if not as_json and not methods:
        _show_peers(found, there, missing)
    if picture is not None:
        plot(found, picture, _machine(here), "loop" if methods else "textbook loop")
        tell(f"plot: {picture}")


def _machine(device: str) -> str:
    cores = torch.get_num_threads()
    return torch.cuda.get_device_name() if device == "cuda" else f"{cores} CPU core{'s' * (cores > 1)}"


def _table(rows: list[Row], device: str, other: str) -> Table:
    table = Table(title=f"client steps per second, {_machine(device)}", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("", other, "partita", "ratio", "around", "GFLOP/s", "of peak"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    table.add_column("executor", min_width=9)
    for row in rows:
        around = 1.0 - row.phases.get("steps", 0.0)
        flops = "-" if row.flops is None else f"{row.flops / 1e9:,.1f}"
        share = "-" if row.share is None else f"{row.share:.0%}"
        cells = (f"{row.textbook:,.0f}", f"{row.partita:,.0f}", f"{row.ratio:.2f}×", f"{around:.0%}")
        table.add_row(escape(row.name), *cells, flops, share, row.executor)
    return table


def _show_peers(rows: list[Row], there: list[str], missing: list[str]) -> None:
    """Those that were measured, and which were not there to measure."""
    if there:
        table = Table(title="other packages: client steps per second, partita's ratio", box=SIMPLE_HEAD)
        table.add_column("")
        for name in there:
            table.add_column(PEERS[name].about, justify="right")
        for row in rows:
            table.add_row(row.name, *(_cell(row, row.peers[name]) for name in there))
        screen.console().print(table)
    if missing:
        typer.echo(f"not installed, so left out: {', '.join(missing)}")


def _cell(row: Row, speed: Speed) -> str:
    if speed.steps is None:
        return escape(shorten(speed.error or "", LONGEST))
    return f"{units(speed.steps)}, {row.partita / speed.steps:.1f}×"
