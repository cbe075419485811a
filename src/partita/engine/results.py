"""From a finished run to its figures: every client's scores, who was hurt, what it cost."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from partita.capacity.client_memory import client_memory
from partita.core import tree
from partita.core.types import Tensors
from partita.data import FederatedData
from partita.engine.evaluate import mean_score, scores
from partita.engine.monitor import Monitor
from partita.engine.newcomers import arrival_table, arrive, usual_effort
from partita.engine.record import MODELS, Record, Summary
from partita.engine.setup import Setup
from partita.engine.stage import Stage
from partita.engine.state import State, has_global
from partita.engine.table import Column, Table

Scores = dict[str, np.ndarray | None]
LABELS = 1 << 16
"""Labels that are counted at once."""


def figures(stage: Stage, state: State, monitor: Monitor, references: Mapping[str, Record]) -> Record:
    """Return everything about a finished run that can be written down as numbers."""
    scores = _scores(stage, state, monitor, references)
    rows = _client_rows(stage, state, scores)
    summary = _summary(stage, state, scores)
    others = {kind: other.facts.get("diverged") for kind, other in references.items()}
    summary["diverged"] = monitor.divergence(state, _finite(state.server.shared), others)
    summary["classes"] = _classes(stage, rows, scores)
    config, newcomers = monitor.config(state.executor_choices), _newcomers(stage, state, references)
    record = Record(state.counters.rows, rows, config, summary, newcomers=newcomers)
    summary["hurt"] = _hurt(record)
    summary["newcomers"] = None
    if stage.setup.newcomers is not None:
        came = Record([], newcomers, config, summary)
        weight = newcomers.numbers("n_test")
        summary["newcomers"] = {
            "clients": len(newcomers),
            "scored": int((weight > 0).sum()),
            "test": {kind: mean_score(newcomers.numbers(kind), weight) for kind in MODELS},
            "hurt": _hurt(came),
        }
    return record


def _hurt(record: Record) -> dict[str, int | None]:
    return {f"vs_{kind}": record.hurt(kind) for kind in ("global", "local")}


def _newcomers(stage: Stage, state: State, references: Mapping[str, Record]) -> Table:
    """Let the clients come that were held out, and return a row for each."""
    data = stage.setup.newcomers
    if data is None:
        return Table(0, {})
    others = {
        kind: references[kind].newcomers.numbers(model)
        for kind, model in (("local", "personal"), ("global", "global"))
        if kind in references and len(references[kind].newcomers) == data.clients
    }
    return arrival_table(arrive(stage, state, data, usual_effort(stage, state)), **others)


def _scores(stage: Stage, state: State, monitor: Monitor, references: Mapping[str, Record]) -> Scores:
    """Return every client's score alone, under the global and its personal model, as far as they exist."""
    everyone, personal = state.counters.global_scores, monitor.personal_scores
    if everyone is None and has_global(stage, state):  # resumed after its last evaluation
        everyone = scores(stage, state, "global")
    if personal is None:
        personal = scores(stage, state, "personal") if stage.has_personal else everyone
    if everyone is None and "global" in references:
        everyone = references["global"].scores("global")
    alone = references["local"].scores("local") if "local" in references else None
    if alone is None and stage.setup.alone:
        alone = np.full(stage.setup.data.clients, np.nan)
        if personal is not None:  # a client that had no turn has no model of its own
            touched = state.store.touched
            alone[touched] = personal[touched]
    on_train = _train_scores(stage, state, references)
    return {"local": alone, "global": everyone, "personal": personal, **on_train}


def _train_scores(stage: Stage, state: State, references: Mapping[str, Record]) -> Scores:
    """Return the scores on training samples, when asked for; of the same global model."""
    if not stage.setup.settings.train_scores:
        return {}
    everyone = state.counters.global_train_scores
    if state.counters.global_scores is None and "global" in references:
        everyone = references["global"].scores("global", "train")
    personal = scores(stage, state, "personal", "train") if stage.has_personal else everyone
    return {"global_train": everyone, "personal_train": personal}


