"""`partita tune`, and the tuning of `partita compare --tune`."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from partita.cli import screen, tables
from partita.cli.common import COMPUTING, Request, announcer, stoppable, trackers
from partita.cli.options import RunOptions, SingleRecipe, takes_run_options
from partita.core import check
from partita.core.options import Range
from partita.engine.description import describe
from partita.engine.store.files import json_text, plain
from partita.recipes.study import Study
from partita.recipes.tuning import Search, Tuning, tune_study
from partita.recipes.versus import beside, methods_of, separate

Wishes = Annotated[
    list[str] | None,
    typer.Option(
        "--search",
        metavar="OPTION=WHERE",
        help="Search an option elsewhere: lr=0.01:1:log, momentum=0:0.9, personal=input|output, momentum=yes "
        "(its declared range), lam=no (it keeps its value), fedalt.lr=0.1:1 (for one method). Repeatable.",
    ),
]
FORM = "OPTION=LOW:HIGH, OPTION=LOW:HIGH:log, OPTION=A|B, OPTION=yes or OPTION=no"


@takes_run_options
def tune(
    recipe: SingleRecipe,
    algorithms: Annotated[
        str | None,
        typer.Option(
            help="Methods, separated by commas; a call sets options, as in fedalt(personal=input): they are "
            "those of the first trial. Default: the recipe's own method."
        ),
    ] = None,
    budget: Annotated[int, typer.Option(help="Trials of each method, the first one with its defaults.")] = 20,
    search: Wishes = None,
    *,
    options: RunOptions,
) -> None:
    """Search for good options of methods: the same number of trials for each, judged on validation samples.

    What is searched is what `partita show METHOD` prints: learning rates and the numbers that a method is
    defined by, each on its own scale. The personal part, optimizers, momentum and the like are searched only
    with `--search`. Trials that do worse than half of those before are ended early; those that diverge count
    as failed. No test sample is looked at.

    All trials run with one seed, which no final run has. In --out there are trials.jsonl and report.html; a
    search that was interrupted goes on with --resume. It ends with the line to run next.

    Example: `partita tune digits --algorithms "fedalt,ditto,pfedme" --budget 20 --out runs/tuning`
    """
    if options.seeds != 1:
        raise check.fail("--seeds", options.seeds, "1: all trials have one seed; compare takes several")
    request = Request(recipe, options)
    texts = separate(algorithms or "")
    experiment = request.experiment(request.seeds[0])
    methods = methods_of(experiment, texts) or {experiment.algorithm.name: experiment.algorithm}
    study = beside(experiment, methods)
    chosen = Study({label: study.variants[label] for label in methods})
    found = search_for(request, chosen, budget, search, options.out)
    _show(found, dict(zip(methods, texts)) if len(texts) == len(methods) else {}, request)


def search_for(
    request: Request, study: Study, budget: int, search: Sequence[str] | None, out: Path | None
) -> Tuning:
    """Tune the variants of a study as the options of a command say."""
    options = request.options
    names = (*COMPUTING, "resume", "max_time")
    with stoppable(options.out, options.max_time):
        return tune_study(
            study,
            budget=budget,
            search=wishes(search or ()),
            out=out,
            announce=announcer(options.as_json, options.quiet),
            about={"recipe": request.recipe, "asked": plain(describe(request.settings))},
            alone=options.alone,
            callbacks=trackers(options.track, None),
            **{name: getattr(options, name) for name in names},
        )


def wishes(texts: Sequence[str]) -> Search:
    """Return what --search says."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, where = (part.strip() for part in text.partition("="))
        if not equals or not name or not where:
            raise check.fail("--search", text, FORM)
        found[name] = _where(text, where)
    return found


def _where(text: str, where: str) -> Range | list[Any] | bool:
    if where in ("yes", "no"):
        return where == "yes"
    low, colon, rest = where.partition(":")
    if colon:
        high, _, scale = rest.partition(":")
        try:
            ends = float(low), float(high)
        except ValueError:
            raise check.fail("--search", text, FORM) from None
        if scale not in ("", "log"):
            raise check.fail("--search", text, FORM)
        return Range(*ends, log=scale == "log")
    return [_literal(word.strip()) for word in where.split("|")]


def _literal(word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def _show(found: Tuning, texts: Mapping[str, str], request: Request) -> None:
    options = request.options
    written = {label: found.expression(label, texts.get(label, "")) for label in found.methods}
    settings = [f"--set {shlex.quote(text)}" for text in options.set_ or ()]
    settings += [f"--size {options.size}"] if options.size else []
    methods = shlex.quote(", ".join(written.values()))
    line = " ".join(["partita compare", request.recipe, "--algorithms", methods, *settings, "--seeds 3"])
    if options.as_json:
        content = {"best": written, "next": line, "trials": found.table()}
        typer.echo(json_text(content))
        return
    console = screen.console()
    console.print(tables.figure(found.figure()))
    if options.out is not None:
        typer.echo(f"Results in {options.out}: open {options.out}/report.html; trials.jsonl")
    typer.echo(f"Next, the test scores over seeds that no trial had:\n  {line}")
