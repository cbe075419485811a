"""The loop: one round, on one screen. Nothing else knows the order of things."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from partita.algorithms.baselines import baselines as baseline_methods
from partita.core import draws, tree
from partita.core.parts import Algorithm
from partita.core.types import ClientState, Cohort, ServerState, Tensors, Upload
from partita.engine.callbacks import Callback
from partita.engine.cautions import warn_about_nothing, warn_about_untrained
from partita.engine.cohorts import check_once, merged
from partita.engine.federation import Federation
from partita.engine.folder import begin_run, check_same
from partita.engine.monitor import Watch
from partita.engine.record import Record
from partita.engine.run import Run
from partita.engine.screen import screen
from partita.engine.stopping import Interrupt


class Done(NamedTuple):
    """What clients sent, for each why it is unusable ('': it is not), and its bytes.

    Where the deltas of many are added up as they come: what they are combined to, instead of them.
    `kept` are the clients whose new states wait until it is known whether the round counts, with the states.
    """

    uploads: Upload
    why: list[str]
    sent: int
    sum: Sequence[Upload] = ()
    kept: Sequence[tuple[list[int], ClientState]] = ()


NOTHING = Done(Upload({}), [], 0)
"""What a round brings in which everybody was late."""


def rounds(run: Federation, watch: Watch, interrupt: Interrupt) -> None:
    """Round after round until the stage is over."""
    while not run.schedule.done(run.server):
        one_round(run, watch)
        interrupt.check(watch)


def one_round(run: Federation, watch: Watch) -> None:
    """A cohort trains, the server acts on what it sends."""
    begin = time.perf_counter()
    with run.phases("cohort"):
        cohort = run.schedule.next(run.server)  # who reports now, and what each had downloaded
        check_once(cohort, run.data.names)
    run.ahead.forget(cohort.late)
    run.read_ahead(cohort)
    many = run.adds_up(cohort)
    parts = enumerate(run.parts(cohort))
    done = [_work(run, part, cohort.quorum, i if many else None) for i, part in parts] or [NOTHING]
    uploads, why = tree.cat([d.uploads for d in done]), [w for d in done for w in d.why]
    with run.phases("screening"):
        uploads, why = screen(uploads, why, run.forge(cohort, uploads))  # liars act; faults are named
    good = [not w for w in why]
    usable = _only(good, run.discounted(cohort, uploads))
    combined = None
    if cohort.suffices(sum(good)):  # else the round is abandoned: all is as it was, but the count
        combined = merged([u for d in done for u in d.sum]) if many else _combined(run, usable)
        for clients, states in [kept for d in done for kept in d.kept]:
            run.save(clients, states)
    run.server, notes = _advance(run, usable, combined)
    sent, seconds = sum([d.sent for d in done]), time.perf_counter() - begin
    watch.after(cohort, uploads, why, sent, notes, seconds)  # metrics, progress, checkpoint


def _work(run: Federation, cohort: Cohort, quorum: int, part: int | None) -> Done:
    """Clients train, as many at once as fit; where they are a `part` of many, only the sum of their deltas
    is kept.

    With a quorum, what they keep waits until all have trained: too many of them may yet be set aside.
    """
    uploads, states, why = run.trained(cohort)  # with their personal parameters and memories
    good = [not w for w in why]
    done = Done(uploads, why, run.devices.sent(uploads))
    if run.keeps_state:
        clients, states = [c for c, g in zip(cohort.clients, good) if g], _only(good, states)
        if quorum > 1:
            done = done._replace(kept=[(clients, tree.to(states, run.home))])
        else:
            run.save(clients, states)
    if part is None:
        return done
    found = _combined(run, _only(good, run.discounted(cohort, uploads)), part)
    return done._replace(uploads=uploads._replace(delta={}, extra={}, sums={}), sum=[found] if found else [])


def _only(good: list[bool], stacks: Any) -> Any:
    return stacks if all(good) else tree.rows(stacks, [i for i, g in enumerate(good) if g])


def _combined(run: Federation, uploads: Upload, part: int | None = None) -> Upload | None:
    """One upload of all that were accepted, if any was; a `part` of a cohort has draws of its own."""
    if uploads.weight is None or not len(uploads.weight):
        return None
    key = draws.key(run.settings.seed, "aggregation", run.server.version, device=run.settings.device)
    key = key if part is None else draws.branch(key, "part", part)
    with run.phases("aggregation"):
        return run.aggregate(uploads, key)


def _advance(run: Federation, uploads: Upload, combined: Upload | None) -> tuple[ServerState, Tensors]:
    """The server's step on what was accepted; without any upload only the count goes on."""
    if combined is None:
        return run.server._replace(version=run.server.version + 1), {}
    if sent := uploads.delta or combined.delta:  # fine-tuning sends nothing: the server's model stays
        run.whole = set(run.names) <= set(sent)
    with run.phases("server"):
        moved = run.server_rule.step(run.server, combined)
        return run.devices.settled(run.server, moved, uploads), combined.metrics


