"""What a user asks of a run, checked before any work, and written down so that it can be run again."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch

from partita.core import check, draws
from partita.core.device import PRECISIONS
from partita.core.metrics import Function
from partita.core.options import Option, declared, verify
from partita.core.parts import (
    Algorithm,
    Attack,
    Capacity,
    Measure,
    StagePlan,
)
from partita.core.types import Work
from partita.engine.callbacks import Callback
from partita.engine.execute import EXECUTORS, Runner, Task
from partita.engine.record import Record
from partita.engine.store import Store
from partita.schedule import Schedule, preferred, synchronous

STATES, NORMS = ("keep", "reset"), ("global", "static", "personal")
STORES = ("auto", "memory", "disk")

ENOUGH = 200
"""Rounds in which a client alone comes close to where it ends: with a few steps in each and usual rates,
after 25 to 200 on the digits and on spoken digits, after 25 on heart disease (more overfit)."""


def _later(field: str, value: Any) -> Any:  # noqa: ARG001
    """What can only be checked beside the data or the model."""
    return value


def _out(field: str, value: Any) -> Path | None:
    return None if value is None else check.path(field, value)


def _every(field: str, every: Any) -> int | float:
    """Rounds between evaluations, or virtual time if it is no whole number."""
    if isinstance(every, float):
        return check.number(field, every, low=0, open_low=True)
    try:
        return check.integer(field, every, low=1)
    except check.Refused as error:
        raise check.fail(field, every, f"{error.allowed}, or virtual time such as 2.5") from None


def _baselines(field: str, baselines: Any) -> bool | Mapping[str, Record]:
    """Whether to train them, or runs that are there already."""
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
        raise check.fail(field, device, "'auto', 'cpu' or 'cuda'") from None
    if chosen.type not in ("cpu", "cuda"):
        raise check.fail(field, device, "'auto', 'cpu' or 'cuda'")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise check.fail(field, device, "'auto' or 'cpu': this machine has no CUDA device")
    return str(chosen)


def _executor(field: str, executor: Any) -> str | Callable[[Task], Runner]:
    """A name, or a function that makes one; those of the registry have names."""
    named = next((name for name, factory in EXECUTORS.items() if factory is executor), None)
    if named is not None:
        return named
    if callable(executor):
        return check.takes(field, executor, 1, "a function of a Task that returns an executor")  # type: ignore[no-any-return]
    return check.choice(field, executor, EXECUTORS)  # type: ignore[no-any-return]


def _store(field: str, store: Any) -> str | Callable[..., Store]:
    if callable(store):
        allowed = "a function of (state of a new client, clients, folder, device) that returns a store"
        return check.takes(field, store, 4, allowed)  # type: ignore[no-any-return]
    return check.choice(field, store, STORES)  # type: ignore[no-any-return]


def _measures(field: str, measures: Any) -> Sequence[Measure]:
    """What to follow, each once."""
    some = measures if isinstance(measures, Sequence) and not isinstance(measures, Measure) else [None]
    if not all(isinstance(m, Measure) for m in some):
        raise check.fail(field, measures, "a list such as [partita.measures.gradient_norm()]")
    names = [m.name for m in some if isinstance(m, Measure)]
    if len(set(names)) < len(names):
        raise check.fail(field, names, "each measure once")
    return tuple(some)


def _callbacks(field: str, callbacks: Any) -> Sequence[Callback]:
    some = callbacks if isinstance(callbacks, Sequence) else [None]
    if not all(isinstance(c, Callback) for c in some):
        raise check.fail(field, callbacks, "a list of partita.callbacks.Callback")
    return tuple(some)


BOOLEAN = "True or False"


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is computed: the numbers and words among the arguments of `federate`."""

    rounds: Annotated[int | None, Option("server steps; a pipeline's stages may bring their own", low=1)] = (
        None
    )
    cohort: Annotated[int | None, Option("clients per round (None: everyone)", low=1)] = None
    steps: Annotated[
        int | Sequence[int] | None,
        Option("local minibatch steps per round: one number, or one per client (None: epochs)", check=_later),
    ] = None
    epochs: Annotated[
        int | None,
        Option("local passes over a client's data per round (None: one, unless steps are given)", low=1),
    ] = None
    batch: Annotated[int | None, Option("samples of a local step (None: all that the client has)", low=1)] = (
        None
    )
    seed: Annotated[int, Option("everything random depends on it", low=0, high=check.LARGEST)] = 0
    state: Annotated[
        str,
        Option(
            "'keep': clients keep their personal part between rounds; 'reset': they start anew each time",
            choices=STATES,
        ),
    ] = "keep"
    norm: Annotated[
        str | None,
        Option(
            "statistics of normalization layers: 'global' (averaged), 'static' (none while training, "
            "measured before each evaluation) or 'personal' (FedBN)",
            choices=NORMS,
        ),
    ] = None
    byzantine: Annotated[
        float | Sequence[int | str],
        Option(
            "who follows the attack: a share of the clients, or their numbers or names; they are marked in "
            "clients.csv, and all scores are of the honest ones",
            check=_later,
        ),
    ] = ()
    evaluate_every: Annotated[
        int | float | None,
        Option(
            "rounds between evaluations (None: about ten in all; 2.5, not whole: virtual time between them)",
            low=1,
            allowed="virtual time such as 2.5",
            check=_every,
        ),
    ] = None
    checkpoint_every: Annotated[
        int | None,
        Option(
            "rounds between checkpoints (None: by time; 0: none, so that the run can be neither resumed nor "
            "loaded with its models)",
            low=0,
        ),
    ] = None
    baselines: Annotated[
        bool | Mapping[str, Record],
        Option(
            "also train what `Run.summary` compares with, with the method's `lr` and steps: for methods "
            "without a global model, fedavg, in as many rounds under the same schedule; and every client "
            "alone, which needs no schedule: all clients in each of as many rounds (of more than 200, in "
            "200, or as often as a client of the run has its turn). Of a large population that is the "
            "dearest part of a run, in time and in the models that are kept: with False there is none; or "
            "runs that are there already: {'local': run, 'global': run}",
            check=_baselines,
        ),
    ] = True
    train_scores: Annotated[
        bool,
        Option(
            "at the end score every client on its training samples too (in clients.csv and the report)",
            allowed=BOOLEAN,
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is composed of beside its model, its data and its method."""

    loss: Annotated[
        str | Function | None,
        Option(
            "'cross_entropy', 'binary_cross_entropy', 'mse' or a function of (output, target) that returns "
            "the mean over a batch (None: what fits the targets)",
            check=_later,
        ),
    ] = None
    metric: Annotated[
        str | Function | None,
        Option(
            "'accuracy', 'mse', 'mae', 'loss' (None: accuracy, or the loss for numbers), or "
            "`partita.Metric(function, higher_is_better=True)` with a function of (output, target) that "
            "returns a mean over samples; a function alone, if its attribute `higher_is_better` says which "
            "way is better. What is no mean over samples, such as F1 or AUC, is refused",
            check=_later,
        ),
    ] = None
    schedule: Annotated[
        Schedule | None,
        Option(
            "who reports when: `partita.schedule.asynchronous(concurrency=10, delays=...)`; None: a random "
            "cohort each round, `partita.schedule.synchronous()`, or what the method wants",
            check=check.schedule,
        ),
    ] = None
    attack: Annotated[
        Attack | None,
        Option(
            "what Byzantine clients do: `partita.attack.sign_flip()` and the like",
            allowed="an attack such as partita.attack.sign_flip()",
        ),
    ] = None
    capacity: Annotated[
        Capacity | None,
        Option(
            "what devices can hold: `partita.capacity.depth({'strong': 0, 'weak': 2})` and the like",
            allowed="partita.capacity.depth(...), width(...) or fjord(...)",
        ),
    ] = None
    measures: Annotated[
        Sequence[Measure],
        Option(
            "what else to follow at each evaluation: `partita.measures.gradient_norm()` and the like",
            check=_measures,
        ),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What computes, and where states are kept."""

    executor: Annotated[
        str | Callable[[Task], Runner],
        Option(
            "'auto' (measures and picks), 'graph' (a stacked step is recorded once and replayed), "
            "'compiled' (and compiled, however long that takes), 'vmap' (clients stacked), 'pool' (one "
            "client on each core), 'loop' (one after another); or a function of a `partita.Task` that "
            "returns an executor",
            check=_executor,
        ),
    ] = "auto"
    device: Annotated[str, Option("'auto', 'cpu' or 'cuda'", check=_device)] = "auto"
    memory: Annotated[
        int | str | None,
        Option(
            "budget for stacking clients, such as '8GiB' (None: a quarter of the device's memory)",
            check=check.size,
        ),
    ] = None
    precision: Annotated[
        str,
        Option(
            "products of matrices and convolutions on a GPU: 'tf32', 'fp32' (exact, slower), or 'bf16' "
            "(training in half the memory; weights and updates stay float32, and so do evaluations)",
            choices=PRECISIONS,
        ),
    ] = "tf32"
    deterministic: Annotated[
        bool,
        Option("only operations that give the same bits in every run on the same GPU", allowed=BOOLEAN),
    ] = False
    profile: Annotated[
        bool,
        Option(
            "wait for the GPU between the parts of a round, so that the times in `summary()['phases']` are "
            "exact, and write a trace of some rounds to `out`",
            allowed=BOOLEAN,
        ),
    ] = False
    store: Annotated[
        str | Callable[..., Store],
        Option(
            "clients' states in 'memory', on 'disk' (needs `out`), or 'auto' by their size; or a function of "
            "(state of a new client, clients, folder, device) that returns a store",
            check=_store,
        ),
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How to run, and not what: nothing of it changes a result."""

    out: Annotated[
        str | Path | None,
        Option(
            "a new or empty folder, for config.json, metrics.jsonl, clients.csv, summary.json, report.html "
            "and checkpoints",
            check=_out,
        ),
    ] = None
    report: Annotated[
        bool, Option("also write report.html into `out` (5 MB; later: `partita report OUT`)", allowed=BOOLEAN)
    ] = True
    resume: Annotated[
        bool,
        Option(
            "go on with the run in `out`, on as many threads; the result has the same bits as without "
            "interruption",
            allowed=BOOLEAN,
        ),
    ] = False
    max_time: Annotated[
        float | str | None,
        Option(
            "seconds, or such as '90min' or '2h': after the round in which they are over, baselines "
            "included, write a checkpoint into `out` and raise `partita.Stopped`; `resume` goes on",
            check=_later,
        ),
    ] = None
    callbacks: Annotated[Sequence[Callback], Option("see `partita.callbacks`", check=_callbacks)] = ()
    progress: Annotated[
        bool | None,
        Option("show a progress bar (None: when the standard error stream is a terminal)", allowed=BOOLEAN),
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
        found: dict[str, Any] = {}
        for name, (kind, option) in declarations(Settings).items():
            known = dataclasses.replace(option, high=clients) if name == "cohort" else option
            found[name] = verify(name, getattr(self, name), kind, known)
        found["steps"] = steps_of(found["steps"], clients)
        if found["steps"] is not None and found["epochs"] is not None:
            raise check.fail("steps", found["steps"], "steps or epochs, not both")
        if found["checkpoint_every"] == 0 and found["store"] == "disk":
            raise check.fail(
                "checkpoint_every", 0, "from 1 with store='disk': states on disk need checkpoints"
            )
        if found["store"] == "disk" and found["out"] is None:
            raise check.fail("store", "disk", "'memory' or 'auto', or a folder out= for the clients' states")
        if found["resume"] and found["out"] is None:
            raise check.fail("resume", True, "out=, the folder of the run")
        if names is not None:
            found["byzantine"] = byzantine_clients(found["byzantine"], found["attack"], names, found["seed"])
        return Settings(**found)

    @property
    def recorded(self) -> dict[str, Any]:
        """What config.json holds of them; parts have entries of their own there."""
        fields = dataclasses.fields(Training), dataclasses.fields(Machine)
        found = {f.name: getattr(self, f.name) for some in fields for f in some}
        given = self.baselines
        return {**found, "baselines": given if isinstance(given, bool) else tuple(given)}

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
        """The stages of the run with nothing left open: a plain method is a pipeline of one."""
        parts = algorithm.stages or (StagePlan(algorithm),)
        return tuple(self._fill(part) for part in parts)

    def _fill(self, stage: StagePlan) -> StagePlan:
        once = stage.rounds is None and stage.epochs is not None  # fine-tuning: all clients, one round
        rounds = 1 if once else (stage.rounds or self.rounds)
        if rounds is None:
            raise check.fail("rounds", None, "a whole number from 1 (or each stage's own)")
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
    """All stages as one: their rounds together, the cohort and the work of the first."""
    first = stages[0]
    work = {"steps": first.steps, "epochs": first.epochs, "batch": first.batch}
    return {"rounds": sum(s.rounds or 0 for s in stages), "cohort": first.cohort, **work}


def as_alone(
    stages: Sequence[StagePlan], schedules: Sequence[Schedule], clients: int, every: int | float | None
) -> dict[str, Any]:
    """The same for every client alone, which costs no communication: its amount does not follow the schedule.

    Everyone takes part in every round, without delays, as many rounds as the stages have; but no more than
    ENOUGH, or than a client of the stages has turns on average, if that is more. Virtual time says nothing
    there: evaluations after `every` so much of it go by rounds, and under `until` nobody knows the turns.
    """
    uploads = [
        (stage.rounds or 0) * (getattr(schedule, "buffer", None) or stage.cohort or clients)
        for stage, schedule in zip(stages, schedules)
        if getattr(schedule, "until", None) is None
    ]
    whole = as_one(stages)
    rounds = min(whole["rounds"], max(ENOUGH, -(-sum(uploads) // clients)))
    evaluations = {"evaluate_every": None if isinstance(every, float) else every}
    return {**whole, "rounds": rounds, "cohort": None, **evaluations}


def schedule_of(stage: StagePlan, schedule: Schedule | None) -> Schedule:
    """What a stage runs under: its own schedule, the run's, or what its method wants."""
    chosen: Schedule = stage.schedule or schedule or preferred()
    return chosen.of(stage.algorithm)


def stage_work(stage: StagePlan) -> Work:
    """What a client computes in a round of this stage; one pass over its data unless the user says more."""
    epochs = 1 if stage.steps is None and stage.epochs is None else stage.epochs
    return Work(steps=stage.steps, epochs=epochs, batch=stage.batch)


def steps_of(steps: Any, clients: int | None) -> int | tuple[int, ...] | None:
    """One number of steps, or one for each client."""
    if steps is None:
        return None
    steps = steps.tolist() if hasattr(steps, "tolist") else steps
    if isinstance(steps, str) or not hasattr(steps, "__len__"):
        return check.integer("steps", steps, low=1)
    if clients is not None and len(steps) != clients:
        raise check.fail("steps", steps, f"a whole number, or one for each of the {clients} clients")
    return tuple(check.integer("steps", s, low=0) for s in steps)


def byzantine_clients(byzantine: Any, attack: Any, names: Sequence[str], seed: Any) -> tuple[int, ...]:
    """The numbers of the dishonest clients: a share of all, drawn by the seed, or those that are named."""
    given = byzantine.tolist() if hasattr(byzantine, "tolist") else byzantine
    found = _share(given, len(names), seed) if isinstance(given, float) else _named(given, names)
    if attack is None and found:
        attacks = "attack=, such as partita.attack.sign_flip(), or leave byzantine= out"
        raise check.fail("byzantine", byzantine, attacks, "Byzantine clients need an attack")
    if attack is not None and not found and isinstance(given, float) and given > 0:
        raise check.fail("byzantine", byzantine, f"a share of at least one of the {len(names)} clients")
    if attack is not None and not found:
        clients = "a share such as 0.25, or client numbers or names"
        raise check.fail("byzantine", byzantine, clients, "attack= needs Byzantine clients")
    if len(found) == len(names):
        raise check.fail("byzantine", byzantine, "at least one honest client")
    return found


def _share(share: float, clients: int, seed: Any) -> tuple[int, ...]:
    check.number("byzantine", share, low=0.0, high=1.0)
    number = check.integer("seed", seed, low=0, high=2**63 - 1)
    chosen = draws.generator(number, "byzantine").choice(clients, round(share * clients), replace=False)
    return tuple(sorted(chosen.tolist()))


def _named(byzantine: Any, names: Sequence[str]) -> tuple[int, ...]:
    if isinstance(byzantine, str | bytes) or not isinstance(byzantine, Iterable):
        raise check.fail("byzantine", byzantine, "a share such as 0.25, or a list of numbers or names")
    given = list(byzantine)
    named = any(isinstance(who, str) for who in given)
    places = {name: i for i, name in enumerate(names)} if named else {}
    found = {
        places[check.choice("byzantine", who, places)]
        if isinstance(who, str)
        else check.integer("byzantine", who, low=0, high=len(names) - 1)
        for who in given
    }
    return tuple(sorted(found))
