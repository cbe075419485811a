"""A run from its beginning or its checkpoint to its end, after the baselines that it is compared with."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from partita.algorithms.baselines import baselines as baseline_methods
from partita.core import check
from partita.core.parts import Algorithm
from partita.core.types import Tensors
from partita.engine.callbacks import Callback
from partita.engine.cautions import (
    warn_about_abandoned,
    warn_about_reporters,
    warn_about_scaling,
    warn_about_unsolved,
    warn_about_untrained,
)
from partita.engine.description import configuration
from partita.engine.evaluate import scores
from partita.engine.folder import RunFolder, check_same
from partita.engine.loop import one_round
from partita.engine.monitor import Monitor
from partita.engine.record import Record
from partita.engine.results import figures
from partita.engine.setup import Setup
from partita.engine.stage import Choices, Stage
from partita.engine.state import State, decode, encode, first_stage, next_stage, restored, saved_stage
from partita.engine.stopping import Interrupt
from partita.engine.store.durable import Checkpoint

LOG = logging.getLogger("partita")


class Outcome(NamedTuple):
    """A finished run: its figures, the stage and the state that it ended with, what it is compared with.

    `reference` is the global model of the baseline, where it is not the run's own.
    """

    record: Record
    stage: Stage
    state: State
    baselines: Mapping[str, Record]
    reference: Tensors


def train(
    setup: Setup,
    name: str,
    callbacks: Sequence[Callback],
    interrupt: Interrupt,
    references: Mapping[str, Record],
    before: Outcome | None = None,
) -> Outcome:
    """Run it, alone in its folder; `references` are baselines that are there already.

    It may go on from the end of one `before`, which stays as it is in memory.
    """
    settings = setup.settings
    folder = RunFolder(settings.folder, settings.checkpoint_every, setup.baseline)
    with folder.held():
        monitor = Monitor(setup, name, callbacks, folder)
        stage, state = _begin(monitor, before)
        _warn_about_untrained(stage, state)
        _warn_about_releases(setup)
        trained, reference = _trained_baselines(setup, callbacks, interrupt, before)
        known = {**references, **trained}
        if "global" in known:
            monitor.reference = _by_round(known["global"], setup.rounds)
        with interrupt:
            monitor.start(state)
            monitor.go_on(stage, state)
            stage, state = _rounds(stage, state, monitor, interrupt)
            monitor.end(stage, state)
            interrupt.check(name, state.server.version, setup.rounds, over=True, save=lambda: None)
        if not monitor.diverged(state):  # that has been said, with another reason
            warn_about_abandoned(state.counters.clock.abandoned, state.server.version, state.schedule)
            warn_about_unsolved(state.counters.share_unsolved, stage.algorithm.options.get("nu"))
        record = figures(stage, state, monitor, known)
        folder.write_results(record)
        monitor.tell_summary(record)
        reference = reference or getattr(references.get("global"), "shared", {})
        return Outcome(record, stage, state, known, reference)


def _rounds(stage: Stage, state: State, monitor: Monitor, interrupt: Interrupt) -> tuple[Stage, State]:
    """Take round after round, stage after stage, until all are over."""
    last = len(stage.setup.plans) - 1
    while True:
        while not state.is_over(stage):
            monitor.after(stage, state, one_round(stage, state))  # no name for it: uploads are large
            interrupt.check(
                monitor.name,
                state.server.version,
                stage.setup.rounds,
                over=bool(state.ended) or (stage.number == last and state.is_over(stage)),
                save=lambda: monitor.folder.checkpoint(stage, state),  # noqa: B023
            )
        if stage.number == last or state.ended:
            return stage, state
        stage, state = next_stage(stage, state, monitor.note)


def _begin(monitor: Monitor, before: Outcome | None) -> tuple[Stage, State]:
    """Begin, or go on from the newest valid checkpoint, or from the end of a run in memory."""
    setup, folder = monitor.setup, monitor.folder
    if before is not None and folder.path is None:
        return _continued(monitor, before)
    choices: Choices = {}
    saved = folder.checkpoint_to_resume(monitor.config(choices), choices, setup.settings.resume)
    if saved is not None:
        with _refusing_misfits(saved):
            tree = decode(saved.tensors, saved.state)
            stage = saved_stage(setup, tree, choices, monitor.note)
            state = restored(stage, tree, choices)
        folder.resumed(saved)
        state.ended = "" if before is not None else state.ended
        if stage.number < len(setup.plans) - 1 or not state.is_over(stage):
            folder.reopen()
        return stage, state
    stage, state = first_stage(setup, choices, monitor.note)
    monitor.write_config(choices)
    folder.checkpoint(stage, state)  # the initial weights: what is resumed starts from the same ones
    return stage, state


def _continued(monitor: Monitor, before: Outcome) -> tuple[Stage, State]:
    """Go on from the end of a run in memory, as from a checkpoint of it."""
    saved = decode(*encode(before.state.state()))
    choices: Choices = {}
    stage = saved_stage(monitor.setup, saved, choices, monitor.note)
    state = restored(stage, saved, choices)
    state.ended = ""
    return stage, state


@contextmanager
def _refusing_misfits(saved: Checkpoint) -> Iterator[None]:
    """Turn what goes wrong with a checkpoint of something else into a refusal of it."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        reason = f"{saved.path} does not fit ({type(error).__name__}: {error})"
        raise check.fail("resume", True, "a checkpoint of this run", reason) from error


