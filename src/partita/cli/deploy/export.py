"""`partita deploy export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from partita.cli.deploy.options import Recipe, Set, SiteFile, experiment_of
from partita.cli.options import path
from partita.deploy import Client
from partita.deploy import site as sites
from partita.deploy.folder import new_file, run_of
from partita.deploy.samples import samples_of


def export(
    recipe: Recipe,
    site: SiteFile,
    to: Annotated[
        Path,
        typer.Option(help="New file for the model, such as model.safetensors.", parser=path, metavar="PATH"),
    ],
    run: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="The run, by the first characters of its number: a folder in that of site.toml. "
            "Default: the newest that has ended.",
        ),
    ] = None,
    set_: Set = None,
) -> None:
    """Write this client's own model: the shared part as the server told it last, with the personal part.

    It is made on this machine of what is in the folder of site.toml; nobody is called. The file is a new one,
    can be read by its owner alone, and loaded with safetensors. How good the model is on this client's test
    samples is printed, too.

    Example: `partita deploy export experiment.py --site site.toml --to model.safetensors`
    """
    new_file("--to", to)
    here = sites.SiteFile.read(site)
    data = samples_of(here, recipe)
    one = Client(experiment_of(recipe, set_), here.name, data, here.folder, site=here.leave)
    run = run_of(here.folder, run)
    typer.echo(f"{one.export(to, run)}: the model of client {here.name} of run {run}")
    begun = one.runs(ended=False)
    for later in set(begun[begun.index(run) + 1 :]) - set(one.runs()):
        typer.echo(f"Run {later} is newer and has not ended here, so that it has no model yet.")
    if one.sizes[2]:
        scores = ", ".join(f"{name} {score:.4g}" for name, score in one.scores(run=run).items())
        typer.echo(f"On this client's own test samples, which nobody else is told: {scores}")
