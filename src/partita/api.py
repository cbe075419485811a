"""What a user calls: `federate`, with all its arguments, and what it returns."""

from __future__ import annotations

import functools
import inspect
import math
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, get_type_hints

from torch import nn

from partita.core import check
from partita.core.device import arithmetic
from partita.core.options import bind, readable
from partita.core.parts import Algorithm
from partita.data import FederatedData
from partita.engine import run as engine_run
from partita.engine.callbacks import ProgressBar, Trace
from partita.engine.federation import Federation
from partita.engine.loop import train
from partita.engine.record import Record
from partita.engine.settings import Settings, declarations
from partita.engine.stopping import Interrupt
from partita.engine.store.places import new_page
from partita.engine.threads import same_threads
from partita.report import write, write_page

P = ParamSpec("P")


class Run(engine_run.TrainedRun):
    """What `federate` returns and `partita.load` reads: the figures of a run, and its models.

    `shared` are the server's tensors; `client(i)` has a client's own, and `holdings` say who holds what.
    """

    def report(self, path: str | Path = "report.html") -> Path:
        """Write a page that opens offline: curves, who gained and who lost and why, cost, settings."""
        return write({self.facts["algorithm"]: [self]}, path)

    def save(self, folder: str | Path) -> None:
        """Write the run to a new folder like that of `out=`, page included; `partita.load` reads it."""
        target = check.path("folder", folder)
        self.write(target)
        if not (target / "report.html").exists():
            write_page({self.facts["algorithm"]: [self]}, target / "report.html")


def load(folder: str | Path, model: nn.Module | None = None) -> Run:
    """Read a finished run from its folder.

    `model` (as it was trained) is needed for `client(i).model()` only.
    """
    return Run(**vars(engine_run.load(folder, model)))


@dataclass(frozen=True)
class Arguments(Settings):
    """All arguments of `federate`: the settings, behind what is trained on what and how."""

    model: nn.Module | Callable[[], nn.Module]
    data: FederatedData
    algorithm: Algorithm

    def prepared(self) -> Federation:
        """The run that they describe, all of them checked, before any work."""
        if not isinstance(self.data, FederatedData):
            raise check.fail(
                "data", self.data, "a FederatedData, made by partita.data.from_arrays(...) or the like"
            )
        if not isinstance(self.algorithm, Algorithm):
            raise check.fail("algorithm", self.algorithm, "a method such as partita.fedavg(lr=0.1)")
        settings = self.checked(self.data.clients, self.data.names)
        for name, other in self.references.items():
            if tuple(other.names) != tuple(self.data.names):
                raise check.fail(f"baselines[{name!r}]", other, "a run on the same clients")
        with arithmetic(settings.precision, settings.deterministic):
            return Federation(self.model, self.data, self.algorithm, settings)

    @property
    def references(self) -> Mapping[str, Record]:
        """Baselines that are there already."""
        return self.baselines if isinstance(self.baselines, Mapping) else {}


def _called_with(
    arguments: Callable[P, Arguments],
) -> Callable[[Callable[[Arguments], Run]], Callable[P, Run]]:
    """Give a function the arguments of a dataclass, and their meaning to its docstring."""

    def decorate(function: Callable[[Arguments], Run]) -> Callable[P, Run]:
        known, hints = inspect.signature(arguments), get_type_hints(arguments, include_extras=True)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Run:
            bound = bind(function.__name__, known, args, kwargs)
            return function(arguments(*bound.args, **bound.kwargs))

        declared = known.replace(
            parameters=[p.replace(annotation=hints[p.name]) for p in known.parameters.values()],
            return_annotation="Run",
        )
        function.__signature__ = declared  # type: ignore[attr-defined]
        call.__signature__ = readable(declared)  # type: ignore[attr-defined]
        call.__doc__ = f"{inspect.getdoc(function)}\n\n{_meanings()}"
        return call

    return decorate


def _meanings() -> str:
    """What each setting means, a paragraph each."""
    found = []
    for name, (_, option) in declarations(Settings).items():
        lines = textwrap.wrap(option.text, 95)
        found += [f"{name:<12}{lines[0]}" if len(name) < 12 else f"{name}\n{'':12}{lines[0]}"]
        found += [f"{'':12}{line}" for line in lines[1:]]
    return "\n".join(found)


@_called_with(Arguments)
def federate(given: Arguments) -> Run:
    """Train a model among the clients of `data` with `algorithm`, and find out who gains.

    model       any nn.Module (its weights are the start), or a function that makes one under the seed
    data        the clients' samples: `partita.data.from_arrays(x, y, client)` and the like
    algorithm   the method: `partita.fedalt(personal="output", lr=0.1)` and the like
    """
    interrupt = Interrupt(deadline(given.max_time, given.out, given.checkpoint_every))
    run = given.prepared()
    settings, folder = run.settings, run.folder
    if folder is not None and settings.report and (folder / "config.json").exists():
        new_page("out", folder / "report.html")
    shown = sys.stderr.isatty() if settings.progress is None else settings.progress
    listeners = [*settings.callbacks, *([ProgressBar()] if shown else [])]
    if settings.profile and folder is not None:
        ends_early = getattr(settings.schedule, "until", None) is not None  # after fewer rounds than `rounds`
        listeners.append(Trace(folder / "trace.json", skip=0 if ends_early else 2))
    name = given.algorithm.name
    try:
        known = folder if settings.resume and settings.device == "cpu" else None
        with same_threads(known), arithmetic(settings.precision, settings.deterministic):
            trained = train(
                run, name, listeners, interrupt, resume=settings.resume, references=given.references
            )
        result = Run(**vars(trained))
        if folder is not None and settings.report:
            write_page({name: [result]}, folder / "report.html")
        return result
    finally:
        for listener in listeners:
            listener.close()


def deadline(max_time: float | str | None, out: str | Path | None, checkpoint_every: Any = None) -> float:
    """When a run must end, on the clock of `time.monotonic`; refused where nothing would be kept of it."""
    if max_time is None:
        return math.inf
    seconds = check.duration("max_time", max_time)
    if out is None:
        raise check.fail("max_time", max_time, "out=, the folder for its checkpoint")
    if checkpoint_every == 0:
        raise check.fail("max_time", max_time, "checkpoints, and so no checkpoint_every=0")
    return time.monotonic() + seconds
