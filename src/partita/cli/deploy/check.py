"""`partita deploy check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from partita.cli import screen
from partita.cli.deploy.options import Recipe, Set, experiment_of
from partita.cli.options import Json, path
from partita.deploy import roster
from partita.deploy.board import size
from partita.deploy.facts import Facts, StageFacts, facts_of
from partita.engine.store.files import json_text

SENT = {
    "delta": "a change of it is sent",
    "extra": "is sent: the method's own, read its page for what it tells",
    "sums": "is sent: the method's own sum for this parameter",
    "metrics": "is sent, as zero unless site.toml has train_loss = true",
}
RECEIVED = {"shared": "is received", "extra": "is received: the method's own"}
"""What becomes of a tensor, by the part of a message that it is in."""


def check_(
    recipe: Recipe,
    roster_file: Annotated[
        Path | None,
        typer.Option(
            "--roster",
            help="roster.toml, for the number of clients. Default: as many as the example data have.",
            parser=path,
            metavar="PATH",
        ),
    ] = None,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Say what a deployment of an experiment sends, what stays at the clients, and the digest of it all.

    Nothing is trained and nobody is called. Server and clients work together only if their digests are equal:
    method, model, initial weights, the code of both, seed and the form of a sample. What cannot work among
    real clients is refused.

    Example: `partita deploy check experiment.py --roster keys/server/roster.toml`
    """
    experiment = experiment_of(recipe, set_)
    clients = experiment.data.clients if roster_file is None else len(roster.read(roster_file))
    facts = facts_of(experiment, clients)
    if as_json:
        stages = [stage._asdict() for stage in facts.stages]
        typer.echo(json_text({**facts._asdict(), "stages": stages, "clients": clients}))
        return
    _show(facts, clients, experiment.cohort)


def _show(facts: Facts, clients: int, cohort: int | None) -> None:
    console = screen.console()
    for number, stage in enumerate(facts.stages):
        name = stage.method if len(facts.stages) == 1 else f"stage {number}: {stage.method}"
        console.print(_table(name, stage))
        turns = cohort or clients
        console.print(
            Text(
                f"A turn of a client: {size(stage.down)} to it, {size(stage.up)} from it. A round of "
                f"{turns}: {size(turns * stage.down)} and {size(turns * stage.up)}. "
                f"It keeps {size(stage.state)}.\n"
            )
        )
    console.print(
        Text(
            f"The server refuses replies above {size(facts.reply)}, clients requests above "
            f"{size(facts.request)}."
        )
    )
    console.print(
        Text(
            "Scores and losses leave a client only as its site.toml allows; counts of samples do. What a "
            "method sends of its own may tell of labels: a count for each class, for example, does."
        )
    )
    console.print(Text(f"digest {facts.digest}", style="bold"))


def _table(title: str, stage: StageFacts) -> Table:
    """Return the tensors of a stage: which are sent, which are received, which stay."""
    table = Table(title=title, title_justify="left")
    for name in ("tensor", "shape", ""):
        table.add_column(name)
    for tensors, words in ((stage.sent, SENT), (stage.received, RECEIVED)):
        for name, shape in tensors.items():
            part, _, own = name.partition("/")
            table.add_row(Text(own), _shape(shape), words[part])
    for name, shape in stage.kept.items():
        table.add_row(Text(name), _shape(shape), "stays at the client")
    return table


def _shape(shape: list[int]) -> str:
    return " x ".join(map(str, shape)) or "1"
