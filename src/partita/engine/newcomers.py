"""Clients that come after training. Each finds its model by the method's own rule; the server's stays.

    state of a new client   as the method starts one from the server's model of now
    `rounds` turns          the method's rule with the server's model fixed (`Algorithm.newcomer`)
    its model               as the method evaluates a client with (`Algorithm.personalize`)

The step sizes of the turns are those of the stage from its first round to its last one. Draws are those of
the rounds after training, so that they are no client's of training.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from partita.core import check, inputs, tree
from partita.core.types import RoundContext, Upload, Work
from partita.data import FederatedData, columns
from partita.data.scale import other_scale
from partita.engine.counters import Counters
from partita.engine.devices.devices import Devices
from partita.engine.evaluate import group_of, mean_score, refresh_statistics, scores
from partita.engine.model.fit import check_labels
from partita.engine.model.padding import for_metrics
from partita.engine.model.probe import evaluated
from partita.engine.record import MODELS, Summary, score_text
from partita.engine.setup import Setup
from partita.engine.stage import Stage, evaluations
from partita.engine.state import State, has_global
from partita.engine.store import open_store
from partita.engine.table import Column, Table


class Effort(NamedTuple):
    """How much a newcomer computes: so many turns of this work, and the seed of its draws."""

    rounds: int
    work: Work
    seed: int


class Arrival(NamedTuple):
    """Clients that have come after training, as the stage and the state of a run.

    trained   for each, whether it has solved for a part of its own
    diverged  those whose steps became infinite: they keep what they had before
    """

    stage: Stage
    state: State
    effort: Effort
    trained: np.ndarray
    diverged: tuple[int, ...]


def turns(state: State) -> int:
    """Return how many turns a client had in this stage on average, at least one."""
    reports, version = state.counters.clock.turns.reports, state.server.version
    share = (version - state.stage_start) / version if version else 0.0
    return max(1, round(float(reports.mean()) * share))


def usual_effort(stage: Stage, state: State) -> Effort:
    """Return as many turns as a client of the run had, of the same work.

    Where each client had steps of its own, the work is their mean.
    """
    work = stage.work
    if isinstance(work.steps, tuple):
        work = replace(work, steps=max(1, round(sum(work.steps) / len(work.steps))))
    return Effort(turns(state), work, stage.setup.settings.seed)


def among(stage: Stage, state: State, data: FederatedData) -> tuple[Stage, State]:
    """Return the server's model among the clients of other data, none of whom was ever seen.

    They are honest, and their devices hold the whole model.
    """
    setup = stage.setup
    data = fitted(setup, data)
    refresh_statistics(stage, state)  # those of the clients of training
    data, kept = for_metrics(setup.model, data.to(setup.settings.device), setup.profile)
    profile = setup.profile._replace(kept=kept)
    executor = stage.whole.on(data)  # in this process: workers have the samples of training
    settings = replace(setup.settings, attack=None, byzantine=(), capacity=None)
    devices = Devices.of(None, setup.model, setup.names, data, settings.seed)
    new_client = setup.new_client(stage.algorithm, {**state.initial, **state.server.shared})
    scoring = evaluations(stage.personalize, kept, data, stage.limits.pass_batch)
    store = open_store(new_client, data.clients, kind="memory", device=stage.limits.store_device)
    return (
        replace(
            stage,
            setup=replace(
                setup,
                data=data,
                clean_data=data,
                profile=profile,
                settings=settings,
                devices=devices,
                elsewhere=None,
            ),
            executor=executor,
            spread=None,
            new_client=new_client,
            programs={**stage.programs, **{program.name: program for program in scoring}},
        ),
        replace(state, store=store, new_client=new_client, counters=Counters(data.clients)),
    )


def arrive(stage: Stage, state: State, data: FederatedData, effort: Effort) -> Arrival:
    """Let clients come that were not there in training, and each find its personal part."""
    rounds_of_stage = state.server.version - state.stage_start
    stage, state = among(stage, state, data)
    number, plan, diverged = data.clients, stage.plan, set[int]()
    if not stage.algorithm.stateful or not stage.partition.personal:
        return Arrival(stage, state, effort._replace(rounds=0), np.ones(number, dtype=bool), ())
    able = np.flatnonzero(data.train[:, 1] > 0)
    for turn in range(effort.rounds):
        context = RoundContext(
            seed=effort.seed,
            round=state.server.version + turn,
            stage=stage.number,
            stage_round=turn * rounds_of_stage // effort.rounds,
            stage_rounds=plan.rounds or 0,
            work=effort.work,
            pass_batch=stage.limits.pass_batch,
        )
        for clients in stage.blocks(able):
            states, group = state.load(stage, clients), group_of(state, len(clients))
            _, new = stage.executor(stage.programs["newcomer"], clients, group, states, context)
            faults = tree.examined(Upload({}), new, len(clients))
            sound = [i for i, fault in enumerate(faults) if not fault]
            diverged |= {int(clients[i]) for i, fault in enumerate(faults) if fault}
            state.save(clients[sound].tolist(), new if len(sound) == len(clients) else tree.rows(new, sound))
    if diverged:
        names = ", ".join(data.names[i] for i in sorted(diverged)[:3])
        check.warn(
            f"{len(diverged)} of {number} new clients diverged ({names}) and keep what they had before; use "
            "a smaller step size or fewer steps"
        )
    trained = np.zeros(number, dtype=bool)
    trained[state.store.touched] = True
    return Arrival(stage, state, effort, trained, tuple(sorted(diverged)))


def returned(stage: Stage, state: State, data: FederatedData) -> tuple[Stage, State, np.ndarray]:
    """Return the clients of training with other samples: those of the same names keep their own parts.

    The last value says for each client of `data` whether it is one of them.
    """
    names = {name: i for i, name in enumerate(stage.setup.data.names)}
    numbers = np.array([names.get(name, -1) for name in data.names], dtype=np.int64)
    known = numbers >= 0
    other, new = among(stage, state, data)
    if stage.keeps_state:
        for places in other.blocks(np.flatnonzero(known)):
            states = state.load(stage, numbers[places])
            memory = tree.pick(states.memory, new.new_client.memory)  # they send nothing that could be lost
            new.save(places.tolist(), states._replace(memory=memory))
    return other, new, known


def fitted(setup: Setup, data: FederatedData) -> FederatedData:
    """Return samples in the precision of training; refuse another form, and labels that nobody had."""
    if not isinstance(data, FederatedData):
        raise check.fail("data", data, "a FederatedData, made by partita.data.from_arrays(...) or the like")
    ours = setup.data
    data = _same_labels(ours, data)
    if hint := other_scale(ours, data):
        check.warn(hint)
    x, y = columns.alike(data.x, ours.x), inputs.alike(data.y, ours.y)
    forms = [("x", columns.described(x), columns.described(ours.x))]
    if setup.clean_data.lengths is None:  # labels of positions may be as many as they like
        forms.append(("y", inputs.sample_form(y), inputs.sample_form(ours.y)))
    for name, given, form in forms:
        if given != form:
            raise check.fail(f"data: a sample of {name}", given, f"{form}, as in training")
    data = replace(data, x=x, y=inputs.single(y, "targets")).masked_for(setup.model)
    profile = setup.profile
    output = evaluated(setup.model, ours.fixed(), profile.forward, profile.trial)
    check_labels(profile.loss, output, data)
    return data


def _same_labels(ours: FederatedData, data: FederatedData) -> FederatedData:
    """Return the same samples, with labels that were given as words numbered as in training."""
    known, theirs = (_class_names(some) for some in (ours, data))
    if known == theirs:
        return data
    if not theirs:
        numbers = ", ".join(f"{i} {name}" for i, name in enumerate(known[:5]))
        check.warn(
            "labels of training were words, those of these data are numbers; they are taken as "
            f"{numbers}{', ...' if len(known) > 5 else ''}: give words to be sure"
        )
        return data
    used = [theirs[i] for i in torch.unique(data.y).tolist()]
    if not known or not set(used) <= set(known):
        words = ", ".join(map(repr, known[:20])) + (", ..." if len(known) > 20 else "")
        allowed = f"those of training: {words}" if known else "numbers, as in training"
        raise check.fail("data: classes", [name for name in used if name not in known], allowed)
    places = torch.tensor([known.index(name) if name in known else -1 for name in theirs])
    return replace(data, y=places.to(data.y.device)[data.y], source={**data.source, "classes": list(known)})


def _class_names(data: FederatedData) -> list[str]:
    """Return the words that became 0, 1, ...; none where labels were numbers."""
    names = data.source.get("classes")
    return list(names) if isinstance(names, list | tuple) else []


# ---- figures


class ArrivalSummary(Summary):
    """What is known of clients that came after training; printed, it is a table for people."""

    def __str__(self) -> str:
        test, metric = self["test"], self["metric"]
        work = f", {self['rounds']} turns each" if self["rounds"] else ""
        lines = [f"{self['algorithm']}: {self['clients']} clients that came after training{work}"]
        names = {"local": "each alone", "global": "one global model", "personal": "personal models"}
        lines += [f"  {names[k]:18} {metric} {score_text(test[k])}" for k in MODELS if test[k] is not None]
        for key, other in (("vs_global", "the global model"), ("vs_local", "training alone")):
            if self["hurt"].get(key) is not None:
                lines.append(f"  {self['hurt'][key]} of {self['scored']} do worse than with {other}")
        if self["untrained"]:
            lines.append(f"  {len(self['untrained'])} without training samples have the model to start with")
        if self["diverged"]:
            lines.append(f"  diverged: {', '.join(self['diverged'][:5])}")
        return "\n".join(lines)


def arrival_table(arrival: Arrival, **others: np.ndarray | None) -> Table:
    """Return a row for each client that came: its samples and its scores; `others` are further scores."""
    stage, state = arrival.stage, arrival.state
    data = stage.setup.data
    everyone = scores(stage, state, "global") if has_global(stage, state) else others.get("global")
    own = scores(stage, state, "personal") if stage.has_personal else everyone
    columns: dict[str, Column] = {
        "client": data.names,
        "n_train": data.train[:, 1],
        "n_test": data.test[:, 1],
        "byzantine": np.zeros(data.clients, dtype=np.int8),
        "newcomer": np.ones(data.clients, dtype=np.int8),
        "local": own if stage.setup.alone else others.get("local"),
        "global": everyone,
        "personal": own,
    }
    return Table(data.clients, columns)


def arrival_summary(arrival: Arrival, table: Table) -> ArrivalSummary:
    """Return the means over the clients that came; `hurt` is counted by their record."""
    setup, metric = arrival.stage.setup, arrival.stage.setup.profile.metric
    weight = setup.data.test[:, 1]
    untrained = np.flatnonzero(~arrival.trained).tolist()
    return ArrivalSummary(
        algorithm=setup.algorithm.name,
        seed=arrival.effort.seed,
        rounds=arrival.effort.rounds,
        clients=setup.data.clients,
        scored=int((weight > 0).sum()),
        metric=metric.name,
        higher_is_better=metric.higher_is_better,
        test={kind: mean_score(table.numbers(kind), weight) for kind in MODELS},
        hurt={},
        untrained=[setup.data.names[i] for i in untrained],
        diverged=[setup.data.names[i] for i in arrival.diverged],
    )
