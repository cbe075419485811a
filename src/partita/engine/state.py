"""All that changes while a run goes on: exactly what a checkpoint holds.

Each part says by `state()` what a checkpoint has to hold of it, a tree of numbers, texts and tensors, and
takes it back by `load_state(state)`; only `encode` and `decode` know how such a tree is written.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from partita.core import check, tree
from partita.core.types import ClientState, Group, RoundContext, ServerState, Tensors
from partita.engine.asking import Questions, facts_of
from partita.engine.cautions import (
    warn_about_choice,
    warn_about_partial_work,
    warn_about_server_step,
    warn_about_time,
)
from partita.engine.convergence import Convergence
from partita.engine.counters import Counters, Timer
from partita.engine.execute.plan import client_steps, most_steps
from partita.engine.pending import PendingUploads
from partita.engine.setup import Setup
from partita.engine.stage import Choices, Stage, bind
from partita.engine.store import Clients, Store, open_store
from partita.engine.store.addresses import Addresses
from partita.schedule import Running, StageSpec


@dataclass
class State:
    """Where a run is.

    stage               the number of the stage, and `stage_start` the server's version when it began
    initial             the model's tensors when the stage began, and `new_client` a client's state
    server              the server's state
    server_is_complete  whether what the server holds was last trained as one model
    store               the clients' states
    schedule            the schedule at work: the virtual clock, and who is in flight
    pending             uploads that are computed and have not arrived
    convergence         what validation has shown in this stage, and the best state of it
    executor_choices    what executors have decided
    rounds              how many rounds each stage is to have
    ended               why a callback has ended the run before its last round ('': none has)
    norms_version       the version whose BatchNorm statistics are measured (norm="static"); not saved:
                        they are measured again, as are `device_statistics`, those of narrow devices
    """

    stage: int
    stage_start: int
    initial: Tensors
    new_client: ClientState
    server: ServerState
    store: Store
    schedule: Running
    counters: Counters
    timer: Timer
    executor_choices: Choices
    rounds: tuple[int, ...]
    server_is_complete: bool = True
    ended: str = ""
    pending: PendingUploads = field(default_factory=PendingUploads)
    convergence: Convergence = field(default_factory=Convergence)
    norms_version: int = -1
    device_statistics: Mapping[int, Tensors] = field(default_factory=dict)

    def context(self, stage: Stage, group: Group | None = None) -> RoundContext:
        """Return what draws and rates depend on: now, or when a group received its model."""
        now = self.server.version
        received = now if group is None else group.download.version
        return RoundContext(
            seed=stage.setup.settings.seed,
            round=now if group is None or group.event is None else group.event,
            stage=stage.number,
            stage_round=received - self.stage_start,
            stage_rounds=stage.plan.rounds or 0,
            work=stage.work,
            pass_batch=stage.limits.pass_batch,
        )

    def load(self, stage: Stage, clients: Clients) -> ClientState:
        """Load the states of these clients, on the run's device."""
        if not (self.new_client.personal or self.new_client.memory):
            return ClientState({}, {})
        with self.timer("states"):
            states: ClientState = tree.to(self.store.load(clients), stage.setup.settings.device)
            return states

    def save(self, clients: Sequence[int], states: ClientState) -> None:
        """Keep the new states of these clients."""
        with self.timer("states"):
            self.store.save(clients, states)

    # ---- the end of a stage

    def is_over(self, stage: Stage) -> bool:
        """Return whether the stage has had all of its rounds, has converged, or a callback has ended it."""
        return bool(self.ended) or self.has_converged(stage) or self.schedule.done(self.server)

    def has_converged(self, stage: Stage) -> bool:
        """Return whether a run that is to converge has done so in this stage."""
        settings = stage.setup.settings
        return settings.until is not None and self.convergence.has_converged(settings.patience)

    def keep_best(self) -> None:
        """Remember the state as it is now: it is the best so far."""
        self.convergence.server = self.server
        self.convergence.states = self.store.snapshot(self.server.version)

    def restore_best(self) -> None:
        """Go back to the best state, if there is a better one than this; rounds stay counted."""
        best, self.convergence.server = self.convergence.server, None
        states, self.convergence.states = self.convergence.states, None
        if best is None or states is None or best.version == self.server.version:
            return
        self.server, self.norms_version = best._replace(version=self.server.version), -1
        self.store.restore(states)

    # ---- checkpoints

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds. The store's snapshot counts once the checkpoint is `committed`."""
        return {
            "stage": self.stage,
            "stage_start": self.stage_start,
            "initial": self.initial,
            "new_client": self.new_client._asdict(),
            "server": self.server._asdict(),
            "server_is_complete": self.server_is_complete,
            "store": self.store.snapshot(self.server.version),
            "schedule": self.schedule.state(),
            "pending": self.pending.state(),
            "counters": self.counters.state(),
            "convergence": self.convergence.state(),
            "seconds": self.timer.seconds,
            "executor_choices": self.executor_choices,
            "rounds": self.rounds,
            "ended": self.ended,
        }

    def load_state(self, state: Mapping[str, Any], device: str) -> None:
        """Restore what a checkpoint holds of a run at this stage."""
        seconds, version = state["seconds"], state["server"]["version"]
        if not all(isinstance(v, int | float) for v in seconds.values()):
            raise TypeError("seconds are no numbers")
        if type(version) is not int or version < 0:
            raise TypeError("version is no whole number")
        _check_personal(state["new_client"]["personal"], self.new_client.personal)
        server = ServerState(**tree.to(state["server"], device))
        _check_server(server, self.server)
        self.server, self.server_is_complete = server, state["server_is_complete"]
        self.schedule.load_state(tree.to(state["schedule"], device))
        self.pending.load_state(state["pending"], device)
        self.counters.load_state(state["counters"])
        self.convergence.load_state(state["convergence"])
        self.convergence.server = tree.to(self.convergence.server, device)
        self.timer.seconds.update(seconds)
        self.store.restore(state["store"])
        if self.rounds == tuple(state["rounds"]):  # else it goes on
            self.ended = str(state["ended"])


