"""`partita compare` and `partita report`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from partita.cli import listing, screen, tables
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
    Quiet,
    Resume,
    Seeds,
    Set,
    Size,
    Track,
    path,
)
from partita.core import check
from partita.engine.folder import parts
from partita.engine.record import Record, read
from partita.engine.store.files import json_text
from partita.recipes import Experiment, Study
from partita.recipes.study import is_study, read_study, run_study, unfinished
from partita.recipes.versus import separate, versus
from partita.report import compare as figures
from partita.report import write


def compare(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A recipe of one experiment, such as digits, or a Python file with experiment().",
            autocompletion=listing.complete_recipe,
        ),
    ],
    algorithms: Annotated[
        str | None,
        typer.Option(
            help="Methods, separated by commas; a call sets options: fedalt(personal=input). "
            "Each takes the other options of the recipe's own method. finetune comes after fedavg."
        ),
    ] = None,
    seeds: Seeds = 1,
    set_: Set = None,
    size: Size = None,
    seed: Annotated[int | None, typer.Option(help="The first seed.")] = None,
    out: Out = None,
    data_dir: DataDir = None,
    device: Device = "auto",
    executor: Executor = "auto",
    memory: Memory = None,
    precision: Precision = "tf32",
    deterministic: Deterministic = False,
    track: Track = None,
    resume: Resume = False,
    max_time: MaxTime = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Which method is best here? Methods × seeds on one recipe, from the same data and initial weights.

    Every client alone (`local`) and one global model (`fedavg`) are always among them. The table has mean and
    deviation over the seeds; then every method is compared with the best one, client by client.

    Each runs in step or asynchronously, as it wants, or all but `local` under `--set schedule=...`.

    Example: `partita compare digits --algorithms "fedalt,fedprox(mu=0.1)" --seeds 3 --out runs/methods`
    """
    ask = Ask.of(recipe, set_, size, seed, seeds, data_dir)
    methods = separate(algorithms or "")

    def study(number: int) -> Study:
        made = ask.build(number)
        if not isinstance(made, Experiment):
            raise check.fail("recipe", recipe, "a recipe of one experiment; a study is run by `partita run`")
        return versus(made, methods)

    with stoppable(out, max_time):
        runs, _ = run_study(
            study,
            ask.seeds,
            about={**ask.about, "algorithms": methods},
            out=out,
            resume=resume,
            announce=announcer(as_json, quiet),
            listen=partial(trackers, track),
            device=device,
            executor=executor,
            memory=memory,
            precision=precision,
            deterministic=deterministic,
            progress=bar(as_json, quiet),
            max_time=max_time,
        )
    show_study(runs, (), as_json=as_json, out=out)
    leave(run for seeds in runs.values() for run in seeds)


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Folders of runs or studies (what --out was).", parser=path, metavar="FOLDERS"),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page to write; default: report.html in the folder, or here for several.",
            parser=path,
            metavar="PATH",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON and nothing else.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing.")] = False,
) -> None:
    """Write report.html again, or one page in which several runs overlay.

    Runs that differ in their seed alone count as one method. Works for every folder that a finished run left.

    Example: `partita report runs/digits runs/methods --out both.html`
    """
    runs = _collect(folders)
    target = out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    page = write(runs, target)
    rows = figures.table(runs)
    told = [] if quiet and not as_json else show_diverged(runs, as_json)
    if as_json:
        found = {"report": str(page), "diverged": told, "table": rows, "paired": figures.paired(runs)}
        typer.echo(json_text(found))
    elif not quiet:
        console = screen.console()
        console.print(tables.comparison(rows, console.width))
        for folder in filter(is_study, folders):
            if missing := unfinished(folder):
                typer.echo(f"{folder} is not finished: {missing}; --resume goes on with it")
        typer.echo(f"Wrote {page}")


def _collect(folders: list[Path]) -> dict[str, list[Record]]:
    """Runs by label: a study's variants by name, single runs by method and, if that is not enough, folder."""
    runs: dict[str, list[Record]] = {}
    for folder in folders:
        found = read_study(folder) if is_study(folder) else {_label(folder): [read(folder)]}
        for label, some in found.items():
            if not all(_same_but_seed(a, b) for a in runs.get(label, ()) for b in some):
                label = f"{label} ({folder})"
            runs.setdefault(label, []).extend(some)
    return runs


def _label(folder: Path) -> str:
    return str(read(folder).summary()["algorithm"])


def _same_but_seed(a: Record, b: Record) -> bool:
    def facts(run: Record) -> tuple[object, ...]:
        """What decides a result, without what is drawn by the seed: weights, samples, who lies."""
        known = {k: v for k, v in parts(run.config).items() if k != "trial"}
        settings, model, data = (_mapping(known.pop(k, None)) for k in ("settings", "model", "data"))
        source = _mapping(data.get("source"))
        drawn = ("seed", "byzantine", "initial", "fixed")
        some = [{k: v for k, v in part.items() if k not in drawn} for part in (settings, model, source)]
        lying = settings.get("byzantine")
        return known, some, len(run.clients), len(lying) if isinstance(lying, list) else 0

    return facts(a) == facts(b) and a.summary()["seed"] != b.summary()["seed"]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
