"""The loop: one round, on one screen. Nothing else knows the order of things."""

from __future__ import annotations

import bisect
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from partita import check, draws, tree
from partita.aggregate.screen import screen
from partita.algorithms.baselines import baselines as baseline_methods
from partita.arithmetic import arithmetic
from partita.begin import begin_run, check_same
from partita.callbacks import Callback, ProgressBar, Trace
from partita.cautions import warn_about_nothing, warn_about_untrained
from partita.cohorts import check_once, merged
from partita.data import FederatedData
from partita.federation import Federation
from partita.measure.criteria import Function
from partita.record import Record, write_page
from partita.run import Run
from partita.schedule import Schedule
from partita.settings import Settings, liars
from partita.stopping import Interrupt
from partita.store.places import new_page
from partita.threads import same_threads
from partita.types import (
    Algorithm,
    Attack,
    Capacity,
    ClientState,
    Cohort,
    Measure,
    ServerState,
    Tensors,
    Upload,
)
from partita.watch import Watch


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


MANNER = ("out", "report", "resume", "max_time", "callbacks", "progress")
"""The arguments of `federate` that say how to run, and not what."""
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
    done = [_work(run, part, many, cohort.quorum) for part in run.parts(cohort)] or [NOTHING]
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


def _work(run: Federation, cohort: Cohort, many: bool, quorum: int) -> Done:
    """Clients train, as many at once as fit; of many only the sum of their deltas is kept.

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
    if not many:
        return done
    found = _combined(run, _only(good, run.discounted(cohort, uploads)))
    return done._replace(uploads=uploads._replace(delta={}, extra={}), sum=[found] if found else [])


def _only(good: list[bool], stacks: Any) -> Any:
    return stacks if all(good) else tree.rows(stacks, [i for i, g in enumerate(good) if g])


def _combined(run: Federation, uploads: Upload) -> Upload | None:
    """One upload of all that were accepted, if any was."""
    if uploads.weight is None or not len(uploads.weight):
        return None
    key = draws.key(run.settings.seed, "aggregation", run.server.version, device=run.settings.device)
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


def federate(
    model: nn.Module | Callable[[], nn.Module],
    data: FederatedData,
    algorithm: Algorithm,
    *,
    rounds: int | None = None,
    cohort: int | None = None,
    steps: int | Sequence[int] | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    seed: int = 0,
    loss: str | Function | None = None,
    metric: str | Function | None = None,
    state: str = "keep",
    schedule: Schedule | None = None,
    attack: Attack | None = None,
    byzantine: float | Sequence[int | str] = (),
    capacity: Capacity | None = None,
    norm: str | None = None,
    executor: str = "auto",
    device: str = "auto",
    memory: int | str | None = None,
    precision: str = "tf32",
    deterministic: bool = False,
    profile: bool = False,
    store: str = "auto",
    evaluate_every: int | float | None = None,
    checkpoint_every: int | None = None,
    baselines: bool | Mapping[str, Record] = True,
    train_scores: bool = False,
    measures: Sequence[Measure] = (),
    out: str | Path | None = None,
    report: bool = True,
    resume: bool = False,
    max_time: float | str | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
) -> Run:
    """Train a model among the clients of `data` with `algorithm`, and find out who gains.

    model       any nn.Module (its weights are the start), or a function that makes one under the seed
    data        the clients' samples: `partita.data.from_arrays(x, y, client)` and the like
    algorithm   the method: `partita.fedalt(personal="output", lr=0.1)` and the like
    rounds      server steps; a pipeline's stages may bring their own
    cohort      clients per round (None: everyone)
    steps, epochs, batch
                local work per round: minibatch steps (one number, or one per client) or passes over the
                client's data (default: one pass); batch=None is the full batch
    seed        everything random depends on it
    loss        'cross_entropy', 'binary_cross_entropy', 'mse' or a function of (output, target) that returns
                the mean over a batch (None: what fits the targets)
    metric      'accuracy', 'mse', 'mae', 'loss' (None: accuracy, or the loss for numbers), or
                `partita.Metric(function, higher_is_better=True)` with a function of (output, target) that
                returns a mean over samples; a function alone, if its attribute `higher_is_better` says which
                way is better. What is no mean over samples, such as F1 or AUC, is refused
    state       'keep': clients keep their personal part between rounds; 'reset': they start anew each time
    schedule    who reports when: `partita.schedule.asynchronous(concurrency=10, delays=...)`; None: a random
                cohort each round, `partita.schedule.synchronous()`, or what the method wants
    attack      what dishonest clients do: `partita.attack.sign_flip()` and the like
    byzantine   who they are: a share of the clients, or their numbers or names; they are marked in
                clients.csv, and all scores are of the honest ones
    capacity    what devices can hold: `partita.capacity.depth({"strong": 0, "weak": 2})` and the like
    norm        statistics of normalization layers: 'global' (averaged), 'static' (none while training,
                measured before each evaluation) or 'personal' (FedBN)
    executor    'auto' (measures and picks), 'graph' (a stacked step is recorded once and replayed),
                'compiled' (and compiled, however long that takes), 'vmap' (clients stacked), 'pool' (one
                client on each core), 'loop' (one after another)
    device      'auto', 'cpu', 'cuda'
    memory      budget for stacking clients, such as '8GiB' (None: a quarter of the device's memory)
    precision   products of matrices and convolutions on a GPU: 'tf32', 'fp32' (exact, slower), or 'bf16'
                (training in half the memory; weights and updates stay float32, and so do evaluations)
    deterministic
                only operations that give the same bits in every run on the same GPU
    profile     wait for the GPU between the parts of a round, so that the times in `summary()["phases"]` are
                exact, and write a trace of some rounds to `out`
    store       clients' states in 'memory', on 'disk' (needs `out`), or 'auto' by their size
    evaluate_every, checkpoint_every
                rounds between evaluations (None: about ten in all; 2.5, not whole: virtual time between
                them) and checkpoints (None: by time; 0: none, so that the run can be neither resumed nor
                loaded with its models)
    baselines   also train what `Run.summary` compares with, with the method's `lr` and steps: for methods
                without a global model, fedavg, in as many rounds under the same schedule; and every client
                alone, which needs no schedule: all clients in each of as many rounds (of more than 200, in
                200, or as often as a client of the run has its turn). Of a large population that is the
                dearest part of a run, in time and in the models that are kept: with False there is none; or
                runs that are there already: {'local': run, 'global': run}
    train_scores
                at the end score every client on its training samples too (in clients.csv and the report)
    measures    what else to follow at each evaluation: `partita.measures.gradient_norm()` and the like
    out         a new or empty folder, for config.json, metrics.jsonl, clients.csv, summary.json, report.html
                and checkpoints
    report      also write report.html into `out` (5 MB; later: `partita report OUT`)
    resume      go on with the run in `out`, on as many threads; the result has the same bits as without
                interruption
    max_time    seconds, or such as '90min' or '2h': after the round in which they are over, baselines
                included, write a checkpoint into `out` and raise `partita.Stopped`; `resume` goes on
    callbacks   see `partita.callbacks`
    progress    show a progress bar (None: when the standard error stream is a terminal)
    """
    folder = None if out is None else check.path("out", out)
    check_manner(callbacks, resume, report, folder)
    interrupt = Interrupt(math.inf if max_time is None else deadline(max_time, folder, checkpoint_every))
    run = prepare(
        model,
        data,
        algorithm,
        folder,
        rounds=rounds,
        cohort=cohort,
        steps=steps,
        epochs=epochs,
        batch=batch,
        seed=seed,
        state=state,
        norm=norm,
        executor=executor,
        device=device,
        memory=memory,
        precision=precision,
        deterministic=deterministic,
        profile=profile,
        store=store,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        baselines=baselines,
        train_scores=train_scores,
        loss=loss,
        metric=metric,
        schedule=schedule,
        attack=attack,
        byzantine=byzantine,
        measures=measures,
        capacity=capacity,
    )
    if folder is not None and report and (folder / "config.json").exists():
        new_page("out", folder / "report.html")
    given = baselines if isinstance(baselines, Mapping) else {}
    shown = sys.stderr.isatty() if progress is None else progress
    listeners = [*callbacks, *([ProgressBar()] if shown else [])]
    if profile and folder is not None:
        ends_early = getattr(schedule, "until", None) is not None  # after fewer rounds than `rounds`
        listeners.append(Trace(folder / "trace.json", skip=0 if ends_early else 2))
    try:
        known = folder if resume and run.settings.device == "cpu" else None
        with same_threads(known), arithmetic(precision, deterministic):
            result = train(run, algorithm.name, listeners, interrupt, resume=resume, references=given)
        if folder is not None and report:
            write_page({algorithm.name: [result]}, folder / "report.html")
        return result
    finally:
        for listener in listeners:
            listener.close()


def prepare(
    model: nn.Module | Callable[[], nn.Module],
    data: FederatedData,
    algorithm: Algorithm,
    folder: Path | None,
    *,
    attack: Attack | None,
    byzantine: float | Sequence[int | str],
    schedule: Schedule | None,
    capacity: Capacity | None,
    measures: Sequence[Measure],
    loss: str | Function | None,
    metric: str | Function | None,
    **given: Any,
) -> Federation:
    """The run that arguments of `federate` describe, all of them checked, before any work."""
    check_inputs(data, algorithm)
    lying = liars(byzantine, attack, data.names, given["seed"])
    settings = Settings.checked(data.clients, byzantine=lying, **given)
    if isinstance(given["baselines"], Mapping):
        _check_baselines(given["baselines"], data)
    check.schedule("schedule", schedule)
    if capacity is not None and not isinstance(capacity, Capacity):
        raise check.fail("capacity", capacity, "partita.capacity.depth(...), width(...) or fjord(...)")
    check_measures(measures)
    if settings.store == "disk" and folder is None:
        raise check.fail("store", "disk", "'memory' or 'auto', or a folder out= for the clients' states")
    with arithmetic(settings.precision, settings.deterministic):
        return Federation(
            model,
            data,
            algorithm,
            settings,
            loss=loss,
            metric=metric,
            schedule=schedule,
            attack=attack,
            measures=measures,
            capacity=capacity,
            folder=folder,
        )


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


def _check_baselines(given: Mapping[str, Record], data: FederatedData) -> None:
    for name, other in given.items():
        if tuple(other.names) != tuple(data.names):
            raise check.fail(f"baselines[{name!r}]", other, "a run on the same clients")


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


def check_manner(callbacks: object, resume: object, report: object, folder: Path | None) -> None:
    """How to run, beside what."""
    some = callbacks if isinstance(callbacks, Sequence) else [None]
    if not all(isinstance(c, Callback) for c in some):
        raise check.fail("callbacks", callbacks, "a list of partita.callbacks.Callback")
    for field, value in (("resume", resume), ("report", report)):
        if not isinstance(value, bool):
            raise check.fail(field, value, "True or False")
    if resume and folder is None:
        raise check.fail("resume", resume, "out=, the folder of the run")


def deadline(max_time: float | str, folder: Path | None, checkpoint_every: int | None = None) -> float:
    """When a run must end, on the clock of `time.monotonic`; refused where nothing would be kept of it."""
    seconds = check.duration("max_time", max_time)
    if folder is None:
        raise check.fail("max_time", max_time, "out=, the folder for its checkpoint")
    if checkpoint_every == 0:
        raise check.fail("max_time", max_time, "checkpoints, and so no checkpoint_every=0")
    return time.monotonic() + seconds


def check_measures(measures: object) -> None:
    """What to follow, each once."""
    some = measures if isinstance(measures, Sequence) and not isinstance(measures, Measure) else [None]
    if not all(isinstance(m, Measure) for m in some):
        raise check.fail("measures", measures, "a list such as [partita.measures.gradient_norm()]")
    names = [m.name for m in some if isinstance(m, Measure)]
    if len(set(names)) < len(names):
        raise check.fail("measures", names, "each measure once")


def check_inputs(data: object, algorithm: object) -> None:
    """The two arguments that are easily confused."""
    if not isinstance(data, FederatedData):
        raise check.fail("data", data, "a FederatedData, made by partita.data.from_arrays(...) or the like")
    if not isinstance(algorithm, Algorithm):
        raise check.fail("algorithm", algorithm, "a method such as partita.fedavg(lr=0.1)")