def first_stage(setup: Setup, choices: Choices, notify: Callable[[str], None]) -> tuple[Stage, State]:
    """Begin a run."""
    stage = bind(setup, 0, setup.initial, choices, notify)
    counters = Counters(setup.data.clients)
    timer = Timer(setup.settings.device, setup.settings.profile)
    return stage, _begin(stage, 0, 0.0, counters, timer, choices)


def next_stage(before: Stage, state: State, notify: Callable[[str], None]) -> tuple[Stage, State]:
    """Begin the next stage with what the one before left: the server's model and the clients' own parts."""
    initial = {**state.initial, **state.server.shared}
    stage = bind(before.setup, before.number + 1, initial, state.executor_choices, notify)
    new = _begin(
        stage,
        state.server.version,
        state.schedule.time,
        state.counters,
        state.timer,
        state.executor_choices,
    )
    new.server_is_complete = state.server_is_complete
    if not stage.algorithm.stateful:  # every client begins alike, each time
        return stage, new
    if isinstance(new.store, Addresses):
        new.store.carry(state.store)
    else:
        for block in stage.blocks(state.store.touched):
            old, fresh = state.store.load(block), new.store.load(block)
            personal = {k: old.personal.get(k, v) for k, v in fresh.personal.items()}
            new.store.save(block, ClientState(personal, fresh.memory))
    return stage, new


def _begin(
    stage: Stage, start: int, time: float, counters: Counters, timer: Timer, choices: Choices
) -> State:
    folder = _states_folder(stage)
    if folder is not None:  # what a killed run may have left of this stage
        shutil.rmtree(folder, ignore_errors=True)
    state = _open(stage, start, time, counters, timer, choices)
    warn_about_time(state.schedule, state.server, stage.number)
    warn_about_server_step(stage.algorithm, stage.server_rule, state.schedule)
    warn_about_choice(stage.algorithm, state.schedule, stage.setup.data)
    warn_about_partial_work(
        state.schedule, lambda: most_steps(stage.rule, stage.setup.data, state.context(stage))
    )
    return state


