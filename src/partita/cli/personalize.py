"""`partita personalize`."""

from __future__ import annotations

import dataclasses
import runpy
import zipfile
from pathlib import Path
from typing import Annotated, Any

import typer

from partita.api import Run
from partita.cli import screen, tables
from partita.cli.common import Request
from partita.cli.options import Json, path
from partita.core import check
from partita.data import FederatedData, from_leaf, from_npz
from partita.engine.record import read
from partita.engine.settings import Machine
from partita.engine.store.files import json_text
from partita.recipes.experiment import blamed


def personalize(
    run: Annotated[
        Path, typer.Argument(help="Folder of a finished run: its --out.", parser=path, metavar="RUN")
    ],
    data: Annotated[
        Path,
        typer.Option(
            help="The new clients: an .npz file with the arrays x, y and client (and test, true for test "
            "samples), a .json file or folder as LEAF writes it, or a Python file with a function data() "
            "that returns a FederatedData.",
            parser=path,
            metavar="FILE",
        ),
    ],
    test: Annotated[
        float, typer.Option(help="Share of each client's samples to test on, where the file has no test.")
    ] = 0.2,
    rounds: Annotated[
        int | None, typer.Option(help="Turns of each client. Default: as many as a client of the run had.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Local steps in a turn. Default: as in the run.")] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Local passes in a turn. Default: as in the run.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Samples in a step. Default: as in the run.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the draws. Default: that of the run.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="New folder for clients.csv, summary.json and models/NUMBER.safetensors. Without it, "
            "nothing is kept.",
            parser=path,
            metavar="PATH",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Give clients that took no part in a run their models, by the rule of its method, and score them.

    The server's model stays as it is. fedalt and fedsim solve for the personal part, ditto, pfedme and
    the fedplus family for a model near the server's, perfedavg takes its step; of fedavg it is the server's.

    RUN is a run of `partita run` or `partita demo`, whose recipe is read again; nothing of it is trained.

    Example: `partita personalize runs/digits --data new.npz --out runs/new`
    """
    given = _data(data, test)
    result = _run(run).personalize(given, rounds=rounds, steps=steps, epochs=epochs, batch=batch, seed=seed)
    folder = None if out is None else result.write(out)
    if as_json:
        typer.echo(json_text({**result.summary(), "rows": list(result.table)}))
        return
    screen.console().print(tables.newcomers(result))
    typer.echo(str(result.summary()))
    if folder is not None:
        typer.echo(f"Models in {folder}/models, scores in {folder}/clients.csv")


def _run(folder: Path) -> Run:
    """Return a finished run with its models and its method, by the recipe that it was made by."""
    settings = read(folder).config["settings"]
    request = Request.noted(folder)
    experiment = request.experiment(request.seeds[0])
    machine = {f.name: settings[f.name] for f in dataclasses.fields(Machine) if f.name in settings}
    rounds = {} if settings["rounds"] is None else {"rounds": settings["rounds"]}  # it may have gone on
    again: dict[str, Any] = {**machine, **rounds, "profile": False}
    return experiment.run(**again, out=folder, resume=True, report=False, progress=False)


def _data(file: Path, test: float) -> FederatedData:
    """Read the samples of new clients."""
    if file.suffix == ".npz":
        marked = zipfile.is_zipfile(file) and "test.npy" in zipfile.ZipFile(file).namelist()
        return from_npz(file, test="test" if marked else test)
    if file.suffix == ".json" or file.is_dir():
        return from_leaf(file, test)
    if file.suffix != ".py" or not file.is_file():
        allowed = "an .npz, a .json (LEAF) or a .py file that exists"
        raise check.fail("--data", str(file), allowed)
    with blamed(str(file)):
        make = runpy.run_path(str(file)).get("data")
        made = make() if callable(make) else None
    if not isinstance(made, FederatedData):
        raise check.fail("--data", str(file), "a file with a function data() that returns a FederatedData")
    return made
