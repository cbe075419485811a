"""`partita demo` and `partita run`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.text import Text

from partita.api import Run
from partita.cli import listing, screen, tables
from partita.cli.common import (
    NOT_KEPT,
    Request,
    leave,
    leave_study,
    show_diverged,
    show_study,
    stoppable,
    trackers,
)
from partita.cli.options import (
    Device,
    Executor,
    Json,
    Out,
    Profile,
    Quiet,
    Resume,
    RunOptions,
    Seed,
    takes_run_options,
)
from partita.engine.store.files import json_text
from partita.engine.store.output import new_page
from partita.recipes import RECIPES, Study, find
from partita.recipes.experiment import build
from partita.recipes.versus import versus
from partita.report import header

NEXT = "partita compare offices --algorithms fedalt,ditto,finetune --seeds 3 --out runs/methods"
PAGE = "partita-demo.html"


def demo(
    seed: Seed = 0,
    out: Out = None,
    device: Device = "auto",
    executor: Executor = "auto",
    resume: Resume = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show who gains from personalization and who loses, on embedded data, in under a minute.

    Twenty offices read handwritten digits. Six of them write the digits in a code of their own, which one
    global model cannot know; four have just opened and have few samples to learn from. Every office trains
    alone, all of them train one global model (FedAvg), and all of them train a shared model with a personal
    output layer (FedAlt), each until it has converged. A page shows every client: partita-demo.html, or
    report.html in --out.

    Example: `partita demo --seed 1 --out runs/demo`
    """
    if out is None:
        new_page("page", PAGE)
    with stoppable(out):
        progress = False if as_json or quiet else None
        run = build(find("offices"), {"seed": seed}).run(
            out=out, device=device, executor=executor, resume=resume, progress=progress
        )
        page = run.report(PAGE) if out is None else out / "report.html"
    Request("offices", RunOptions(seed=seed)).note(out)
    _show(run, as_json)
    if not as_json:
        console = screen.console()
        console.print(tables.gains(run))
        console.print(
            f"Every client in pictures: open [bold]{escape(str(page))}[/bold]\n"
            f"Next: your own model and data in five lines (README), or compare methods:\n  {NEXT}",
            soft_wrap=True,
        )
    leave([run])


@takes_run_options
def run(
    recipe: Annotated[
        str,
        typer.Argument(
            help=f"One of {', '.join(RECIPES)}; or a Python file with a function experiment().",
            autocompletion=listing.complete_recipe,
        ),
    ],
    only: Annotated[
        list[str] | None,
        typer.Option(help="Run only the variants of a study with this name or pattern. Repeatable."),
    ] = None,
    profile: Profile = False,
    *,
    options: RunOptions,
) -> None:
    """Run a recipe, or your own Python file with a function experiment() that returns an Experiment.

    A KEY of --set is an argument of the recipe (`partita show RECIPE` lists them), a setting of the
    experiment (rounds, cohort, steps, epochs, batch, state, norm, capacity, schedule, attack, ...),
    `algorithm` or `algorithm.OPTION`. An algorithm is the name of another method, a call with options, or
    several methods one after another: 'algorithm=fedavg(lr=0.1) > finetune(lr=0.01, epochs=5)'.

    A finished run goes on with --resume and a larger --set rounds=...

    Some recipes are studies: several variants, compared in tables and in one report. So are several seeds.

    Exit codes: 0 if it ran; 1 if nothing was learned, as with a learning rate that is too high; 2 if the
    request is wrong; 124 if --max-time is over.

    Example: `partita run digits --set rounds=20 --set algorithm.lr=0.05 --out runs/digits`
    """
    request = Request(recipe, options)
    made = request.build(request.seeds[0])
    if isinstance(made, Study) or len(request.seeds) > 1:

        def study(seed: int) -> Study:
            built = made if seed == request.seeds[0] else request.build(seed)
            return built if isinstance(built, Study) else versus(built)

        runs, figures = request.run_study(study, {}, only=only or (), profile=profile)
        show_study(runs, figures, options)
        leave_study(runs)
        return
    if only:
        raise ValueError(f"--only={only[0]!r}: this recipe is a single run and has no variants to select")
    with stoppable(options.out, options.max_time):
        callbacks = trackers(options.track, options.out)
        result = made.run(callbacks=callbacks, profile=profile, **request.arguments())
    request.note(options.out)
    _show(result, options.as_json)
    if options.out is not None and not options.as_json:
        files = "summary.json, clients.csv, metrics.jsonl, ..."
        typer.echo(f"Results in {options.out}: open {options.out}/report.html; {files}")
    elif not options.as_json:
        typer.echo(NOT_KEPT)
    leave([result])


def _show(run: Run, as_json: bool) -> None:
    summary = run.summary()
    show_diverged({summary["algorithm"]: [run]}, as_json)
    if as_json:
        typer.echo(json_text(summary))
    else:
        console = screen.console()
        console.print(tables.scores(run, summary))
        for table in (tables.further(summary), tables.losers(summary)):
            if table is not None:
                console.print(table)
        console.print(Text(header.said({summary["algorithm"]: [run]})[0]))