def saved_stage(
    setup: Setup, saved: Mapping[str, Any], choices: Choices, notify: Callable[[str], None]
) -> Stage:
    """Bind the stage that a checkpoint was written in."""
    _check_model(saved["initial"], setup.initial)
    for name in ("stage", "stage_start"):
        if type(saved[name]) is not int or saved[name] < 0:
            raise TypeError(f"{name} is no whole number")
    choices.update(saved["executor_choices"])
    return bind(setup, saved["stage"], tree.to(saved["initial"], setup.settings.device), choices, notify)


def restored(stage: Stage, saved: Mapping[str, Any], choices: Choices) -> State:
    """Return the state that a checkpoint holds."""
    settings = stage.setup.settings
    _check_rounds(stage, saved)
    counters, timer = Counters(stage.setup.data.clients), Timer(settings.device, settings.profile)
    state = _open(stage, saved["stage_start"], 0.0, counters, timer, choices)
    state.load_state(saved, settings.device)
    return state


def _open(stage: Stage, start: int, time: float, counters: Counters, timer: Timer, choices: Choices) -> State:
    """Return the state of a stage that begins at this version of the server and this virtual time."""
    setup, plan = stage.setup, stage.plan
    settings, clients, devices = setup.settings, setup.data.clients, setup.devices
    kind = settings.store
    if kind == "auto" and settings.checkpoint_every == 0:  # on disk, states need checkpoints
        kind = "memory"
    store = open_store(
        stage.new_client,
        clients,
        kind=kind,
        folder=_states_folder(stage),
        device=stage.limits.store_device,
    )

    def received(client: int) -> int:
        return stage.bytes_down[int(devices.class_of[client])]

    spec = StageSpec(
        clients=clients,
        cohort=stage.cohort,
        first=start,
        rounds=plan.rounds or 0,
        seed=settings.seed,
        time=time,
        steps=lambda client: client_steps(stage.rule, np.array([client]), setup.data, state.context(stage)),
        received=received if stage.channel.downloads.transforms or not devices.alike else None,
        facts=lambda: facts_of(setup.data.train[:, 1], counters.clock.turns),
        ask=lambda clients, samples: questions(clients, samples),
    )
    server = stage.server_rule.init(tree.pick(stage.initial, stage.partition.shared))
    schedule = setup.schedules[stage.number]
    state = State(
        stage=stage.number,
        stage_start=start,
        initial=stage.initial,
        new_client=stage.new_client,
        server=server._replace(version=start),
        store=store,
        schedule=schedule.begin(spec) if setup.elsewhere is None else setup.elsewhere.begin(schedule, spec),
        counters=counters,
        timer=timer,
        executor_choices=choices,
        rounds=tuple(part.rounds or 0 for part in setup.plans),
    )
    questions = Questions(stage, state)
    if setup.elsewhere is not None:
        setup.elsewhere.enter(stage, state)
    return state


def _states_folder(stage: Stage) -> Path | None:
    folder = stage.setup.settings.folder
    return None if folder is None else folder / "checkpoint" / f"clients-{stage.number}"


# ---- what does not fit is refused


def _check_model(saved: Tensors, initial: Tensors) -> None:
    wrong = [k for k in initial if k not in saved or not _alike(saved[k], initial[k])]
    if wrong or len(saved) != len(initial):
        raise _another("model", wrong)


def _check_personal(saved: Tensors, personal: Tensors) -> None:
    different = sorted(set(saved) ^ set(personal))
    if different:
        raise _another("personal part", different)


def _check_server(saved: ServerState, new: ServerState) -> None:
    """Refuse a server whose tensors have other names or shapes than those that it begins with."""
    for part in ("shared", "opt", "extra"):
        theirs, ours = getattr(saved, part), getattr(new, part)
        wrong = [k for k in {**theirs, **ours} if k not in theirs or k not in ours]
        wrong += [k for k in theirs if k in ours and not _alike(theirs[k], ours[k])]
        if wrong:
            raise _another(f"server state {part!r}", wrong)


