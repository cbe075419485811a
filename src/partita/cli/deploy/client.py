"""`partita deploy client`."""

from __future__ import annotations

import json
import logging
import math
import struct
import time
from typing import Annotated, Any

import typer

from partita.cli.deploy.options import Insecure, Quiet, Recipe, Set, SiteFile, experiment_of, logged
from partita.core import check
from partita.deploy import Client, Handler
from partita.deploy import site as sites
from partita.deploy.board import size
from partita.deploy.facts import facts_of
from partita.deploy.flower import Door
from partita.deploy.grpc import GrpcClient
from partita.deploy.samples import samples_of
from partita.deploy.turn import bound_to
from partita.engine.stopping import terminable

LOG = logging.getLogger("partita")
REFUSED = 3
"""Exit code where the server and this client did not come together: somebody else may change that."""
WORK = {
    "train": "trained",
    "score": "answered a question about scores",
    "arrive": "made a model of its own",
    "last": "kept the last model",
    "stage": "kept a stage's model",
}


def client(
    recipe: Recipe,
    site: SiteFile,
    set_: Set = None,
    device: Annotated[str, typer.Option(help="cpu or cuda: what this client trains with.")] = "cpu",
    give_up: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time after which it ends if the server cannot be reached, such as 2h. Default: it waits.",
        ),
    ] = None,
    insecure_loopback: Insecure = False,
    quiet: Quiet = False,
) -> None:
    """Be one client: train when the server asks, with samples that stay on this machine.

    It connects to the server that site.toml names, waits where the server cannot be reached, and ends when
    the run is over; with code 3 where the server and it refuse each other, or --give-up is over. After a
    crash, start it again: its state is in the folder of site.toml, which nobody else has. No code comes from
    the server.

    With `[door]` in site.toml it calls nobody: it answers at a socket of this machine, where the ClientApp of
    a Flower federation asks, until it is stopped.

    Its samples are those of site.toml, or what a function data(name) in EXPERIMENT.py returns.

    Example: `partita deploy client experiment.py --site site.toml`
    """
    here = sites.SiteFile.read(site)
    experiment = experiment_of(recipe, set_)
    data = samples_of(here, recipe)
    facts = facts_of(experiment, experiment.data.clients)
    largest = int(data.sizes("train").max())
    bound_to(
        experiment, data, 1, 0, largest, device
    )  # samples of another form are refused before anybody is called
    one = Client(experiment, here.name, data, here.folder, site=here.leave, device=device)
    one.hold()

    keys = None if insecure_loopback else here.credentials
    patience = math.inf if give_up is None else check.duration("--give-up", give_up)
    with logged(quiet), terminable():
        LOG.info("client %s: %s samples for training, validation and test", here.name, one.sizes)
        if here.door is not None:
            door = Door(here.door.socket, largest=facts.request, group=here.door.group, notice=notice)
            LOG.info("answering at %s", door.path)
            door.run(Told(one))
            return
        link = GrpcClient(
            here.server, keys, largest=facts.request, name=here.name, notice=notice, give_up=patience
        )
        try:
            link.run(Told(one))
        except check.Refused as error:
            if error.field != "server":
                raise
            typer.echo(f"partita: {error}", err=True)
            raise typer.Exit(REFUSED) from None
        LOG.info("the run is over")


def notice(text: str) -> None:
    """Write a line to the log."""
    LOG.info("%s", text)


class Told:
    """A handler that says in the log what it was asked, how long that took, and what it sent."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    def handle(self, body: bytes) -> bytes:
        """Return the handler's reply."""
        begin, head = time.perf_counter(), head_of(body)
        reply = self.handler.handle(body)
        kind, seconds = str(head.get("kind")), time.perf_counter() - begin
        done = WORK.get(kind, f"answered {kind[:20]!r}")
        if kind == "train":
            done += f" from version {head.get('version')}"
        sizes = f"{size(len(body))} received, {size(len(reply))} sent"
        LOG.info("%s in %.2f s; %s", done, seconds, sizes)
        return reply


def head_of(body: bytes) -> dict[str, Any]:
    """Return the head of a request, for the log; empty if it has none."""
    try:
        (length,) = struct.unpack_from("<Q", body)
        head = json.loads(json.loads(body[8 : 8 + length])["__metadata__"]["partita"])
    except (struct.error, ValueError, KeyError, TypeError):
        return {}
    return head if isinstance(head, dict) else {}
