"""`partita bench`."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from partita.cli import screen
from partita.cli.bench import METHODS, WORKLOADS, Row, by_method, by_workload
from partita.cli.common import announcer
from partita.cli.options import Executor, Precision, Quiet
from partita.core import check
from partita.engine.execute import EXECUTORS
from partita.engine.store.files import json_text

DEVICES = ("auto", "cpu", "cuda")


def bench(
    workloads: Annotated[
        list[str] | None,
        typer.Argument(help=f"Models to measure, of {', '.join(WORKLOADS)}. Default: all of them."),
    ] = None,
    methods: Annotated[
        bool,
        typer.Option(
            "--methods",
            help="Compare methods instead: each under --executor against the loop executor, on the first "
            "WORKLOAD (default: mnist_cnn).",
        ),
    ] = False,
    device: Annotated[str, typer.Option(help="Device to measure: auto, cpu or cuda.")] = "auto",
    executor: Executor = "auto",
    precision: Precision = "tf32",
    repeats: Annotated[int, typer.Option(help="How many times each is measured, in turn.")] = 3,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON per row, and nothing else.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Measure how fast rounds are on this machine, against the textbook loop.

    The textbook loop loads the state, makes a torch.optim.SGD, takes the steps and adds to the average,
    client by client. The table has client steps per second of both and their ratio. `one model` is not
    federated: one model, compiled on a GPU, on the samples of all clients in one batch. `overhead` is the
    share of a round that is not local training; `of peak` compares FLOP/s in training with those of a
    large matrix product. On a GPU, `auto` means `compiled`.

    In the repository, `python bench/peers.py` measures other packages beside it, and `python bench/plot.py`
    draws what `--json` prints.

    Example: `partita bench logistic --repeats 1`
    """
    chosen = [check.choice("workload", name, WORKLOADS) for name in workloads or WORKLOADS]
    device, executor = resolved(device, executor)
    check.integer("--repeats", repeats, low=1)
    notify = announcer(as_json, quiet)
    if methods:
        workload = chosen[0] if workloads else "mnist_cnn"
        rows = by_method(list(METHODS), workload, device, executor, precision, notify)
    else:
        rows = by_workload(chosen, device, executor, precision, repeats, notify)
    reference = "loop" if methods else "textbook loop"
    measured = []
    for row in rows:
        measured.append(row)
        if as_json:
            typer.echo(json_line(row, device, precision, reference))
    if not as_json:
        screen.console().print(table(measured, device, reference))


def resolved(device: str, executor: str) -> tuple[str, str]:
    """Check both, and return what 'auto' means: the GPU if there is one, and there 'compiled'."""
    check.choice("device", device, DEVICES)
    check.choice("--executor", executor, EXECUTORS)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return device, "compiled" if executor == "auto" and device == "cuda" else executor


def json_line(row: Row, device: str, precision: str, reference: str) -> str:
    """Return a row with what it was measured on; `reference` is what the left column is called."""
    about = {"device": device, "precision": precision, "machine": _machine(device), "reference": reference}
    return json_text({**row.facts(), **about})


def table(rows: list[Row], device: str, reference: str) -> Table:
    """Return the rows as a table for the terminal."""
    title = f"client steps per second, {_machine(device)}"
    made = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    others = [] if all(row.one_model is None for row in rows) else ["one\nmodel"]
    names = ("", reference.split()[0], *others, "partita", "ratio", "over-\nhead", "GFLOP/s", "of\npeak")
    for column in names:
        made.add_column(column, justify="left" if not column else "right", overflow="fold")
    made.add_column("executor", overflow="fold", min_width=9)
    for row in rows:
        flops = "-" if row.flops is None else f"{row.flops / 1e9:,.1f}"
        share = "-" if row.share is None else f"{row.share:.0%}"
        speeds = (f"{row.textbook:,.0f}", f"{row.partita:,.0f}", f"{row.ratio:.2f}×", f"{row.overhead:.0%}")
        one = ["-" if row.one_model is None else f"{row.one_model:,.0f}" for _ in others]
        made.add_row(escape(row.name), speeds[0], *one, *speeds[1:], flops, share, row.executor)
    return made


def _machine(device: str) -> str:
    cores = torch.get_num_threads()
    return torch.cuda.get_device_name() if device == "cuda" else f"{cores} CPU core{'s' * (cores > 1)}"
