"""What a user calls: `federate` and `load`, and what they return."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from partita.core import check
from partita.core.device import arithmetic
from partita.core.metrics import Function
from partita.core.parts import Algorithm, Attack, Capacity, Measure
from partita.data import FederatedData
from partita.engine.callbacks import Callback, ProgressBar, Trace
from partita.engine.federation import Federation
from partita.engine.loop import train
from partita.engine.record import Record, write_page
from partita.engine.run import Run
from partita.engine.settings import Settings, liars
from partita.engine.stopping import Interrupt
from partita.engine.store.places import new_page
from partita.engine.threads import same_threads
from partita.schedule import Schedule

MANNER = ("out", "report", "resume", "max_time", "callbacks", "progress")
"""The arguments of `federate` that say how to run, and not what."""


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


def _check_baselines(given: Mapping[str, Record], data: FederatedData) -> None:
    for name, other in given.items():
        if tuple(other.names) != tuple(data.names):
            raise check.fail(f"baselines[{name!r}]", other, "a run on the same clients")


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
