"""From a finished run to its figures: every client's scores, who was hurt, what it cost."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from partita import tree
from partita.federation import Federation
from partita.measure.memory import client_memory
from partita.record import MODELS, Record, Summary
from partita.types import Tensors
from partita.watch import Watch, mean_score

Scores = dict[str, np.ndarray | None]


def figures(run: Federation, watch: Watch, references: Mapping[str, Record]) -> Record:
    """Everything about a finished run that can be written down as numbers."""
    scores = _scores(run, watch, references)
    rows = _client_rows(run, watch, scores)
    summary = _summary(run, watch, scores)
    summary["classes"] = _classes(run, rows, scores)
    return Record(watch.rows, rows, watch.config(), summary)


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


def _client_rows(run: Federation, watch: Watch, scores: Scores) -> list[dict[str, Any]]:
    columns = {**scores, "distance": _distances(run), "label_shift": _label_shift(run)}
    honest = run.honest

    def cell(column: str, i: int) -> float | None:
        found = columns.get(column)
        return None if found is None or np.isnan(found[i]) else float(found[i])

    measured = (*MODELS, "global_train", "personal_train", "distance", "label_shift")
    return [
        {
            "client": name,
            "n_train": int(run.data.train[i, 1]),
            "n_test": int(run.data.test[i, 1]),
            **run.devices.described(i),
            "byzantine": int(not honest[i]),
            **{column: cell(column, i) for column in measured},
            **watch.timing.client(i),
        }
        for i, name in enumerate(run.data.names)
    ]


def _distances(run: Federation) -> np.ndarray | None:
    """‖v_i − v̄‖ of each client that has trained a personal part v_i; v̄ is their mean."""
    touched = run.store.touched
    if not run.partition.personal or not run.keeps_state or not len(touched):
        return None
    names = [k for k in run.partition.personal if k in run.problem.trainable]  # no counters or statistics
    blocks = [touched[i : i + run.block] for i in range(0, len(touched), run.block)]
    total: Tensors = {}
    for some in blocks:
        own = tree.pick(run.load(some).personal, names)
        sums = {k: v.sum(0, dtype=torch.float64) for k, v in own.items()}
        total = {k: total[k] + v for k, v in sums.items()} if total else sums
    found = np.full(run.data.clients, np.nan)
    for some in blocks:
        own = tree.pick(run.load(some).personal, names)
        away = [v - total[k] / len(touched) for k, v in own.items()]
        squares = [d.reshape(len(d), -1).square().sum(1) for d in away]
        found[some] = torch.stack(squares).sum(0).sqrt().cpu().numpy()
    return found


def _label_shift(run: Federation, most: int = 1000) -> np.ndarray | None:
    """Total variation ½ Σ_c |p_i(c) − p(c)| between a client's training labels and everyone's."""
    y = run.source.y  # as it is, whatever liars pretend
    if y.is_floating_point() or y.dim() > 1 or not len(y) or int(y.max()) >= most or int(y.min()) < 0:
        return None
    labels, classes = y.cpu().numpy(), int(y.max()) + 1
    starts, sizes = run.source.train.T
    everyone = np.zeros(classes)
    for start, size in zip(starts, sizes):
        everyone += np.bincount(labels[start : start + size], minlength=classes)
    everyone /= everyone.sum()
    found = np.full(run.data.clients, np.nan)
    for i, (start, size) in enumerate(zip(starts, sizes)):
        if size:
            own = np.bincount(labels[start : start + size], minlength=classes) / size
            found[i] = np.abs(own - everyone).sum() / 2
    return found


def _summary(run: Federation, watch: Watch, scores: Scores) -> Summary:
    weight, honest = run.test_weight, run.honest
    counters = watch.counters
    seconds = counters["training_seconds"]
    better = 1.0 if run.findings.metric.higher_is_better else -1.0
    shared, personal = (tree.pick(run.base, names) for names in run.partition)
    return Summary(
        algorithm=run.given.name,
        seed=run.settings.seed,
        rounds=run.server.version,
        clients=run.data.clients,
        scored=int((weight > 0).sum()),
        metric=run.findings.metric.name,
        higher_is_better=run.findings.metric.higher_is_better,
        test={kind: mean_score(scores[kind], weight) for kind in MODELS},
        hurt={f"vs_{kind}": _hurt(scores, kind, better, honest) for kind in ("global", "local")},
        seconds=round(watch.elapsed, 3),
        client_steps_per_second=round(counters["client_steps"] / seconds, 1) if seconds else 0.0,
        phases={k: round(v, 3) for k, v in run.phases.seconds.items()},
        bytes_up=int(counters["bytes_up"]),
        bytes_down=int(counters["bytes_down"]),
        clock=watch.timing.summary(run.data.clients, run.server.version),
        excluded=[run.data.names[c] for c in sorted(watch.excluded)],
        excluded_why={run.data.names[c]: watch.reasons[c] for c in sorted(watch.reasons)},
        byzantine=_byzantine(run, watch, scores),
        parameters={"shared": _count(shared), "personal": _count(personal)},
        client_memory=client_memory(tree.nbytes(shared), tree.nbytes(personal), run.findings.sample_bytes),
        peak_memory=_peak_memory(run.settings.device),
    )


def _classes(run: Federation, rows: list[dict[str, Any]], scores: Scores) -> dict[str, Any] | None:
    """Class by class of devices: how many, what they hold and send, how long a turn takes, how they score."""
    devices = run.devices
    if devices.capacity is None:
        return None
    found = {}
    for kind in devices.used:
        mine = [row for row, k in zip(rows, devices.kinds) if k == kind]
        delays = [row["delay"] for row in mine if row["delay"] is not None]
        weight = np.where(devices.kinds == kind, run.test_weight, 0)
        found[devices.shares[kind].name] = {
            "clients": len(mine),
            "capacity": mine[0]["capacity"],
            "memory": mine[0]["memory"],
            "parameters": devices.parameters(kind),
            "bytes_down": devices.received_by(kind),
            "bytes_up": devices.sent_by(kind),
            "reports": sum(row["reports"] for row in mine),
            "delay": sum(delays) / len(delays) if delays else None,
            "test": {model: mean_score(scores[model], weight) for model in MODELS},
        }
    return found


def _count(tensors: Tensors) -> int:
    return sum(t.numel() for t in tensors.values())


def _byzantine(run: Federation, watch: Watch, scores: Scores) -> dict[str, Any] | None:
    """The liars apart: how many, what they do, how the models do on their data, who was found out."""
    if run.attack is None:
        return None
    weight = np.where(run.honest, 0, run.data.test[:, 1])
    test = {kind: mean_score(scores[kind], weight) for kind in MODELS}
    excluded = [run.data.names[c] for c in sorted(watch.excluded) if not run.honest[c]]
    count = len(run.settings.byzantine)
    return {"clients": count, "attack": run.attack.name, "test": test, "excluded": excluded}


def _hurt(scores: Scores, kind: str, better: float, honest: np.ndarray) -> int | None:
    """How many honest clients score worse with their personal model."""
    personal, other = scores["personal"], scores[kind]
    if personal is None or other is None:
        return None
    both = honest & ~(np.isnan(personal) | np.isnan(other))
    if not both.any():
        return None
    return int((better * personal[both] < better * other[both]).sum())


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
