"""What a user asks of a run, checked before any work, and written down so that it can be run again."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch

from partita.augment.base import Augmentation, augmentation
from partita.core import check, draws
from partita.core.criterion import Function
from partita.core.device import PRECISIONS
from partita.core.metrics import METRICS, Metric
from partita.core.options import Option, declared, verify
from partita.core.parts import (
    Algorithm,
    Attack,
    Capacity,
    Measure,
    StagePlan,
    Transform,
)
from partita.core.types import Work
from partita.engine.callbacks import Callback
from partita.engine.execute import EXECUTORS, Runner, Task
from partita.engine.model.forward import Output, check_choice
from partita.engine.placement import PLACES
from partita.engine.record import Record
from partita.engine.store import Store
from partita.schedule import Schedule, preferred, synchronous
from partita.transforms.order import in_order
from partita.workers import Workers
from partita.workers import requested as workers_requested

STATES, NORMS = ("keep", "reset"), ("global", "static", "personal")
STORES = ("auto", "memory", "disk")
UNTIL, KEEP = ("converged",), ("last", "best")
DEVICES = "'auto', 'cpu' or 'cuda'"
BOOLEAN = "True or False"

MOST_ROUNDS = 1000
"""Rounds after which a run ends that was to converge, and has not."""
ROUNDS_ALONE = 200
"""Rounds of a client alone where no validation samples can say when to end: with a few steps in each and
common rates, it comes close to where it ends after 25 to 200 on the digits and on spoken digits."""


def _later(field: str, value: Any) -> Any:  # noqa: ARG001
    """Accept what can only be checked beside the data or the model."""
    return value


def _out(field: str, value: Any) -> Path | None:
    return None if value is None else check.path(field, value)


def _every(field: str, every: Any) -> int | float:
    """Return the rounds between evaluations, or virtual time if it is no whole number."""
    if isinstance(every, float):
        return check.number(field, every, low=0, open_low=True)
    try:
        return check.integer(field, every, low=1)
    except check.Refused as error:
        raise check.fail(field, every, f"{error.allowed}, or virtual time such as 2.5") from None


def _baselines(field: str, baselines: Any) -> bool | Mapping[str, Record]:
    """Return whether to train baselines, or the runs to compare with."""
    if isinstance(baselines, bool):
        return baselines
    if not isinstance(baselines, Mapping):
        raise check.fail(field, baselines, "True, False or {'global': run, 'local': run}")
    for name, run in baselines.items():
        check.choice(field, name, ("global", "local"))
        if not hasattr(run, "scores"):
            raise check.fail(f"{field}[{name!r}]", run, "a run, as partita.federate returns it")
    return baselines


def _device(field: str, device: Any) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise check.fail(field, device, DEVICES) from None
    if chosen.type not in ("cpu", "cuda"):
        raise check.fail(field, device, DEVICES)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise check.fail(field, device, "'auto' or 'cpu'", "this machine has no CUDA device")
    return str(chosen)


def device_of(device: Any) -> str:
    """Return the device that `device=` means on this machine."""
    return _device("device", device)


def _executor(field: str, executor: Any) -> str | Callable[[Task], Runner]:
    """Return the name of an executor, or the function that makes one; those of the registry have names."""
    name = next((name for name, factory in EXECUTORS.items() if factory is executor), None)
    if name is not None:
        return name
    if callable(executor):
        return check.takes(field, executor, 1, "a function of a Task that returns an executor")  # type: ignore[no-any-return]
    return check.choice(field, executor, EXECUTORS)  # type: ignore[no-any-return]


def _store(field: str, store: Any) -> str | Callable[..., Store]:
    if callable(store):
        allowed = "a function of (state of a new client, clients, folder, device) that returns a store"
        return check.takes(field, store, 4, allowed)  # type: ignore[no-any-return]
    return check.choice(field, store, STORES)  # type: ignore[no-any-return]


def _measures(field: str, measures: Any) -> Sequence[Measure]:
    """Return the measures to follow, each once."""
    listed = isinstance(measures, Sequence) and not isinstance(measures, Measure)
    if not listed or not all(isinstance(m, Measure) for m in measures):
        raise check.fail(field, measures, "a list such as [partita.measures.gradient_norm()]")
    names = [m.name for m in measures]
    if len(set(names)) < len(names):
        raise check.fail(field, names, "each measure once")
    return tuple(measures)


def _transforms(field: str, transforms: Any) -> tuple[Transform, ...]:
    """Return a list of transforms; a single one is a list of one."""
    listed = (transforms,) if isinstance(transforms, Transform) else transforms
    of = isinstance(listed, Sequence) and not isinstance(listed, str)
    if not of or not all(isinstance(t, Transform) for t in listed):
        raise check.fail(field, transforms, "a list such as [partita.transforms.topk(0.01)]")
    return tuple(listed)


def _uploads(field: str, uploads: Any) -> tuple[Transform, ...]:
    """Return the transforms of uploads, in an order in which none undoes what one before it has done."""
    return in_order(_transforms(field, uploads))


def _downloads(field: str, downloads: Any) -> tuple[Transform, ...]:
    """Return the transforms of downloads, which are the same for all clients and need no draws."""
    transforms = _transforms(field, downloads)
    for number, transform in enumerate(transforms):
        at_server = transform.begin or transform.accept or transform.release or transform.bind
        if transform.encode is None or transform.draws or transform.feedback or at_server:
            allowed = "transforms that draw nothing and remember nothing, such as partita.transforms.half()"
            raise check.fail(f"{field}[{number}]", transform.name, allowed)
    return in_order(transforms, field)


def _callbacks(field: str, callbacks: Any) -> Sequence[Callback]:
    if not isinstance(callbacks, Sequence) or not all(isinstance(c, Callback) for c in callbacks):
        raise check.fail(field, callbacks, "a list of partita.callbacks.Callback")
    return tuple(callbacks)


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is computed: the numbers and words among the arguments of `federate`."""

    rounds: Annotated[
        int | None,
        Option(
            "number of server steps; required, unless the stages of a pipeline have their own; with "
            "until='converged' the most (default then: 1000)",
            low=1,
        ),
    ] = None
    until: Annotated[
        str | None,
        Option(
            "'converged': train until neither the score nor the loss on the validation samples has improved "
            "for `patience` evaluations (default: all `rounds`)",
            choices=UNTIL,
        ),
    ] = None
    patience: Annotated[
        int | None,
        Option(
            "evaluations without improvement after which a run, or the baseline of clients alone, has "
            "converged (default: 10)",
            low=1,
        ),
    ] = None
    keep: Annotated[
        str | None,
        Option(
            "the model that a run ends with: that of its 'last' round, or that of the round with the 'best' "
            "score on the validation samples, by the mean of three evaluations (default: 'best' with "
            "until='converged', else 'last')",
            choices=KEEP,
        ),
    ] = None
    cohort: Annotated[int | None, Option("clients per round (default: all clients)", low=1)] = None
    steps: Annotated[
        int | Sequence[int] | None,
        Option(
            "local minibatch steps per round: one number for all clients, or one for each (default: `epochs` "
            "decides)",
            check=_later,
        ),
    ] = None
    epochs: Annotated[
        int | None,
        Option(
            "local passes over a client's training samples per round (default: 1, unless `steps` is given)",
            low=1,
        ),
    ] = None
    batch: Annotated[
        int | None, Option("samples per local step (default: all training samples of the client)", low=1)
    ] = None
    seed: Annotated[
        int, Option("seed on which everything random depends (default: 0)", low=0, high=check.LARGEST)
    ] = 0
    state: Annotated[
        str,
        Option(
            "'keep': clients keep their personal part between rounds (default); 'reset': they start from the "
            "initial one in each round",
            choices=STATES,
        ),
    ] = "keep"
    norm: Annotated[
        str | None,
        Option(
            "statistics of normalization layers: 'global' (averaged), 'static' (not used in training, "
            "measured before each evaluation) or 'personal' (kept by each client, as in FedBN) (default: "
            "'global')",
            choices=NORMS,
        ),
    ] = None
    byzantine: Annotated[
        float | Sequence[int | str],
        Option(
            "Byzantine clients, who follow `attack`: a share of the clients, or a list of their numbers or "
            "names; clients.csv marks them, and all scores are those of the honest clients (default: none)",
            check=_later,
        ),
    ] = ()
    newcomers: Annotated[
        float | Sequence[int | str],
        Option(
            "clients that are held out of training and come after it, as in `Run.personalize`: a share of "
            "all, drawn by the seed, or a list of their numbers or names; clients.csv marks them, and "
            "scores are those of the others. Numbers elsewhere, as in `byzantine`, count the others "
            "(default: none)",
            check=_later,
        ),
    ] = ()
    evaluate_every: Annotated[
        int | float | None,
        Option(
            "rounds between evaluations; a fraction such as 2.5 is virtual time (default: about ten "
            "evaluations in all, a hundred with until='converged')",
            low=1,
            allowed="virtual time such as 2.5",
            check=_every,
        ),
    ] = None
    checkpoint_every: Annotated[
        int | None,
        Option(
            "rounds between checkpoints; 0 writes none, and then the run can neither be resumed nor loaded "
            "with its models (default: a checkpoint about every 30 seconds)",
            low=0,
        ),
    ] = None
    baselines: Annotated[
        bool | Mapping[str, Record],
        Option(
            "also train the baselines that `Run.summary` compares with, with the method's `lr` and steps: "
            "fedavg, for methods without a global model, in as many rounds under the same schedule; and "
            "every client alone, until it has converged on the validation samples. With many clients, "
            "training alone is the most expensive part of a run: False trains no baselines, and {'local': "
            "run, 'global': run} compares with earlier runs (default: True)",
            check=_baselines,
        ),
    ] = True
    train_scores: Annotated[
        bool,
        Option(
            "also score every client on its training samples at the end, for clients.csv and the report "
            "(default: False)",
            allowed=BOOLEAN,
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is composed of beside its model, its data and its method."""

    loss: Annotated[
        str | Function | None,
        Option(
            "'cross_entropy', 'binary_cross_entropy', 'mse', 'next_token' for language models (the output at "
            "a position against the next token of y), 'model' for the loss that a model returns by itself "
            "when it gets the labels too, or a function of (output, target), and of what else it asks "
            "for by name, that returns the mean over a batch (default: the one that fits the targets)",
            check=_later,
        ),
    ] = None
    output: Annotated[
        Output,
        Option(
            "which of a model's outputs is the prediction: a name, a place, or a function of what the model "
            "returns (default: `logits`, or the first tensor of a tuple)",
            check=check_choice,
        ),
    ] = None
    features: Annotated[
        str | None,
        Option(
            "the submodule whose outputs are the features that a loss or a method asks for (default: what "
            "the model's last layer takes)",
            allowed="the name of a submodule, such as 'encoder'",
        ),
    ] = None
    metric: Annotated[
        str | Function | Metric | Sequence[str | Function | Metric] | None,
        Option(
            f"a metric of each client: {', '.join(map(repr, METRICS))}, 'loss', or "
            "`partita.Metric(function, higher_is_better=True)` with a function of all (outputs, targets) of "
            "a client; a list of several, of which the first decides (default: accuracy for classes, the "
            "loss for numbers)",
            check=_later,
        ),
    ] = None
    augment: Annotated[
        Augmentation | None,
        Option(
            "how training samples are changed, anew each time: `partita.augment.crop(4)`, `flip()` or "
            "another, a list of several, or a function (x, key) -> x of one sample (default: not at all)",
            check=augmentation,
        ),
    ] = None
    schedule: Annotated[
        Schedule | None,
        Option(
            "which clients report when: `partita.schedule.synchronous()`, "
            "`partita.schedule.asynchronous(concurrency=10, delays=...)` or another (default: a random "
            "cohort in each round, or the schedule that the method prefers)",
            check=check.schedule,
        ),
    ] = None
    attack: Annotated[
        Attack | None,
        Option(
            "what Byzantine clients do, such as `partita.attack.sign_flip()` (default: no attack)",
            allowed="an attack such as partita.attack.sign_flip()",
        ),
    ] = None
    capacity: Annotated[
        Capacity | None,
        Option(
            "which part of the model devices can hold, such as `partita.capacity.depth({'strong': 0, 'weak': "
            "2})` (default: all of it)",
            allowed="partita.capacity.depth(...), width(...) or fjord(...)",
        ),
    ] = None
    uploads: Annotated[
        Sequence[Transform],
        Option(
            "what happens to each client's whole upload on its way, in this order, such as "
            "`[partita.transforms.topk(0.01), partita.transforms.quantize(8)]` or "
            "`[partita.privacy.gaussian(epsilon=4)]` (default: nothing)",
            check=_uploads,
        ),
    ] = ()
    downloads: Annotated[
        Sequence[Transform],
        Option(
            "what happens to what clients receive of the model, such as `[partita.transforms.half()]`; only "
            "transforms that draw nothing (default: nothing)",
            check=_downloads,
        ),
    ] = ()
    measures: Annotated[
        Sequence[Measure],
        Option(
            "what else to measure at each evaluation, such as `[partita.measures.gradient_norm()]` (default: "
            "nothing)",
            check=_measures,
        ),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What computes, and where states are kept."""

    executor: Annotated[
        str | Callable[[Task], Runner],
        Option(
            "how clients are trained: 'auto' (measures the others and takes the fastest; default), 'loop' "
            "(one client after another), 'pool' (one client on each core), 'vmap' (clients stacked), 'graph' "
            "(a stacked step is recorded once and replayed), 'compiled' (a stacked step is compiled first, "
            "however long that takes); or a function of a `partita.Task` that returns an executor",
            check=_executor,
        ),
    ] = "auto"
    device: Annotated[
        str,
        Option(
            "'cpu', 'cuda', or 'auto' (default), which takes a CUDA device if there is one", check=_device
        ),
    ] = "auto"
    workers: Annotated[
        int | str | Workers | None,
        Option(
            "who computes: 4 for so many processes of this machine, with device='cuda' one GPU each; 'ray:4' "
            "for Ray, 'ray:auto' for all of a cluster that runs, 'ray(4, threads=2, gpus=0.5)' with options. "
            "A run may be resumed with another number of them (default: this process alone)",
            check=workers_requested,
        ),
    ] = None
    shares: Annotated[
        int | None,
        Option(
            "into how many shares a cohort is cut, each computed by one worker; it decides the last bits of "
            "a result, and stays the same on resume (default: one for each worker)",
            low=1,
            high=4096,
        ),
    ] = None
    memory: Annotated[
        int | str | None,
        Option(
            "memory for stacking clients, such as '8GiB' (default: a quarter of the device's memory)",
            check=check.size,
        ),
    ] = None
    data_on: Annotated[
        str,
        Option(
            "where samples are kept: on the 'device' that computes, on the 'host' (or in the files that they "
            "are mapped from), from where the rows of a step are sent while the device works on others, or "
            "'auto' (default): the device, unless they take more than half of `memory`",
            choices=PLACES,
        ),
    ] = "auto"
    precision: Annotated[
        str,
        Option(
            "precision of matrix products and convolutions on a GPU: 'tf32' (default), 'fp32' (exact, "
            "slower), or 'bf16' (trains in half the memory; weights, updates and evaluations stay float32)",
            choices=PRECISIONS,
        ),
    ] = "tf32"
    deterministic: Annotated[
        bool,
        Option(
            "use only operations that give the same bits in every run on the same GPU (default: False)",
            allowed=BOOLEAN,
        ),
    ] = False
    profile: Annotated[
        bool,
        Option(
            "wait for the GPU between the parts of a round, so that the times in `summary()['phases']` are "
            "exact, and write a trace of some rounds to `out` (default: False)",
            allowed=BOOLEAN,
        ),
    ] = False
    store: Annotated[
        str | Callable[..., Store],
        Option(
            "where clients' states are kept: in 'memory', on 'disk' (needs `out`), or 'auto' (default), by "
            "their size; or a function of (state of a new client, clients, folder, device) that returns "
            "a store",
            check=_store,
        ),
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How a run is carried out and written down; nothing of it changes a result."""

    out: Annotated[
        str | Path | None,
        Option(
            "a new or empty folder for config.json, metrics.jsonl, clients.csv, summary.json, report.html "
            "and checkpoints (default: nothing is written)",
            check=_out,
        ),
    ] = None
    report: Annotated[
        bool,
        Option(
            "also write report.html into `out`, 2 MB; `partita report OUT` writes it later (default: True)",
            allowed=BOOLEAN,
        ),
    ] = True
    resume: Annotated[
        bool,
        Option(
            "continue the run in `out`, on the same number of threads; the result has the same bits as that "
            "of a run without interruption. With more `rounds` a finished run goes on (default: False)",
            allowed=BOOLEAN,
        ),
    ] = False
    max_time: Annotated[
        float | str | None,
        Option(
            "time limit in seconds, or such as '90min' or '2h', baselines included: after the round in which "
            "it is reached, write a checkpoint into `out` and raise `partita.Stopped`; `resume` continues "
            "(default: no limit)",
            check=_later,
        ),
    ] = None
    callbacks: Annotated[
        Sequence[Callback],
        Option(
            "objects that are told what happens, see `partita.callbacks`; one that raises `partita.Stop` "
            "ends the run after this round (default: none)",
            check=_callbacks,
        ),
    ] = ()
    progress: Annotated[
        bool | None,
        Option("show a progress bar (default: if the standard error stream is a terminal)", allowed=BOOLEAN),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Settings(Manner, Machine, Parts, Training):
    """The arguments of `federate` beside model, data and method.

    Each is declared above, and nowhere else: its type, its default, what it means and which values it takes.
    The signature of `federate`, the checks, config.json, `Experiment`, the command line and the documents
    read them there. `checked` returns them with nothing left to interpret.
    """

    def checked(self, clients: int, names: Sequence[str] | None = None) -> Settings:
        """Return the settings as a run on these clients has them, or refuse the first wrong one."""
        values: dict[str, Any] = {}
        for name, (kind, option) in declarations(Settings).items():
            limited = dataclasses.replace(option, high=clients) if name == "cohort" else option
            values[name] = verify(name, getattr(self, name), kind, limited)
        values["steps"] = steps_of(values["steps"], clients)
        if values["steps"] is not None and values["epochs"] is not None:
            raise check.fail("steps", values["steps"], "steps or epochs, not both")
        if values["store"] == "disk" and values["checkpoint_every"] == 0:
            allowed = "a whole number from 1, or store='memory'"
            raise check.fail("checkpoint_every", 0, allowed, "states on disk need checkpoints")
        if values["store"] == "disk" and values["out"] is None:
            allowed = "a folder out=, or 'memory' or 'auto'"
            raise check.fail("store", "disk", allowed, "states on disk need a folder")
        if values["resume"] and values["out"] is None:
            raise check.fail("resume", True, "out=, the folder of the run to continue")
        if names is not None:
            values["byzantine"] = byzantine_clients(
                values["byzantine"], values["attack"], names, values["seed"]
            )
        return Settings(**values)

    @property
    def recorded(self) -> dict[str, Any]:
        """What config.json holds of them; parts have entries of their own there."""
        fields = (*dataclasses.fields(Training), *dataclasses.fields(Machine))
        baselines = self.baselines if isinstance(self.baselines, bool) else tuple(self.baselines)
        return {**{f.name: getattr(self, f.name) for f in fields}, "baselines": baselines}

    @property
    def byzantine_clients(self) -> tuple[int, ...]:
        """The numbers of the Byzantine clients, once they are `checked`."""
        assert isinstance(self.byzantine, tuple)
        return self.byzantine

    @property
    def memory_bytes(self) -> int | None:
        """The budget for stacking clients, in bytes."""
        return None if self.memory is None else check.size("memory", self.memory)

    @property
    def folder(self) -> Path | None:
        """The run's output folder, if it has one."""
        return None if self.out is None else Path(self.out)

    def stages(self, algorithm: Algorithm) -> tuple[StagePlan, ...]:
        """Return the stages of the run with all settings filled in; a plain method is a pipeline of one."""
        parts = algorithm.stages or (StagePlan(algorithm),)
        return tuple(self._fill(part) for part in parts)

    def _fill(self, stage: StagePlan) -> StagePlan:
        once = stage.rounds is None and stage.epochs is not None  # fine-tuning: all clients, one round
        rounds = 1 if once else (stage.rounds or self.rounds or (MOST_ROUNDS if self.until else None))
        if rounds is None:
            raise check.fail("rounds", None, "a whole number from 1, or rounds for each stage")
        own_work = stage.steps is not None or stage.epochs is not None
        return dataclasses.replace(
            stage,
            rounds=rounds,
            cohort=stage.cohort if once else (stage.cohort or self.cohort),
            steps=stage.steps if own_work else steps_of(self.steps, None),
            epochs=stage.epochs if own_work else self.epochs,
            batch=stage.batch or self.batch,
            state=stage.state or ("keep" if once else self.state),
            schedule=stage.schedule or (synchronous() if once else None),
        )


@functools.cache
def declarations(kind: type) -> dict[str, tuple[Any, Option]]:
    """Return the type and the option of each field of a dataclass of settings."""
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: declared(hints[f.name]) for f in dataclasses.fields(kind)}


def as_one(stages: Sequence[StagePlan]) -> dict[str, Any]:
    """Return all stages as one: the sum of their rounds, the cohort and the work of the first."""
    first = stages[0]
    work = {"steps": first.steps, "epochs": first.epochs, "batch": first.batch}
    return {"rounds": sum(s.rounds or 0 for s in stages), "cohort": first.cohort, **work}


def as_alone(
    stages: Sequence[StagePlan],
    schedules: Sequence[Schedule],
    clients: int,
    every: int | float | None,
    validated: bool,
) -> dict[str, Any]:
    """Return `as_one` for every client alone, which needs no communication and so follows no schedule.

    Everyone takes part in every round, without delays, until training has converged, where the data are
    `validated`. Without validation samples there are as many rounds as the stages have; but no more than
    ROUNDS_ALONE, or than the rounds that a client takes part in on average, if they are more. A schedule that
    ends at a virtual time does not say how many those are. Alone there is no virtual time: evaluations
    `every` so much of it go by rounds.
    """
    uploads = [
        (stage.rounds or 0) * (getattr(schedule, "buffer", None) or stage.cohort or clients)
        for stage, schedule in zip(stages, schedules)
        if getattr(schedule, "until", None) is None
    ]
    whole, turns = as_one(stages), -(-sum(uploads) // clients)
    if validated:
        until = {"until": "converged", "keep": None, "evaluate_every": None}
        return {**whole, "rounds": max(MOST_ROUNDS, turns), "cohort": None, **until}
    rounds = min(whole["rounds"], max(ROUNDS_ALONE, turns))
    evaluations = {"evaluate_every": None if isinstance(every, float) else every}
    return {**whole, "rounds": rounds, "cohort": None, **evaluations}


def schedule_of(stage: StagePlan, schedule: Schedule | None, uploads: Sequence[Transform] = ()) -> Schedule:
    """Return the schedule of a stage: its own, the run's, or what its uploads or its method prefer."""
    order = next((t.order for t in uploads if t.order), "")
    wanted = synchronous(order=order) if order and stage.algorithm.asynchronous is None else preferred()
    chosen: Schedule = stage.schedule or schedule or wanted
    return chosen.of(stage.algorithm)


def stage_work(stage: StagePlan) -> Work:
    """Return what a client computes in a round of this stage; default: one pass over its data."""
    epochs = 1 if stage.steps is None and stage.epochs is None else stage.epochs
    return Work(steps=stage.steps, epochs=epochs, batch=stage.batch)


def steps_of(steps: Any, clients: int | None) -> int | tuple[int, ...] | None:
    """Return one number of steps, or one for each client."""
    if steps is None:
        return None
    steps = steps.tolist() if hasattr(steps, "tolist") else steps
    if isinstance(steps, str) or not hasattr(steps, "__len__"):
        return check.integer("steps", steps, low=1)
    if clients is not None and len(steps) != clients:
        raise check.fail("steps", steps, f"a whole number, or one for each of the {clients} clients")
    return tuple(check.integer("steps", s, low=0) for s in steps)


def byzantine_clients(byzantine: Any, attack: Any, names: Sequence[str], seed: Any) -> tuple[int, ...]:
    """Return the numbers of the Byzantine clients: a share of all, drawn by the seed, or those named."""
    requested = byzantine.tolist() if hasattr(byzantine, "tolist") else byzantine
    is_share = isinstance(requested, float)
    clients = _chosen("byzantine", byzantine, names, seed)
    if attack is None and clients:
        attacks = "attack=, such as partita.attack.sign_flip(), or leave byzantine= out"
        raise check.fail("byzantine", byzantine, attacks, "Byzantine clients need an attack")
    if attack is not None and not clients and is_share and requested > 0:
        raise check.fail("byzantine", byzantine, f"a share of at least one of the {len(names)} clients")
    if attack is not None and not clients:
        allowed = "a share such as 0.25, or client numbers or names"
        raise check.fail("byzantine", byzantine, allowed, "attack= needs Byzantine clients")
    if len(clients) == len(names):
        raise check.fail("byzantine", byzantine, "at least one honest client")
    return clients


def newcomers(requested: Any, names: Sequence[str], seed: Any) -> tuple[int, ...]:
    """Return the numbers of the clients that are held out: a share of all, drawn by the seed, or those named.

    Refuse a share that rounds to nobody, and to leave nobody to train.
    """
    clients = _chosen("newcomers", requested, names, seed)
    if isinstance(requested, float) and requested > 0 and not clients:
        raise check.fail("newcomers", requested, f"a share of at least one of the {len(names)} clients")
    if len(clients) == len(names):
        raise check.fail("newcomers", requested, "at least one client that trains")
    return clients


def _chosen(field: str, requested: Any, names: Sequence[str], seed: Any) -> tuple[int, ...]:
    """Return the numbers of clients: a share of all, drawn by the seed, or those that are listed."""
    requested = requested.tolist() if hasattr(requested, "tolist") else requested
    if isinstance(requested, float):
        return _share(field, requested, len(names), seed)
    return _named(field, requested, names)


def _share(field: str, share: float, clients: int, seed: Any) -> tuple[int, ...]:
    check.number(field, share, low=0.0, high=1.0)
    number = check.integer("seed", seed, low=0, high=check.LARGEST)
    chosen = draws.generator(number, field).choice(clients, round(share * clients), replace=False)
    return tuple(sorted(chosen.tolist()))


def _named(field: str, requested: Any, names: Sequence[str]) -> tuple[int, ...]:
    if isinstance(requested, str | bytes) or not isinstance(requested, Iterable):
        raise check.fail(field, requested, "a share such as 0.25, or a list of numbers or names")
    listed = list(requested)
    numbers = {name: i for i, name in enumerate(names)} if any(isinstance(c, str) for c in listed) else {}
    clients = {
        numbers[check.choice(field, client, numbers)]
        if isinstance(client, str)
        else check.integer(field, client, low=0, high=len(names) - 1)
        for client in listed
    }
    return tuple(sorted(clients))
