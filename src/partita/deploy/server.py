"""The server of a run among real clients: the loop of a simulation, whose clients are elsewhere."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from partita.api import Run, trained
from partita.core import check
from partita.core.secret import BITS, seed_of
from partita.data import Population
from partita.data.population import SPLITS
from partita.deploy.agreed import (
    MOST_SAMPLES,
    differing,
    digest_of,
    parts_of,
    population_of,
    setup_of,
    standing_for,
)
from partita.deploy.fleet import RUN_FILE, Fleet, Terms
from partita.deploy.transport import Transport
from partita.deploy.wire import EMPTY, Body
from partita.engine.account import check_quorum
from partita.engine.callbacks import Callback
from partita.engine.elsewhere import Nowhere
from partita.engine.execute import Task
from partita.engine.record import read_json
from partita.engine.setup import Setup
from partita.engine.stopping import Interrupt
from partita.engine.store.addresses import Addresses
from partita.recipes.experiment import Experiment
from partita.schedule.synchronous import Synchronous, checked_quorum

LOG = logging.getLogger("partita")

FOLDER = "deployment"
"""What the server keeps beside the files of a run: who takes part, and the models that stages begin with."""
AGAIN_SECONDS = 2.0
"""After which a client that has not enrolled is asked again."""


@check.each_warning_once()
def serve(
    experiment: Experiment,
    roster: Sequence[str] | Population,
    transport: Transport,
    out: str | Path | None,
    *,
    resume: bool = False,
    deadline: float | None = None,
    quorum: int | float | None = None,
    patience: float = 60.0,
    enrolment: float = 600.0,
    secret: int | None = None,
    samples: Mapping[str, Sequence[int]] | None = None,
    admitted: Callable[[], Collection[str]] | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    report: bool = True,
) -> Run:
    """Train a model among the clients of a roster, and return the run, whose personal parts stay with them.

    roster      the names of the clients, in the order of their numbers; or a `Population`, with the samples
                that each of them has. Without those the server waits until all have enrolled
    transport   what carries requests to clients and replies back
    out         the folder of the run (None: nothing is kept, and it cannot be resumed)
    deadline    seconds after which a synchronous round ends with those who have answered (None: all do)
    quorum      usable uploads without which a round is abandoned, or which share of its cohort
    patience    seconds to wait for scores; in an asynchronous run for a client that has gone while it was at
                work; and at the end until clients that are away come for their models. A synchronous round
                without a deadline waits for who has gone, until it is back or not `admitted` any more
    enrolment   seconds to wait until all have enrolled
    secret      what the noise of privacy, and then cohorts, are drawn from (None: 256 random bits that the
                server alone has, by a keyed hash; a number below 2⁶³: as with this seed in a simulation, for
                tests). Whoever has the experiment knows its seed, and could take such noise off
    samples     how many samples some clients have for training, validation and test, by name: who says
                something else is not enrolled (None: each is believed)
    admitted    returns the names of those who may take part at this moment (None: those of the roster). Who
                is not among them any more is left out at once, and its state stays on its disk
    """
    terms = _terms(deadline, quorum, patience)
    folder = None if out is None else check.path("out", out)
    run, known_secret, population = _known(folder, resume, roster)
    interrupt = Interrupt()
    given = _of_names(roster)
    names = admitted or (lambda: given.names)
    fleet = Fleet(transport, population or given, run, terms, _stages(folder), interrupt, names)
    end = time.monotonic() + enrolment
    if population is None:
        fleet.population = _enrolled(fleet, end, samples or {})
    _pinned(fleet.population, samples or {})
    setup = _setup(experiment, fleet, out=folder, resume=resume, callbacks=tuple(callbacks), report=report)
    parts = parts_of(setup)
    fleet.digest = digest_of(parts)
    if population is None:
        _agreed(fleet, parts, end)
    if any(t.release is not None for t in setup.uploads):
        chosen = secrets.randbits(BITS) if secret is None else secret
        fleet.secret = seed_of(chosen if known_secret is None else known_secret)
    settings = replace(setup.settings, progress=progress)
    setup = replace(setup, settings=settings, elsewhere=fleet, secret=fleet.secret)
    result = trained(setup, interrupt, {})
    fleet.finish()
    return result


def _terms(deadline: float | None, quorum: int | float | None, patience: float) -> Terms:
    """Return how long the server waits, and for how many."""
    return Terms(
        None if deadline is None else check.number("deadline", deadline, low=0, open_low=True),
        None if quorum is None else checked_quorum("quorum", quorum),
        check.number("patience", patience, low=0, open_low=True),
    )


def _setup(experiment: Experiment, fleet: Fleet, **options: Any) -> Setup:
    """Return the setup of the server, which holds no samples and computes nothing for a client."""
    data = standing_for(experiment.data, fleet.population)
    setup = setup_of(experiment, data, executor=_nowhere, store=Addresses.make, device="cpu", **options)
    quorum = fleet.terms.quorum
    for plan, schedule in zip(setup.plans, setup.schedules):
        if isinstance(quorum, int) and isinstance(schedule, Synchronous):
            check.integer("quorum", quorum, low=1, high=plan.cohort or setup.data.clients)
    releasing = [t.name for t in setup.uploads if t.release is not None]
    if quorum is not None and releasing:
        check_quorum(releasing[0], quorum)
    return setup


def _nowhere(task: Task) -> Nowhere:
    """Make the executor of a server, which refuses to compute."""
    return Nowhere(task.loop.bound)


# ---- who takes part


def _enrolled(fleet: Fleet, end: float, pinned: Mapping[str, Sequence[int]]) -> Population:
    """Wait until all clients have said how many samples they have, and return them with these."""
    names, sizes = list(fleet.population.names), dict[str, list[int]]()

    def take(client: int, head: Mapping[str, Any]) -> str:
        if not _are_sizes(head.get("sizes")):
            return "counts of samples that cannot be"
        expected = list(pinned.get(names[client], head["sizes"]))
        if head["sizes"] != expected:
            return f"it says that it has {head['sizes']} samples, and the roster that it has {expected}"
        sizes[names[client]] = head["sizes"]
        return ""

    _all_of(fleet, "hello", take, end)
    return population_of(names, sizes)


def _pinned(population: Population, pinned: Mapping[str, Sequence[int]]) -> None:
    """Refuse a run that goes on with other counts of samples than the roster has now."""
    counts = zip(*[population.sizes(split).tolist() for split in SPLITS])
    for name, own in zip(population.names, counts):
        if list(pinned.get(name, own)) != list(own):
            reason = f"the run goes on with the {list(own)} that {name} was enrolled with"
            raise check.fail(f"samples of {name}", list(pinned[name]), "the same, or a new run", reason)


def _agreed(fleet: Fleet, parts: Mapping[str, str], end: float) -> None:
    """Wait until all clients have the experiment of the server."""

    def take(client: int, head: Mapping[str, Any]) -> str:  # noqa: ARG001
        theirs = head.get("parts")
        different = differing(parts, theirs if isinstance(theirs, dict) else {})
        return f"another experiment: it differs in its {', '.join(different)}" if different else ""

    _all_of(fleet, "check", take, end)


def _all_of(fleet: Fleet, kind: str, take: Callable[[int, Mapping[str, Any]], str], end: float) -> None:
    """Ask all clients until each has answered well; `take` says what is wrong with an answer."""
    names, missing = fleet.population.names, set(range(fleet.population.clients))
    reasons: dict[int, str] = {}  # what a client has said tells more than that it is away now

    def taken(client: int, head: dict[str, Any]) -> None:
        reasons[client] = take(client, head)

    while missing:
        wrong = fleet.survey(kind, sorted(missing), _nothing, taken, _left(end)) | reasons
        missing = {client for client, reason in wrong.items() if reason}
        if missing:
            _pause(fleet, end, {names[i]: wrong[i] for i in sorted(missing)})


def _nothing(client: int) -> tuple[dict[str, Any], Body]:  # noqa: ARG001
    """Return what is asked beside the kind of a question."""
    return {}, EMPTY


def _left(end: float) -> float:
    return max(0.0, end - time.monotonic())


def _pause(fleet: Fleet, end: float, wrong: Mapping[str, str]) -> None:
    """Wait a little before clients are asked again; refuse to wait for ever."""
    for name, reason in wrong.items():
        LOG.info("client %s: %s", name, reason)
    if time.monotonic() >= end:
        listed = "; ".join(f"{name}: {reason}" for name, reason in list(wrong.items())[:5])
        raise check.fail("roster", sorted(wrong)[:5], "clients that are there, with this experiment", listed)
    until = min(end, time.monotonic() + AGAIN_SECONDS)
    while (left := until - time.monotonic()) > 0:
        fleet.wait(min(0.5, left))


def _are_sizes(value: Any) -> bool:
    """Return whether it is how many samples a client has for training, validation and test."""
    is_list = isinstance(value, list) and len(value) == len(SPLITS)
    return is_list and all(type(n) is int and 0 <= n <= MOST_SAMPLES for n in value)


def _of_names(roster: Sequence[str] | Population) -> Population:
    """Return clients of whom only the names are known."""
    names = roster.names if isinstance(roster, Population) else list(roster)
    return Population.make([0] * len(names), names=names)


# ---- what the server keeps


def _stages(folder: Path | None) -> Path | None:
    return None if folder is None else folder / FOLDER


def _known(
    folder: Path | None, resume: bool, roster: Sequence[str] | Population
) -> tuple[str, int | None, Population | None]:
    """Return the number of the run, its secret, and its clients with their samples, as far as known."""
    pinned = roster if isinstance(roster, Population) else None
    file = None if folder is None else folder / FOLDER / RUN_FILE
    if not resume or file is None or not file.is_file():
        return secrets.token_hex(16), None, pinned
    found = read_json(file)
    run, clients, secret = found.get("run"), found.get("clients"), found.get("secret")
    if not isinstance(run, str) or not re.fullmatch(r"[0-9a-f]{32}", run) or not isinstance(clients, dict):
        raise check.fail("resume", True, f"the run that {file} was written for")
    if not all(map(_are_sizes, clients.values())) or not (secret is None or type(secret) is int):
        raise check.fail("resume", True, f"{file} with the samples of each client")
    names = list(_of_names(roster).names)
    left = [name for name in clients if name in names]  # the others were taken out of the roster
    if not left or names[: len(left)] != left:
        reason = f"the run in {folder} has the clients {', '.join(list(clients)[:5])}"
        raise check.fail(
            "roster", names[:5], "clients of the run in the same order, new ones behind them", reason
        )
    return run, secret, population_of(list(clients), clients)
