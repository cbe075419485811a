"""From a finished run to its figures: every client's scores, who was hurt, what it cost."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from partita.capacity.client_memory import client_memory
from partita.core import tree
from partita.core.types import Tensors
from partita.engine.federation import Federation
from partita.engine.monitor import Watch, mean_score
from partita.engine.record import MODELS, Record, Summary
from partita.engine.table import Column, Table

Scores = dict[str, np.ndarray | None]
LABELS = 1 << 16
"""Labels that are counted at once."""


def figures(run: Federation, watch: Watch, references: Mapping[str, Record]) -> Record:
    """Everything about a finished run that can be written down as numbers."""
    scores = _scores(run, watch, references)
    rows = _client_rows(run, watch, scores)
    summary = _summary(run, watch, scores)
    others = {kind: other.facts.get("diverged") for kind, other in references.items()}
    summary["diverged"] = watch.divergence(_finite(run.server.shared), others)
    summary["classes"] = _classes(run, rows, scores)
    record = Record(watch.rows, rows, watch.config(), summary)
    summary["hurt"] = {f"vs_{kind}": record.hurt(kind) for kind in ("global", "local")}
    return record


def _scores(run: Federation, watch: Watch, references: Mapping[str, Record]) -> Scores:
    """Every client's score alone, under the global and under its personal model, as far as they exist."""
    everyone = watch.global_scores
    if everyone is None and run.has_global:  # resumed after its last evaluation
        everyone = run.scores("global")
    personal = watch.personal_scores
    if personal is None:
        personal = run.scores("personal") if run.has_personal else everyone
    if everyone is None and "global" in references:
        everyone = references["global"].scores("global")
    alone = references["local"].scores("local") if "local" in references else None
    if alone is None and run.alone:
        alone = np.full(run.data.clients, np.nan)
        if personal is not None:  # a client that had no turn has no model of its own
            alone[run.store.touched] = personal[run.store.touched]
    return {"local": alone, "global": everyone, "personal": personal, **_train_scores(run, watch, references)}


def _train_scores(run: Federation, watch: Watch, references: Mapping[str, Record]) -> Scores:
    """The same on the training part, when asked for; of the same global model."""
    if not run.settings.train_scores:
        return {}
    everyone = watch.global_train_scores
    if watch.global_scores is None and "global" in references:
        everyone = references["global"].scores("global", "train")
    personal = run.scores("personal", "train") if run.has_personal else everyone
    return {"global_train": everyone, "personal_train": personal}


def _client_rows(run: Federation, watch: Watch, scores: Scores) -> Table:
    columns: dict[str, Column] = {
        "client": run.data.names,
        "n_train": run.data.train[:, 1],
        "n_test": run.data.test[:, 1],
        **run.devices.described(),
        "byzantine": (~run.honest).astype(np.int8),
        **dict.fromkeys((*MODELS, "global_train", "personal_train")),
        **scores,
        "distance": _distances(run),
        "label_shift": _label_shift(run),
        **watch.timing.turns.columns(),
    }
    return Table(run.data.clients, columns)


def _distances(run: Federation) -> np.ndarray | None:
    """‖v_i − v̄‖ of each client that has trained a personal part v_i; v̄ is their mean."""
    touched = run.store.touched
    names = [k for k in run.partition.personal if k in run.problem.trainable]  # no counters or statistics
    if not names or not run.keeps_state or not len(touched):
        return None
    blocks = [touched[i : i + run.block] for i in range(0, len(touched), run.block)]
    total: Tensors = {}
    for some in blocks:
        own = tree.pick(run.load(some).personal, names)
        sums = {k: v.sum(0, dtype=torch.float64) for k, v in own.items()}
        total = {k: total[k] + v for k, v in sums.items()} if total else sums
    found = np.full(run.data.clients, np.nan)
    for some in blocks:
        own = tree.pick(run.load(some).personal, names)
        squares = [_squares(v - total[k] / len(touched)) for k, v in own.items()]
        found[some] = torch.stack(squares).sum(0).sqrt().cpu().numpy()
    return found


def _squares(stack: torch.Tensor) -> torch.Tensor:
    """‖·‖² of each row, which is lost: a block of clients is large."""
    return stack.reshape(len(stack), -1).square_().sum(1)