def _client_rows(stage: Stage, state: State, scores: Scores) -> Table:
    data = stage.setup.data
    columns: dict[str, Column] = {
        "client": data.names,
        "n_train": data.train[:, 1],
        "n_test": data.test[:, 1],
        **stage.setup.devices.columns(_batch(stage)),
        "byzantine": (~stage.setup.honest).astype(np.int8),
        **dict.fromkeys((*MODELS, "global_train", "personal_train")),
        **scores,
        "distance": _distances(stage, state),
        "label_shift": _label_shift(stage.setup.clean_data),
        **state.counters.clock.turns.columns(),
        "newcomer": None if stage.setup.newcomers is None else np.zeros(data.clients, dtype=np.int8),
    }
    return Table(data.clients, columns)


def _batch(stage: Stage) -> int:
    """The largest batch of the last stage."""
    return stage.setup.plans[-1].batch or int(stage.setup.data.train[:, 1].max())


def _distances(stage: Stage, state: State) -> np.ndarray | None:
    """Return ‖v_i − v̄‖ of each client that has trained a personal part v_i; v̄ is their mean."""
    touched, trainable = state.store.touched, stage.problem.trainable
    names = [k for k in stage.partition.personal if k in trainable]  # no counters or statistics
    if not names or not stage.keeps_state or not len(touched):
        return None
    total: Tensors = {}
    for block in stage.blocks(touched):
        parts = tree.pick(state.load(stage, block).personal, names)
        sums = {k: v.sum(0, dtype=torch.float64) for k, v in parts.items()}
        total = {k: total[k] + v for k, v in sums.items()} if total else sums
    distances = np.full(stage.setup.data.clients, np.nan)
    for block in stage.blocks(touched):
        parts = tree.pick(state.load(stage, block).personal, names)
        squares = [_squares(v - total[k] / len(touched)) for k, v in parts.items()]
        distances[block] = torch.stack(squares).sum(0).sqrt().cpu().numpy()
    return distances


def _squares(stack: torch.Tensor) -> torch.Tensor:
    """‖·‖² of each row, which is lost: a block of clients is large."""
    return stack.reshape(len(stack), -1).square_().sum(1)


