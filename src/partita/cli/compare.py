"""`partita compare` and `partita report`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from partita.cli import screen, tables
from partita.cli.common import Request, leave_study, show_diverged, show_study
from partita.cli.options import Json, Page, RunOptions, SingleRecipe, path, takes_run_options
from partita.cli.tune import Wishes, search_for
from partita.core import check
from partita.core.parts import Algorithm
from partita.engine.folder import parts
from partita.engine.record import Record, read
from partita.engine.store.files import json_text
from partita.recipes.study import Study, is_study, read_figures, read_study, unfinished
from partita.recipes.versus import beside, separate, versus
from partita.report import compare as figures
from partita.report import ranking, write


@takes_run_options
def compare(
    recipe: SingleRecipe,
    algorithms: Annotated[
        str | None,
        typer.Option(
            help="Methods, separated by commas; a call sets options, as in fedalt(personal=input). Other "
            "options are those of the recipe's own method. Several methods one after another are joined by "
            '>, as in "fedavg(lr=0.1) > finetune(lr=0.01, epochs=5)"; rounds, cohort, steps, epochs, batch '
            "and state are those of a stage. finetune alone comes after fedavg. Default: the recipe's own "
            "method."
        ),
    ] = None,
    tune: Annotated[
        int | None,
        typer.Option(
            help="First search for good options of each method, the two baselines included, with so many "
            "trials each, on validation samples (see `partita tune`)."
        ),
    ] = None,
    search: Wishes = None,
    *,
    options: RunOptions,
) -> None:
    """Compare methods on one recipe, over seeds, from the same data and initial weights.

    Every client alone (`local`) and one global model (`fedavg`) are always among them. The first table has
    the mean and the deviation over the seeds; the second compares every method with the best one, client by
    client.

    Each method runs under the schedule that it prefers, synchronous or asynchronous; `--set schedule=...`
    sets one for all but `local`.

    With `--tune 20` every method, `local` and `fedavg` among them, first has 20 trials of other options on
    validation samples of the first seed's data; the seeds then run with what was found. In --out the search
    is in tuning/.

    Example: `partita compare digits --algorithms "fedalt,fedprox(mu=0.1)" --seeds 3 --out runs/methods`
    """
    request = Request(recipe, options)
    methods = separate(algorithms or "")
    if tune is None:
        if search:
            raise check.fail("--search", search[0], "--tune TRIALS, or `partita tune`")
        study, about = partial(_versus, request, methods), {}
    else:
        plan = versus(request.experiment(request.seeds[0]), methods)
        folder = None if options.out is None else options.out / "tuning"
        found = search_for(request, plan, tune, search, folder)
        if not options.as_json:
            screen.console().print(tables.figure(found.figure()))
        study, about = partial(_tuned, request, found.best), {"tune": tune}
    runs, _ = request.run_study(study, {"algorithms": methods, **about})
    show_study(runs, (), options)
    leave_study(runs)


def _versus(request: Request, methods: list[str], seed: int) -> Study:
    return versus(request.experiment(seed), methods)


def _tuned(request: Request, methods: Mapping[str, Algorithm], seed: int) -> Study:
    return beside(request.experiment(seed), methods)


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Folders of runs or studies: their --out.", parser=path, metavar="FOLDERS"),
    ],
    out: Page = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing.")] = False,
) -> None:
    """Write report.html again, or one page that compares several runs.

    Every folder with a finished run will do. Runs that differ in their seed alone count as one method.

    Example: `partita report runs/digits runs/methods --out both.html`
    """
    runs = _collect(folders)
    target = out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    one_study = len(folders) == 1 and is_study(folders[0])
    drawn = read_figures(folders[0]) if one_study else ((), ())
    page = write(runs, target, tables=drawn[0], charts=drawn[1])
    rows = figures.table(runs)
    diverged = [] if quiet and not as_json else show_diverged(runs, as_json)
    if as_json:
        content = {"report": str(page), "diverged": diverged, "table": rows}
        typer.echo(json_text({**content, "paired": figures.paired(runs)}))
    elif not quiet:
        console = screen.console()
        console.print(tables.comparison(rows, ranking.standing(runs).clearly_best, console.width))
        for folder in filter(is_study, folders):
            if missing := unfinished(folder):
                typer.echo(f"{folder} is not complete: {missing}; --resume continues it")
        typer.echo(f"Wrote {page}")


def _collect(folders: list[Path]) -> dict[str, list[Record]]:
    """Read runs by label: a study's variants by name, single runs by method and, if need be, folder."""
    runs: dict[str, list[Record]] = {}
    for folder in folders:
        if is_study(folder):
            records = read_study(folder)
        else:
            record = read(folder)
            records = {str(record.summary()["algorithm"]): [record]}
        for label, seeds in records.items():
            if not all(_same_but_seed(a, b) for a in runs.get(label, ()) for b in seeds):
                label = f"{label} ({folder})"
            runs.setdefault(label, []).extend(seeds)
    return runs


def _same_but_seed(a: Record, b: Record) -> bool:
    return _facts(a) == _facts(b) and a.summary()["seed"] != b.summary()["seed"]


def _facts(run: Record) -> tuple[object, ...]:
    """Return what decides a result, without what the seed draws: weights, samples, Byzantine clients."""
    config = {k: v for k, v in parts(run.config).items() if k != "trial"}
    settings, model, data = (_mapping(config.pop(k, None)) for k in ("settings", "model", "data"))
    drawn = ("seed", "byzantine", "initial", "fixed")
    kept = [
        {k: v for k, v in part.items() if k not in drawn}
        for part in (settings, model, _mapping(data.get("source")))
    ]
    byzantine = settings.get("byzantine")
    return config, kept, len(run.clients), len(byzantine) if isinstance(byzantine, list) else 0


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