def check_finished(run: Federation, what: str) -> None:
    """A folder with a finished run is taken for this one's only if it is, with the baselines in it."""
    assert run.folder is not None
    check_same(Watch(run, what, ()).config(), run.folder)
    for name, other in _like(run):
        if other.folder is not None and (other.folder / "config.json").exists():
            check_same(Watch(other, f"baseline {name}", ()).config(), other.folder)


def train(
    run: Federation,
    what: str,
    callbacks: Sequence[Callback],
    interrupt: Interrupt,
    *,
    resume: bool,
    references: Mapping[str, Record],
) -> Run:
    """A run from its beginning or its checkpoint to its end, alone in its folder."""
    try:
        return _trained(run, what, callbacks, interrupt, resume, dict(references))
    finally:
        run.release()


def _trained(
    run: Federation,
    what: str,
    callbacks: Sequence[Callback],
    interrupt: Interrupt,
    resume: bool,
    references: dict[str, Record],
) -> Run:
    """After the baselines that it is compared with."""
    watch = Watch(run, what, callbacks)
    begin_run(run, watch, resume)
    warn_about_untrained(run)
    for name, other in _like(run):
        what_else = f"baseline {name}"
        references[name] = train(other, what_else, callbacks, interrupt, resume=resume, references={})
    if "global" in references:
        watch.reference = _by_round(references["global"], run.rounds)
    with interrupt:
        watch.start()
        rounds(run, watch, interrupt)
        while run.stage + 1 < len(run.stages):
            run.enter(run.stage + 1)
            rounds(run, watch, interrupt)
        watch.end()
        interrupt.check(watch)
    if not watch.diverged:  # that has been said, with another reason
        warn_about_nothing(run, watch.timing.abandoned)
    result = Run.of(run, watch, references)
    watch.tell_summary(result)
    return result


def _like(run: Federation) -> Iterator[tuple[str, Federation]]:
    """The runs that it is compared with, one after another."""
    for name, method in _baselines(run).items():
        folder = run.folder and run.folder / "baselines" / name
        yield name, run.like(method, folder, alone=name == "local")


def _baselines(run: Federation) -> dict[str, Algorithm]:
    """What the method is compared with: every client alone, and fedavg where it has no global model."""
    if run.settings.baselines is not True:
        return {}
    there = {"global": run.is_global(0), "local": run.alone}
    return {name: rule for name, rule in baseline_methods(run.given).items() if not there[name]}


def _by_round(reference: Record, rounds: int) -> Callable[[int, float], float | None]:
    """The global score to show at each round: the reference's, or its last where it ran for another time.

    Runs that evaluate by virtual time do so at other rounds: then its last one until that time.
    """
    final: float | None = reference.summary()["test"]["global"]
    if reference.config["settings"]["rounds"] != rounds:
        return lambda version, time: final  # noqa: ARG005
    known = {row["round"]: row["test.global"] for row in reference.metrics}
    times = [row["time"] for row in reference.metrics]
    scores = list(known.values())

    def at(version: int, time: float) -> float | None:
        place = bisect.bisect_right(times, time)
        return known[version] if version in known else scores[place - 1] if place else None

    return at