def _label_shift(data: FederatedData, most: int = 1000) -> np.ndarray | None:
    """Total variation ½ Σ_c |p_i(c) − p(c)| between a client's training labels and everyone's."""
    y = data.y  # as it is, whatever Byzantine clients pretend
    if y.is_floating_point() or y.dim() > 1 or not len(y) or int(y.max()) >= most or int(y.min()) < 0:
        return None
    labels, classes = y.cpu().numpy(), int(y.max()) + 1
    starts, sizes = data.train.T
    blocks = _blocks(sizes, max(1, LABELS // classes))
    everyone = sum((_counted(labels, starts[b], sizes[b], classes).sum(0) for b in blocks), np.zeros(classes))
    everyone /= everyone.sum()
    shift = np.full(data.clients, np.nan)
    for b in blocks:
        shares = _counted(labels, starts[b], sizes[b], classes) / np.maximum(sizes[b], 1)[:, None]
        shift[b] = np.where(sizes[b] > 0, np.abs(shares - everyone).sum(1) / 2, np.nan)
    return shift


def _blocks(sizes: np.ndarray, most: int) -> list[slice]:
    """Clients one after another, at most so many, and not many more than LABELS samples of them at once."""
    number = np.maximum(np.arange(len(sizes)) // most, (np.cumsum(sizes) - sizes) // LABELS)
    number = np.cumsum(np.diff(number, prepend=number[:1]) > 0)
    ends = np.searchsorted(number, np.arange(number[-1] + 1), side="right").tolist()
    return [slice(a, b) for a, b in zip([0, *ends], ends)]


def _counted(labels: np.ndarray, starts: np.ndarray, sizes: np.ndarray, classes: int) -> np.ndarray:
    """How often each client has each label, a row for each client."""
    owner = np.repeat(np.arange(len(sizes)), sizes)
    place = np.arange(len(owner)) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
    found = np.bincount(owner * classes + labels[place], minlength=len(sizes) * classes)
    return found.reshape(len(sizes), classes)


def _summary(stage: Stage, state: State, scores: Scores) -> Summary:
    setup, counters, version = stage.setup, state.counters, state.server.version
    weight, metric, names = setup.test_weight, setup.profile.metric, setup.data.names
    shared, personal = (tree.pick(state.initial, part) for part in stage.partition)
    seconds, excluded = counters.training_seconds, sorted(counters.excluded)
    return Summary(
        algorithm=setup.algorithm.name,
        seed=setup.settings.seed,
        rounds=version,
        ended={"reason": state.ended, "of": setup.rounds} if state.ended else None,
        clients=setup.data.clients,
        scored=int((weight > 0).sum()),
        metric=metric.name,
        higher_is_better=metric.higher_is_better,
        test={kind: mean_score(scores[kind], weight) for kind in MODELS},
        hurt={},  # counted by the record
        seconds=round(counters.elapsed, 3),
        client_steps_per_second=round(counters.client_steps / seconds, 1) if seconds else 0.0,
        phases={k: round(v, 3) for k, v in state.timer.seconds.items()},
        bytes_up=counters.bytes_up,
        bytes_down=counters.bytes_down,
        clock=counters.clock.summary(setup.data.clients, version),
        excluded=[names[c] for c in excluded],
        excluded_why={names[c]: counters.excluded[c].why for c in excluded},
        byzantine=_byzantine(setup, excluded, scores),
        parameters={"shared": _count(shared), "personal": _count(personal)},
        personal_part={
            "names": list(personal),
            "parameters": _count(personal),
            "of": _count(state.initial),
        },
        client_memory=client_memory(tree.nbytes(shared), tree.nbytes(personal), setup.profile.sample_bytes),
        peak_memory=_peak_memory(setup.settings.device),
    )


def _classes(stage: Stage, rows: Table, scores: Scores) -> dict[str, Any] | None:
    """Describe each class of devices: its size, what it holds and sends, its delays, its scores."""
    setup, devices = stage.setup, stage.setup.devices
    if devices.capacity is None:
        return None
    memory, classes = devices.memory(_batch(stage)), {}
    for kind in devices.used:
        mine = devices.class_of == kind
        delays = rows.numbers("delay")[mine]
        delays = delays[~np.isnan(delays)].tolist()
        size, share = memory[kind]
        weight = np.where(mine, setup.test_weight, 0)
        classes[devices.shares[kind].name] = {
            "clients": int(mine.sum()),
            "capacity": round(share, 6),
            "memory": size,
            "parameters": devices.parameters(kind),
            "bytes_down": stage.bytes_down[kind],
            "bytes_up": devices.bytes_up(kind, stage.upload_like),
            "reports": int(rows.numbers("reports")[mine].sum()),
            "delay": sum(delays) / len(delays) if delays else None,
            "test": {model: mean_score(scores[model], weight) for model in MODELS},
        }
    return classes


def _finite(tensors: Tensors) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors.values())


def _count(tensors: Tensors) -> int:
    return sum(t.numel() for t in tensors.values())


def _byzantine(setup: Setup, excluded: Sequence[int], scores: Scores) -> dict[str, Any] | None:
    """Describe the Byzantine clients: how many, their attack, the models on their data, who was set aside."""
    attack = setup.settings.attack
    if attack is None:
        return None
    weight = np.where(setup.honest, 0, setup.data.test[:, 1])
    return {
        "clients": len(setup.settings.byzantine_clients),
        "attack": attack.name,
        "test": {kind: mean_score(scores[kind], weight) for kind in MODELS},
        "excluded": [setup.data.names[c] for c in excluded if not setup.honest[c]],
    }


def _peak_memory(device: str) -> int:
    """The most that this process has held: on the GPU by tensors, on the CPU in all."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ModuleNotFoundError:  # not on this system
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
