"""`partita workers check`: what other processes and clusters have to compute with."""

from __future__ import annotations

import collections
import time
from dataclasses import replace
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from partita.cli import screen
from partita.cli.options import Json
from partita.core import check
from partita.core.process import cores
from partita.engine.description import versions
from partita.engine.settings import device_of
from partita.engine.store.files import json_text
from partita.engine.workers.crew import Crew
from partita.engine.workers.messages import Facts
from partita.workers import Processes, requested

CALLS = 20  # of which the fastest says what a call takes

app = typer.Typer(
    help="Workers: other processes of this machine, or of a Ray cluster, that compute shares of a cohort.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.callback()
def group() -> None:
    """Workers: other processes of this machine, or of a Ray cluster, that compute shares of a cohort."""


@app.command("check")
def check_(
    workers: Annotated[
        str | None,
        typer.Argument(
            metavar="N|ray:N|ray:auto",
            help="As --workers of `partita run`. Default: a process for each core.",
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of each worker. Default: 1.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda: what the workers compute with.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Start workers and say what they have: machines, cores, memory, GPUs, versions, and what a call takes.

    Nothing is trained. It ends with what to pass as --workers, and warns of machines whose software differs
    from this one's: results would differ, too.

    Example: `partita workers check ray:auto`
    """
    spec = requested("workers", workers) or Processes(cores())
    count = check.integer("--threads", threads, low=1) if threads is not None else spec.threads or 1
    device = device_of(check.choice("--device", device, ("cpu", "cuda")))
    begin = time.perf_counter()
    crew = Crew(replace(spec, threads=count), count, device)
    try:
        facts = crew.backend.facts()
        started = time.perf_counter() - begin
        calls = min(_seconds_of_a_call(crew) for _ in range(CALLS))
    finally:
        crew.close()
    differing = _differing(facts)
    if as_json:
        rows = [fact._asdict() for fact in facts]
        seconds = {"start": started, "call": calls}
        typer.echo(json_text({"workers": rows, "seconds": seconds, "differing": differing}))
        return
    console = screen.console()
    console.print(_table(facts))
    for text in differing:
        console.print(Text(text, style="bold red"))
    console.print(Text(f"They started in {started:.1f} s; a call to all of them takes {calls * 1e3:.1f} ms."))
    words = workers or str(spec.count)
    console.print(Text(f"Use them: partita run digits --workers {words}"))


def _seconds_of_a_call(crew: Crew) -> float:
    begin = time.perf_counter()
    crew.backend.facts()
    return time.perf_counter() - begin


def _table(facts: list[Facts]) -> Table:
    """Return a row for each machine."""
    table = Table(title="Workers", title_justify="left")
    for name in ("machine", "workers", "cores", "memory", "GPUs of a worker", "python", "torch", "partita"):
        table.add_column(name, justify="left" if name == "machine" else "right", overflow="fold")
    machines: dict[str, list[Facts]] = collections.defaultdict(list)
    for fact in facts:
        machines[fact.machine].append(fact)
    for machine, there in machines.items():
        first = there[0]
        software = [first.versions.get(name, "?") for name in ("python", "torch", "partita")]
        memory, gpus = f"{first.memory / 2**30:.1f} GiB", ", ".join(first.gpus) or "none"
        table.add_row(machine, str(len(there)), str(first.cores), memory, gpus, *software)
    return table


def _differing(facts: list[Facts]) -> list[str]:
    """Return in words where the software of a machine differs from that of the driver."""
    ours, found = versions(), dict[str, None]()
    for fact in facts:
        for name, version in fact.versions.items():
            if version != ours.get(name):
                found[f"{fact.machine} has {name} {version}, this machine has {ours.get(name)}"] = None
    return list(found)