def _check_rounds(stage: Stage, saved: Mapping[str, Any]) -> None:
    """Refuse another number of rounds where the rounds so far would not be those of one long run.

    They are the same if no stage before this one changes its length, and if the rates of the rounds so far do
    not depend on the rounds to come.
    """
    before, now = list(saved["rounds"]), [plan.rounds or 0 for plan in stage.setup.plans]
    number, done = stage.number, saved["server"]["version"] - saved["stage_start"]
    if before == now:
        return
    other = "the rounds that the run had, or another folder out="
    seen, settings = saved["convergence"], stage.setup.settings
    went_back = seen["server"] is None and seen["round"] not in (-1, saved["server"]["version"])
    if went_back and settings.keep != "last" and (settings.until is not None or settings.keep == "best"):
        reason = "the run ended with its best round, from which a longer run would not have gone on"
        raise check.fail("rounds", now, other, reason)
    if before[:number] != now[:number] or len(before) != len(now):
        reason = f"stage {number + 1} has begun from what stages of {before[:number]} rounds left"
        raise check.fail("rounds", now, other, reason)
    if now[number] < done:
        raise check.fail("rounds", now[number], f"at least {done}, as many as the run has taken")
    for phase in stage.rule.phases:
        for rate in phase.lr:
            if any(rate(t, before[number]) != rate(t, now[number]) for t in range(done)):
                reason = (
                    f"the step size depends on the number of rounds, so the first {done} of {now[number]} "
                    f"rounds would be others than those that were taken as rounds of {before[number]}"
                )
                raise check.fail("rounds", now[number], other, reason)


def _another(part: str, names: Sequence[str]) -> check.Refused:
    """Return the error of a checkpoint that differs from the run in these tensors."""
    reason = f"the checkpoint holds another {part} (it differs in {', '.join(names[:3])})"
    return check.fail("resume", True, "the run that was saved, or another folder out=", reason)


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


# ---- how a tree of numbers and tensors is written

TENSOR = "__tensor__"


def encode(state: Any) -> tuple[Tensors, Any]:
    """Split a tree into its tensors, by paths such as 'server/shared/fc.weight', and the rest as JSON."""
    tensors: Tensors = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            tensors[path] = value
            return {TENSOR: path}
        if isinstance(value, Mapping):
            return {k: walk(v, f"{path}/{k}" if path else str(k)) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [walk(v, f"{path}/{i}") for i, v in enumerate(value)]
        return value

    return tensors, walk(state, "")


def decode(tensors: Tensors, rest: Any) -> Any:
    """Return the tree that `encode` split."""
    if isinstance(rest, dict):
        if rest.keys() == {TENSOR}:
            return tensors[rest[TENSOR]]
        return {k: decode(tensors, v) for k, v in rest.items()}
    return [decode(tensors, v) for v in rest] if isinstance(rest, list) else rest


# ---- who holds what


class Holdings(NamedTuple):
    """Who holds what at the end of a run.

    own        names of the personal part
    keeps      whether clients keep theirs; else it is made when it is asked for
    computed   whether a client's model is more than the server's with the client's part in place
    untrained  names that the server has not trained together with the rest of its model
    no_mean    why the clients' parts cannot be averaged ('': they can)
    forgotten  whether clients train a part and forget it, so that theirs is the one that all start with
    """

    own: Sequence[str]
    keeps: bool
    computed: bool
    untrained: Sequence[str]
    no_mean: str
    forgotten: bool = False

    @classmethod
    def of(cls, stage: Stage, state: State) -> Holdings:
        """Return the holdings of a run as it stands."""
        computed, untrained = stage.computes_models, _untrained(stage, state)
        forgotten = stage.algorithm.stateful and stage.plan.state == "reset"
        return cls(stage.partition.personal, stage.keeps_state, computed, untrained, stage.no_mean, forgotten)


def has_global(stage: Stage, state: State) -> bool:
    """Whether the server alone holds a whole model now."""
    return state.server_is_complete and stage.is_global


def _untrained(stage: Stage, state: State) -> tuple[str, ...]:
    """Return what the server has not trained together with the rest: it was a client's own part."""
    if has_global(stage, state):
        return ()
    setup = stage.setup
    for plan in reversed(setup.plans[: stage.number + 1]):  # the last that trained only a part of it
        shared = set(setup.partition_of(plan.algorithm).shared)
        if missing := tuple(n for n in setup.names if n not in shared):
            return missing
    return ()
