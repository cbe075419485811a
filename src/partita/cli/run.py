"""`partita demo` and `partita run`."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer
from rich.markup import escape

from partita.api import Run
from partita.cli import screen, tables
from partita.cli.common import (
    Ask,
    announcer,
    bar,
    leave,
    show_diverged,
    show_study,
    stoppable,
    trackers,
)
from partita.cli.options import (
    DataDir,
    Deterministic,
    Device,
    Executor,
    Json,
    MaxTime,
    Memory,
    Out,
    Precision,
    Profile,
    Quiet,
    Recipe,
    Resume,
    Seed,
    Seeds,
    Set,
    Size,
    Track,
    told,
)
from partita.core import check
from partita.engine.store.files import json_text
from partita.engine.store.output import new_page
from partita.recipes import Experiment, Study, find
from partita.recipes.experiment import build
from partita.recipes.study import run_study
from partita.recipes.versus import versus

NEXT = "partita compare digits --algorithms fedalt,fedsim,finetune --seeds 3 --out runs/methods"
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
    """Who gains from personalization and who loses? The answer on embedded data, in under a minute.

    40 clients see 3 of the 10 digits each. Every client trains alone, all of them train one global model
    (FedAvg), and all of them train a shared model with a personal output layer (FedAlt). The page
    partita-demo.html (with --out: report.html there) shows every client.

    Example: `partita demo --seed 1 --out runs/demo`
    """
    experiment = build(find("digits"), {"seed": seed})
    if out is None:
        new_page("page", PAGE)
    with stoppable(out):
        run = experiment.run(
            out=out, device=device, executor=executor, resume=resume, progress=bar(as_json, quiet)
        )
        page = run.report(PAGE) if out is None else out / "report.html"
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


def run(
    recipe: Recipe,
    set_: Set = None,
    size: Size = None,
    seed: Annotated[int | None, typer.Option(help=told("seed"))] = None,
    seeds: Seeds = 1,
    only: Annotated[
        list[str] | None,
        typer.Option(help="For a study: only variants of this name or pattern; may be given several times."),
    ] = None,
    out: Out = None,
    data_dir: DataDir = None,
    device: Device = "auto",
    executor: Executor = "auto",
    memory: Memory = None,
    precision: Precision = "tf32",
    deterministic: Deterministic = False,
    profile: Profile = False,
    track: Track = None,
    resume: Resume = False,
    max_time: MaxTime = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a recipe, or your own file with a function `experiment()` that returns an Experiment.

    KEY is an argument of the recipe, a field of the experiment (rounds, cohort, steps, epochs, batch, seed,
    state, norm, capacity, schedule, attack, evaluate_every, ...), `algorithm` (the name of another method) or
    `algorithm.OPTION`. Some recipes are studies: many runs, compared in tables and one report.

    Exit code 1: it ran, but nothing was learned (the learning rate is too high); 124: --max-time is over.

    Example: `partita run digits --set rounds=20 --set algorithm.lr=0.05 --out runs/digits`
    """
    ask = Ask.of(recipe, set_, size, seed, seeds, data_dir)
    made = ask.build(ask.seeds[0])
    common: dict[str, Any] = {"device": device, "executor": executor, "memory": memory}
    common |= {"precision": precision, "deterministic": deterministic}
    common |= {"profile": profile, "progress": bar(as_json, quiet), "max_time": max_time}
    with stoppable(out, max_time):
        if isinstance(made, Study) or len(ask.seeds) > 1:
            study = partial(_as_study, ask, made)
            shown = run_study(
                study,
                ask.seeds,
                about=ask.about,
                out=out,
                resume=resume,
                only=only or (),
                announce=announcer(as_json, quiet),
                listen=partial(trackers, track),
                **common,
            )
            show_study(*shown, as_json=as_json, out=out)
            leave(run for seeds in shown[0].values() for run in seeds)
            return
        if only:
            raise check.fail("--only", only[0], "nothing: this recipe is one run, not a study")
        result = made.run(out=out, resume=resume, callbacks=trackers(track, out), **common)
    _show(result, as_json)
    if out is not None and not as_json:
        typer.echo(f"Results in {out}: open {out}/report.html; summary.json, clients.csv, metrics.jsonl, ...")
    leave([result])


def _as_study(ask: Ask, made: Experiment | Study, seed: int) -> Study:
    found = made if seed == ask.seeds[0] else ask.build(seed)
    return found if isinstance(found, Study) else versus(found)


def _show(run: Run, as_json: bool) -> None:
    summary = run.summary()
    show_diverged({summary["algorithm"]: [run]}, as_json)
    if as_json:
        typer.echo(json_text(summary))
    else:
        screen.console().print(tables.scores(run, summary))
