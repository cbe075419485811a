"""Carries several runs out in lockstep, and says which of them are of one kind."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from partita.algorithms import METHODS
from partita.algorithms.options import RATE
from partita.core.device import arithmetic
from partita.core.options import declared, signature
from partita.core.parts import Algorithm
from partita.engine.description import configuration, describe
from partita.engine.execute.task import memory_shared_by
from partita.engine.lockstep.meeting import Meeting
from partita.engine.lockstep.member import Together
from partita.engine.lockstep.numbers import numbers
from partita.engine.setup import Setup
from partita.engine.store.files import plain
from partita.engine.threads import same_threads

T = TypeVar("T")

MOST_TOGETHER = 16
"""Runs that advance at the same time: each of them holds the states of its clients in memory."""

OF_SERVER = ("server_lr", "server", "aggregate", "weighting")
"""Options of what the server does, which each run does for itself."""
OF_SETTINGS = ("seed", "byzantine", "newcomers")
OF_RUN = ("what", "algorithm", "schedule", "attack", "measures", "data", "trial", "executor")
"""What of config.json, and of its settings, may differ between runs whose clients compute together."""


def in_lockstep(
    runs: Sequence[Callable[[], T]],
    precision: str = "tf32",
    deterministic: bool = False,
    folder: Path | None = None,
) -> list[T]:
    """Carry runs out together, `MOST_TOGETHER` at a time, and return what they return, in their order.

    They come to their ends in any order, so what a run sets for the process while it goes on is set before:
    how exactly a GPU computes, and the threads with which the run in `folder` began, if they go on.
    """
    results: list[T] = []
    with arithmetic(precision, deterministic), warnings.catch_warnings(), same_threads(folder):
        for first in range(0, len(runs), MOST_TOGETHER):
            group = runs[first : first + MOST_TOGETHER]
            with memory_shared_by(len(group)):
                results += Meeting[T](Together(), kin).run(group)
    return results


def kin(setup: Setup, number: int) -> str:
    """Return what is the same in all runs whose clients can be one batch in this stage."""
    config = {k: v for k, v in configuration(setup, "", {}).items() if k not in OF_RUN}
    config["settings"] = {k: v for k, v in config["settings"].items() if k not in OF_SETTINGS}
    config["model"] = {k: v for k, v in config["model"].items() if k != "initial"}
    config["clients"], config["stage"] = setup.data.clients, number
    config["method"] = _without_numbers(setup.plans[number].algorithm)
    return json.dumps(plain(config), sort_keys=True, default=str)


def _without_numbers(algorithm: Algorithm) -> object:
    """Describe a method, but for step sizes and other numbers, which each client may have of its own."""
    described, own = describe(algorithm), numbers(algorithm)
    make = METHODS.get(algorithm.name)
    known = {} if make is None else signature(make).parameters
    rates = [name for name, p in known.items() if declared(p.annotation)[1].allowed == RATE]
    kept = {k: v for k, v in described.items() if k not in (*rates, *OF_SERVER)}
    return {k: "a number" if k in own else v for k, v in kept.items()}
