"""The ServerApp of Flower: what `flwr run` starts, as `partita deploy server` does for gRPC."""

from __future__ import annotations

import contextlib
import logging
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partita.cli.deploy.options import experiment_of, logged
from partita.cli.deploy.server import Follower, Rounds, notice, terms_of
from partita.core import check
from partita.deploy import roster as rosters
from partita.deploy import serve
from partita.deploy.facts import facts_of
from partita.deploy.flower import FlowerTransport

LOG = logging.getLogger("partita")
NEEDED = ("experiment", "roster", "out")
DEFAULTS = {"set": "", "resume": False, "deadline": "", "quorum": "", "patience": "60s", "enrolment": "10min"}


def main(grid: Any, context: Any) -> None:
    """Train among the SuperNodes of a roster, as the run's configuration says."""
    given = configured(context.run_config)
    experiment = experiment_of(given["experiment"], shlex.split(given["set"]))
    pinned = Path(given["roster"])
    names = rosters.read(pinned)
    terms = terms_of(
        given["deadline"] or None, given["quorum"] or None, given["patience"], given["enrolment"]
    )
    largest = facts_of(experiment, len(names)).reply
    transport = FlowerTransport(grid, names, largest=largest, notice=notice)
    follower = Follower(pinned, transport.revise)
    with logged(False), contextlib.closing(transport), contextlib.closing(follower):
        run = serve(
            experiment,
            list(names),
            transport,
            Path(given["out"]),
            resume=given["resume"],
            callbacks=[Rounds()],
            progress=False,
            samples=rosters.samples(pinned),
            admitted=lambda: follower.names,
            **terms,
        )
        LOG.info("%s", run.summary())


def configured(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run's configuration says; refuse what is missing or of another type."""
    rosters.known("run config", config, (*NEEDED, *DEFAULTS))
    for key in NEEDED:
        if not isinstance(config.get(key), str) or not config[key]:
            raise check.fail(f"run config: {key}", config.get(key), "a path on the machine of the SuperLink")
    given = {**DEFAULTS, **config}
    for key, default in DEFAULTS.items():
        if type(given[key]) is not type(default):
            kind = "true or false" if isinstance(default, bool) else "a text, such as '10min'"
            raise check.fail(f"run config: {key}", given[key], kind)
    return given
