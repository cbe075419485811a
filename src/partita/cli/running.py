"""`partita demo` and `partita run`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from partita.cli import tables
from partita.cli.options import Device, Executor, Json, Memory, Out, Quiet, Resume, Seed
from partita.recipes import RECIPES, find
from partita.recipes.experiment import build, parse
from partita.run import Run


def demo(
    seed: Seed = 0,
    out: Out = None,
    device: Device = "auto",
    executor: Executor = "auto",
    resume: Resume = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Who gains from personalization and who loses? The answer on embedded data, in under a minute.

    40 clients see 3 of the 10 digits each. Every client trains alone, all of them train one global model
    (FedAvg), and all of them train a shared model with a personal output layer (FedAlt).

    Example: `partita demo --seed 1 --out runs/demo`
    """
    experiment = build(find("digits"), {"seed": seed})
    with stoppable(out):
        run = experiment.run(
            out=out, device=device, executor=executor, resume=resume, progress=bar(as_json, quiet)
        )
    _show(run, as_json)
    if not as_json:
        console = Console()
        console.print(tables.gains(run))
        console.print(
            "Next: your own model and data in five lines (README), or "
            "[bold]partita run digits --set algorithm=fedsim[/bold]."
        )


def run(
    recipe: Annotated[
        str, typer.Argument(help=f"One of: {', '.join(RECIPES)}; or a Python file with experiment().")
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be given several times."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Everything random depends on it.")] = None,
    out: Out = None,
    device: Device = "auto",
    executor: Executor = "auto",
    memory: Memory = None,
    resume: Resume = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a recipe, or your own file with a function `experiment()` that returns an Experiment.

    KEY is an argument of the recipe, a field of the experiment (rounds, cohort, steps, epochs, batch, seed,
    state, norm, evaluate_every, baselines, ...), `algorithm` (the name of another method) or
    `algorithm.OPTION`.

    Example: `partita run digits --set rounds=20 --set algorithm.lr=0.05 --out runs/digits`
    """
    settings = parse(set_ or [])
    if seed is not None:
        settings["seed"] = seed
    experiment = build(find(recipe), settings)
    with stoppable(out):
        result = experiment.run(
            out=out,
            device=device,
            executor=executor,
            memory=memory,
            resume=resume,
            progress=bar(as_json, quiet),
        )
    _show(result, as_json)
    if out is not None and not as_json:
        typer.echo(f"Results in {out}: summary.json, clients.csv, metrics.jsonl, config.json, checkpoint/")


def bar(as_json: bool, quiet: bool) -> bool | None:
    return False if as_json or quiet else None


def _show(run: Run, as_json: bool) -> None:
    summary = run.summary()
    if as_json:
        typer.echo(json.dumps(summary))
    else:
        Console().print(tables.scores(run, summary))


@contextlib.contextmanager
def stoppable(out: Path | None) -> Iterator[None]:
    """Ctrl-C says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        left = "nothing was kept: no --out" if out is None else f"go on with --out {out} --resume"
        typer.echo(f"partita: stopped; {left}", err=True)
        raise typer.Exit(130) from None
