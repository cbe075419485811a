"""`partita deploy server`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from partita.api import Run
from partita.cli.common import stoppable
from partita.cli.deploy.options import Insecure, Quiet, Recipe, RosterFile, Set, experiment_of, logged
from partita.cli.options import path
from partita.core import check
from partita.deploy import roster as rosters
from partita.deploy import serve
from partita.deploy.board import Board, Lines
from partita.deploy.facts import facts_of
from partita.deploy.grpc import GrpcTransport
from partita.deploy.grpc.tls import Credentials
from partita.deploy.status import StatusPage
from partita.engine.callbacks import Callback, Event
from partita.recipes import Experiment

LOG = logging.getLogger("partita")
LOOK = 2.0  # seconds between two looks at the roster


def server(
    recipe: Recipe,
    roster: RosterFile,
    out: Annotated[Path, typer.Option(help="New or empty folder for the run.", parser=path, metavar="PATH")],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where clients connect: 0.0.0.0 is every network.")
    ] = "127.0.0.1:8443",
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run that is in --out.")] = False,
    deadline: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time after which a round ends with the clients that have answered, such as 600 or 10min. "
            "Default: a round waits for all of its cohort, also for who has gone.",
        ),
    ] = None,
    quorum: Annotated[
        str | None,
        typer.Option(
            metavar="N|SHARE",
            help="Uploads, or share of the cohort, without which a round is abandoned: the model stays as it "
            "was. Default: as the experiment's schedule says.",
        ),
    ] = None,
    patience: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Time to wait for scores; in an asynchronous run for a client that has gone; and at the end "
            "for clients that are away to come for their models.",
        ),
    ] = "60s",
    enrolment: Annotated[
        str, typer.Option(metavar="TIME", help="Time to wait until all clients are there.")
    ] = "10min",
    status: Annotated[
        int,
        typer.Option(metavar="PORT", help="Port of the status page on 127.0.0.1; 0 for any that is free."),
    ] = 0,
    set_: Set = None,
    insecure_loopback: Insecure = False,
    quiet: Quiet = False,
) -> None:
    """Train among the clients of a roster, and write the run as `partita run` does.

    The server has no samples and no personal parameters. It waits until all clients of the roster are there
    and have the same experiment. A client that goes away is waited for, or left out at --deadline; what it
    sends is screened. After a crash, the same command with --resume goes on where the last checkpoint is.

    Its keys are server.key, server.crt and ca.crt beside roster.toml. A page that only this machine can open
    shows who is there; the log says what happens to whom. Clients that are added to the roster while the run
    goes on are admitted: they get a model of their own by the method's rule for clients that come later. Who
    is removed is dismissed.

    Example: `partita deploy server experiment.py --roster keys/server/roster.toml --listen 0.0.0.0:8443
    --out runs/first --deadline 10min --quorum 0.8`
    """
    terms = {**terms_of(deadline, quorum, patience, enrolment), "resume": resume}
    rosters.read(roster)
    keys = None
    if not insecure_loopback:
        keys = Credentials(*[_key(roster, name) for name in ("ca.crt", "server.crt", "server.key")])
    experiment = experiment_of(recipe, set_)
    with stoppable(out):
        run = train(experiment, roster, listen, keys, out, status=status, quiet=quiet, **terms)
    typer.echo(str(run.summary()))
    typer.echo(f"Results in {out}. At a client: partita deploy export")


def terms_of(deadline: str | None, quorum: str | None, patience: str, enrolment: str) -> dict[str, Any]:
    """Return how long a server waits, and for how many, from what a user has written."""
    return {
        "deadline": None if deadline is None else check.duration("--deadline", deadline),
        "quorum": _quorum(quorum),
        "patience": check.duration("--patience", patience),
        "enrolment": check.duration("--enrolment", enrolment),
    }


def train(
    experiment: Experiment,
    roster: Path,
    listen: str,
    keys: Credentials | None,
    out: Path,
    *,
    status: int,
    quiet: bool,
    **terms: Any,
) -> Run:
    """Serve an experiment over gRPC, with its status page and its log; clients end when the run is over."""
    names = rosters.read(roster)
    largest = facts_of(experiment, len(names)).reply
    transport = GrpcTransport(listen, names, keys, largest=largest, notice=notice)
    over = False
    follower = Follower(roster, transport.revise)
    try:
        board = Board(lambda: traffic(transport))
        page = StatusPage(board, status)
        try:
            with logged(quiet, Lines(board.told)):
                where = listen.rpartition(":")[0]
                LOG.info("listening on %s:%d for %d clients", where, transport.port, len(names))
                LOG.info("status page: %s", page.address)
                run = serve(
                    experiment,
                    list(names),
                    transport,
                    out,
                    callbacks=[board, Rounds()],
                    progress=False,
                    samples=rosters.samples(roster),
                    admitted=lambda: follower.names,
                    **terms,
                )
        finally:
            page.close()
        over = True
    finally:
        follower.close()
        transport.close(over)
    return run


def notice(name: str, text: str) -> None:
    """Write to the log what a transport has to say, of a client or of none."""
    LOG.info("client %s: %s" if name else "%s%s", name, text)


class Follower:
    """Watches a roster from a thread, and hands it on when it has changed."""

    def __init__(self, roster: Path, revised: Callable[[Mapping[str, str]], None]) -> None:
        self.roster, self.revised = roster, revised
        self.names = frozenset(rosters.read(roster))
        self._seen, self._over = self._version(), threading.Event()
        threading.Thread(target=self._follow, daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self._over.set()

    def _version(self) -> tuple[int, int] | None:
        try:
            about = self.roster.stat()
        except OSError:
            return None
        return about.st_mtime_ns, about.st_ino

    def _follow(self) -> None:
        while not self._over.wait(LOOK):
            version = self._version()
            if version in (None, self._seen):
                continue
            self._seen = version
            try:
                found = rosters.read(self.roster)
                self.revised(found)
                self.names = frozenset(found)
                LOG.info("the roster has changed; it has %d clients", len(found))
            except (ValueError, OSError) as error:
                LOG.warning("the roster has changed, and is not followed: %s", error)


def traffic(transport: GrpcTransport) -> dict[str, dict[str, Any]]:
    """Return what the status page shows of each client's connection."""
    there = transport.present()
    return {
        name: {
            "connected": name in there,
            "sent": passed.sent,
            "received": passed.received,
            "connections": passed.connections,
            "heard": passed.heard,
        }
        for name, passed in transport.traffic().items()
    }


