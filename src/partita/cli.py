"""The command line: `partita demo`, `partita run`."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from partita.recipes import RECIPES, find
from partita.recipes.experiment import build, parse
from partita.run import Run, Summary

app = typer.Typer(
    help="Personalized federated learning among clients that differ.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

Seed = Annotated[int, typer.Option(help="Everything random depends on it.")]
Out = Annotated[Path | None, typer.Option(help="Folder for the results; without it nothing is written.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Executor = Annotated[str, typer.Option(help="auto (measures and picks), vmap (clients stacked) or loop.")]
Memory = Annotated[str | None, typer.Option(help="Budget for stacking clients, such as 8GiB.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")]
Json = Annotated[bool, typer.Option("--json", help="Print the summary as JSON and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]


@app.command()
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
    with _stoppable(out):
        run = experiment.run(
            out=out, device=device, executor=executor, resume=resume, progress=_bar(as_json, quiet)
        )
    _show(run, as_json)
    if not as_json:
        console = Console()
        console.print(_gains(run))
        console.print(
            "Next: your own model and data in five lines (README), or "
            "[bold]partita run digits --set algorithm=fedsim[/bold]."
        )


@app.command()
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
    with _stoppable(out):
        result = experiment.run(
            out=out,
            device=device,
            executor=executor,
            memory=memory,
            resume=resume,
            progress=_bar(as_json, quiet),
        )
    _show(result, as_json)
    if out is not None and not as_json:
        typer.echo(f"Results in {out}: summary.json, clients.csv, metrics.jsonl, config.json, checkpoint/")


def _bar(as_json: bool, quiet: bool) -> bool | None:
    return False if as_json or quiet else None


def _show(run: Run, as_json: bool) -> None:
    summary = run.summary()
    if as_json:
        typer.echo(json.dumps(summary))
    else:
        Console().print(_table(run, summary))


def _table(run: Run, summary: Summary) -> Table:
    """Local, global and personal score; how many clients the personal model hurts."""
    table = Table(
        title=f"{summary['algorithm']}: {summary['clients']} clients, {summary['rounds']} rounds, "
        f"seed {summary['seed']}",
        caption=f"{summary['seconds']:.1f} s, "
        f"{summary['client_steps_per_second']:,.0f} client steps per second",
    )
    table.add_column("model")
    table.add_column(f"test {summary['metric']}", justify="right")
    table.add_column("worst tenth of clients", justify="right")
    table.add_column("clients better off with it", justify="right")
    names = {"local": "each client alone", "global": "one global model", "personal": "personal models"}
    scores = {k: v for k, v in summary["test"].items() if v is not None}
    better = max if run.higher_is_better else min
    best = better(scores.values(), default=None)
    for kind, name in names.items():
        value, hurt = summary["test"][kind], summary["hurt"].get(f"vs_{kind}")
        shown = "-" if value is None else f"{value:.4f}"
        table.add_row(
            name,
            f"[bold green]{shown}[/bold green]" if value is not None and value == best else shown,
            _worst(run, kind),
            "" if hurt is None else f"{hurt} of {summary['scored']}",
        )
    return table


def _worst(run: Run, kind: str) -> str:
    import numpy as np

    scores = run.scores(kind)
    scores = scores[~np.isnan(scores)]
    if not len(scores):
        return "-"
    return f"{np.quantile(scores, 0.1 if run.higher_is_better else 0.9):.4f}"


def _gains(run: Run, rows: int = 3) -> Table:
    """The clients that gain and lose most by their personal model, against the better of the two others."""
    table = Table(title="Who gains and who loses most")
    for column in ("client", "training samples", "alone", "global", "personal", "gain"):
        table.add_column(column, justify="right")
    sign = 1 if run.higher_is_better else -1
    scored: list[tuple[float, dict[str, Any]]] = []
    for row in run.clients:
        if None not in (row["local"], row["global"], row["personal"]):
            other = max(sign * row["local"], sign * row["global"])
            scored.append((sign * row["personal"] - other, row))
    scored.sort(key=lambda pair: -pair[0])
    shown = scored if len(scored) <= 2 * rows else [*scored[:rows], *scored[-rows:]]
    for i, (gain, row) in enumerate(shown):
        colour = "green" if gain > 0 else "red" if gain < 0 else ""
        cells = [f"{row[k]:.3f}" for k in ("local", "global", "personal")]
        change = f"[{colour}]{gain:+.3f}[/{colour}]" if colour else f"{gain:+.3f}"
        table.add_row(row["client"], str(row["n_train"]), *cells, change, end_section=i == rows - 1)
    return table


def main() -> None:
    """Entry point: errors of the user are one line and exit code 2."""
    warnings.showwarning = _warning  # type: ignore[assignment]
    try:
        app()
    except (ValueError, OSError) as error:
        typer.echo(f"partita: {error}", err=True)
        sys.exit(2)


@contextlib.contextmanager
def _stoppable(out: Path | None) -> Iterator[None]:
    """Ctrl-C says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        left = "nothing was kept: no --out" if out is None else f"go on with --out {out} --resume"
        typer.echo(f"partita: stopped; {left}", err=True)
        raise typer.Exit(130) from None


def _warning(message: Warning | str, *_: Any) -> None:
    typer.echo(f"partita: warning: {message}", err=True)


if __name__ == "__main__":
    main()