def _warn_about_untrained(stage: Stage, state: State) -> None:
    setup = stage.setup
    if setup.elsewhere is not None:  # the labels, which a guess is made of, are with the clients
        return
    if setup.algorithm.name == "finetune" and not setup.algorithm.stages and not state.server.version:
        warn_about_untrained(
            setup.clean_data,
            setup.profile.metric.name,
            setup.given_model,
            lambda: scores(stage, state, "global", setup.watched),
            setup.weight(setup.watched),
        )


def _warn_about_releases(setup: Setup) -> None:
    releasing = next((t for t in setup.uploads if t.release is not None), None)
    if releasing is None or setup.baseline:
        return
    warn_about_scaling(releasing, setup.clean_data)
    for number in setup.sending:
        warn_about_reporters(releasing, setup.schedules[number], setup.elsewhere is not None)


# ---- baselines


def _trained_baselines(
    setup: Setup, callbacks: Sequence[Callback], interrupt: Interrupt, before: Outcome | None
) -> tuple[dict[str, Record], Tensors]:
    """Train what the method is compared with, one after another, but for those `before` of this length.

    The global one's model is returned, too.
    """
    trained = dict[str, Record]()
    reference: Tensors = {} if before is None else before.reference
    for name, other in _baselines(setup):
        record = None if before is None else before.baselines.get(name)
        if record is None or record.config["settings"]["rounds"] != other.rounds:
            LOG.info("baseline %s: training %s", name, other.algorithm.name)
            record, _, state, *_ = train(other, f"baseline {name}", callbacks, interrupt, {})
            reference = state.server.shared if name == "global" else reference
        trained[name] = record
    return trained, reference


def _baselines(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Yield what a method is compared with: every client alone, and fedavg where it has no global model."""
    if setup.settings.baselines is not True:
        return
    is_its_own = {"global": setup.is_global(0), "local": setup.alone}
    methods: dict[str, Algorithm] = baseline_methods(setup.algorithm)
    for name, method in methods.items():
        if not is_its_own[name]:
            folder = setup.settings.folder and setup.settings.folder / "baselines" / name
            yield name, setup.like(method, folder, name=name)


def check_finished(setup: Setup, name: str) -> None:
    """Refuse a folder with a finished run that is not this one, or whose baselines are not."""
    for what, run in ((name, setup), *((f"baseline {k}", other) for k, other in _baselines(setup))):
        folder = run.settings.folder
        if folder is not None and (run is setup or (folder / "config.json").exists()):
            check_same(configuration(run, what, {}), folder)


def _by_round(reference: Record, rounds: int) -> Callable[[int, float], float | None]:
    """Return the global score to show at each round: the reference's, or its last where its length differs.

    Runs that evaluate by virtual time do so at other rounds: then its last one until that time.
    """
    split = "validation" if any(row["validation.global"] is not None for row in reference.metrics) else "test"
    final: float | None = next((row[f"{split}.global"] for row in reversed(reference.metrics)), None)
    if reference.config["settings"]["rounds"] != rounds:
        return lambda version, time: final  # noqa: ARG005
    known = {row["round"]: row[f"{split}.global"] for row in reference.metrics}
    times = [row["time"] for row in reference.metrics]
    values = list(known.values())

    def at(version: int, time: float) -> float | None:
        place = bisect.bisect_right(times, time)
        return known[version] if version in known else values[place - 1] if place else None

    return at