def _label_shift(run: Federation, most: int = 1000) -> np.ndarray | None:
    """Total variation ½ Σ_c |p_i(c) − p(c)| between a client's training labels and everyone's."""
    y = run.source.y  # as it is, whatever liars pretend
    if y.is_floating_point() or y.dim() > 1 or not len(y) or int(y.max()) >= most or int(y.min()) < 0:
        return None
    labels, classes = y.cpu().numpy(), int(y.max()) + 1
    starts, sizes = run.source.train.T
    blocks = _blocks(sizes, max(1, LABELS // classes))
    everyone = sum((_counted(labels, starts[b], sizes[b], classes).sum(0) for b in blocks), np.zeros(classes))
    everyone /= everyone.sum()
    found = np.full(run.data.clients, np.nan)
    for b in blocks:
        own = _counted(labels, starts[b], sizes[b], classes) / np.maximum(sizes[b], 1)[:, None]
        found[b] = np.where(sizes[b] > 0, np.abs(own - everyone).sum(1) / 2, np.nan)
    return found


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


def _summary(run: Federation, watch: Watch, scores: Scores) -> Summary:
    weight = run.test_weight
    counters = watch.counters
    seconds = counters["training_seconds"]
    shared, personal = (tree.pick(run.base, names) for names in run.partition)
    return Summary(
        algorithm=run.given.name,
        seed=run.settings.seed,
        rounds=run.server.version,
        clients=run.data.clients,
        scored=int((weight > 0).sum()),
        metric=run.profile.metric.name,
        higher_is_better=run.profile.metric.higher_is_better,
        test={kind: mean_score(scores[kind], weight) for kind in MODELS},
        hurt={},  # counted by the record
        seconds=round(watch.elapsed, 3),
        client_steps_per_second=round(counters["client_steps"] / seconds, 1) if seconds else 0.0,
        phases={k: round(v, 3) for k, v in run.phases.seconds.items()},
        bytes_up=int(counters["bytes_up"]),
        bytes_down=int(counters["bytes_down"]),
        clock=watch.timing.summary(run.data.clients, run.server.version),
        excluded=[run.data.names[c] for c in sorted(watch.excluded)],
        excluded_why={run.data.names[c]: watch.excluded[c].why for c in sorted(watch.excluded)},
        byzantine=_byzantine(run, watch, scores),
        parameters={"shared": _count(shared), "personal": _count(personal)},
        personal_part={
            "names": list(personal),
            "parameters": _count(personal),
            "of": _count(run.base),
        },
        client_memory=client_memory(tree.nbytes(shared), tree.nbytes(personal), run.profile.sample_bytes),
        peak_memory=_peak_memory(run.settings.device),
    )


def _classes(run: Federation, rows: Table, scores: Scores) -> dict[str, Any] | None:
    """Class by class of devices: how many, what they hold and send, how long a turn takes, how they score."""
    devices = run.devices
    if devices.capacity is None:
        return None
    found = {}
    for kind in devices.used:
        mine = devices.kinds == kind
        delays = rows.numbers("delay")[mine]
        delays = delays[~np.isnan(delays)].tolist()
        size, share = devices.memory[kind]
        weight = np.where(mine, run.test_weight, 0)
        found[devices.shares[kind].name] = {
            "clients": int(mine.sum()),
            "capacity": round(share, 6),
            "memory": size,
            "parameters": devices.parameters(kind),
            "bytes_down": devices.received_by(kind),
            "bytes_up": devices.sent_by(kind),
            "reports": int(rows.numbers("reports")[mine].sum()),
            "delay": sum(delays) / len(delays) if delays else None,
            "test": {model: mean_score(scores[model], weight) for model in MODELS},
        }
    return found


def _finite(tensors: Tensors) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors.values())


def _count(tensors: Tensors) -> int:
    return sum(t.numel() for t in tensors.values())


def _byzantine(run: Federation, watch: Watch, scores: Scores) -> dict[str, Any] | None:
    """The liars apart: how many, what they do, how the models do on their data, who was found out."""
    if run.attack is None:
        return None
    weight = np.where(run.honest, 0, run.data.test[:, 1])
    test = {kind: mean_score(scores[kind], weight) for kind in MODELS}
    excluded = [run.data.names[c] for c in sorted(watch.excluded) if not run.honest[c]]
    count = len(run.settings.byzantine_clients)
    return {"clients": count, "attack": run.attack.name, "test": test, "excluded": excluded}


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