class Rounds(Callback):
    """Writes rounds to the log: one a second at most, but all in which somebody was excluded."""

    def __init__(self) -> None:
        self._told = -1.0

    def start(self, what: str, round: int, rounds: int) -> None:
        """Say what begins."""
        LOG.info(
            "%s: %s round %d of %d", what, "begins with" if round == 0 else "goes on after", round, rounds
        )

    def round(self, event: Event) -> None:
        """Say how far it is."""
        now = time.monotonic()
        if now - self._told < 1.0 and not event.excluded and event.round < event.rounds:
            return
        self._told = now
        loss = "" if event.train_loss is None else f", training loss {event.train_loss:.4f}"
        gone = f", excluded: {', '.join(event.excluded)}" if event.excluded else ""
        abandoned = f", {event.abandoned} abandoned so far" if event.abandoned else ""
        LOG.info("round %d of %d%s%s%s", event.round, event.rounds, loss, gone, abandoned)


def _quorum(text: str | None) -> int | float | None:
    """Return a number of uploads, or a share of a cohort."""
    if text is None:
        return None
    try:
        if text.isdecimal():
            return check.integer("--quorum", int(text), low=1)
        return check.number("--quorum", float(text), low=0, high=1, open_low=True)
    except ValueError:
        allowed = "a number of uploads such as 3, or a share of the cohort such as 0.8"
        raise check.fail("--quorum", text, allowed) from None


def _key(roster: Path, name: str) -> Path:
    """Return a file of the server's keys, beside its roster."""
    file = roster.parent / name
    if not file.is_file():
        allowed = "a folder with ca.crt, server.crt and server.key (partita deploy keys)"
        raise check.fail("--roster", str(roster), allowed, f"{name} is not beside it")
    if name.endswith(".key") and file.stat().st_mode & 0o077:
        allowed = f"a key that its owner alone can read (chmod 600 {file})"
        raise check.fail("--roster", str(roster), allowed, f"others can read {name}")
    return file
