"""What clients compute beside training, as programs of their own: scores, statistics, models."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from partita.algorithms.local.batchnorm import settled
from partita.algorithms.local.evaluation import REAL, ROWS, SUMS
from partita.core import check, tree
from partita.core.metrics import ClientMetric, mean_of
from partita.core.types import ClientState, Download, Group, Tensors
from partita.data import FederatedData
from partita.engine.samples import Scored
from partita.engine.stage import STATE_BYTES, Stage, evaluation_name, most_samples
from partita.engine.state import State

NO_STATE = ClientState({}, {})


def scores(stage: Stage, state: State, model: str, split: str = "test") -> np.ndarray:
    """Return each client's score on its samples, by the 'global' or its 'personal' model."""
    return scored(stage, state, model, split).scores[stage.setup.profile.metric.name]


def scored(stage: Stage, state: State, model: str, split: str = "test", every_sample: bool = False) -> Scored:
    """Return how the 'global' or each client's 'personal' model does on a split of the data.

    Only the deciding metric is computed, unless `every_sample` is to be kept.
    """
    if stage.setup.elsewhere is not None:
        return stage.setup.elsewhere.scored(stage, state, model, split, every_sample)
    refresh_statistics(stage, state)
    metrics, data, context = stage.setup.profile.metrics, stage.setup.data, state.context(stage)
    metrics, keeps_rows = (metrics if every_sample else metrics[:1]), every_sample
    every_sample = every_sample or metrics[0].needs_rows
    rows_of_client = most_samples(data, stage.limits.pass_batch)[split] if every_sample else 0
    program = stage.programs[evaluation_name(model, split, rows_of_client, stage.setup.profile.kept)]
    names = [m.name for m in metrics]
    result = {name: np.full(data.clients, np.nan) for name in names}
    loss, rows = np.full(data.clients, np.nan), dict[str, list[Tensor]]((name, []) for name in names)
    for clients in _scored_blocks(stage, split, every_sample):
        states = state.load(stage, clients) if model == "personal" else NO_STATE
        upload, _ = stage.executor(program, clients, group_of(state, len(clients)), states, context)
        found = {k: v.cpu() for k, v in upload.metrics.items()}
        sums = {k: found[k].double().numpy() for k in SUMS}
        loss[clients] = mean_of(sums["loss"], sums["loss_weight"])
        if not every_sample:
            result[names[0]][clients] = metrics[0].of_sums(sums["metric"], sums["weight"])
            continue
        for metric in metrics:
            if metric.is_loss:
                result[metric.name][clients] = loss[clients]
                continue
            kept = found[f"{ROWS}{metric.name}"][found[REAL]]  # client after client
            rows[metric.name].append(kept)
            sizes = data.ranges(split)[clients, 1]
            if metric.criterion is not None:
                result[metric.name][clients] = _of_contributions(metric, kept, sizes)
                continue
            of_clients = zip(clients.tolist(), torch.split(kept, sizes.tolist()))
            result[metric.name][clients] = [_score(metric, mine, data, c, split) for c, mine in of_clients]
    return Scored(result, loss, {k: torch.cat(v) for k, v in rows.items() if v and keeps_rows})


def _scored_blocks(stage: Stage, split: str, every_sample: bool) -> Iterator[np.ndarray]:
    """Cut the clients with samples into blocks whose states, and rows if they are kept, fit."""
    sizes = stage.setup.data.ranges(split)[:, 1]
    clients = np.flatnonzero(sizes > 0)
    row = tree.nbytes(stage.setup.profile.kept) + 1
    most = max(1, STATE_BYTES // (row * int(sizes.max(initial=1)))) if every_sample else len(clients)
    for block in stage.blocks(clients):
        for i in range(0, len(block), most):
            yield block[i : i + most]


def _of_contributions(metric: ClientMetric, rows: Tensor, sizes: np.ndarray) -> np.ndarray:
    """Return the scores of all clients at once, where each sample contributes to a mean."""
    values = rows.double().reshape(len(rows), -1).numpy()
    sums = np.add.reduceat(values, np.cumsum(sizes) - sizes, axis=0)  # an infinite one stays its client's
    return metric.of_sums(sums[:, 0], sums[:, 1] if values.shape[1] > 1 else sizes.astype(np.float64))


def _score(metric: ClientMetric, rows: Tensor, data: FederatedData, client: int, split: str) -> float:
    """Return the score of a client; NaN where a user's function raises an error for it."""
    start, length = data.ranges(split)[client].tolist()
    try:
        return metric.score(rows, data.y[start : start + length].cpu())
    except check.Refused:
        raise
    except Exception as error:
        check.warn(f"metric {metric.name!r} is undefined for some clients: {check.reason(error)}")
        return float("nan")


def mean_score(scores: np.ndarray | None, weight: np.ndarray) -> float | None:
    """Return the mean over all test samples of all clients; None without such a model or a test sample."""
    if scores is None:
        return None
    counted = (weight > 0) & ~np.isnan(scores)
    total = weight[counted].sum()
    return float((scores[counted] * weight[counted]).sum() / total) if total else None


def personal_model(stage: Stage, state: State, client: int) -> Tensors:
    """Return the tensors of the model that a client is evaluated with."""
    states, context = state.load(stage, [client]), state.context(stage)
    upload, _ = stage.executor(
        stage.programs["model"], np.array([client]), group_of(state, 1), states, context
    )
    tensors = {**state.initial, **state.server.shared, **tree.row({**upload.delta}, 0)}
    return stage.setup.devices.of_model(client, tensors)


def group_of(state: State, clients: int) -> Group:
    """Clients that all receive the server's model as it is now."""
    server = state.server
    download = Download(server.shared, server.extra, server.version)
    return Group(tuple(range(clients)), download, statistics=state.device_statistics)


# ---- BatchNorm statistics that nobody trains (norm="static")


def refresh_statistics(stage: Stage, state: State) -> None:
    """Measure the statistics of the server's model, unless they are those of its present version."""
    static = stage.setup.settings.norm == "static" and stage.problem.tracked
    if not static or state.norms_version == state.server.version:
        return
    state.norms_version = state.server.version
    clients, devices = stage.setup.measurable, stage.setup.devices
    state.device_statistics = {}
    statistics = _statistics(stage, state, "statistics", clients)
    known = {k: v for k, v in statistics.items() if k in state.server.shared}
    state.server = state.server._replace(shared={**state.server.shared, **known})
    if devices.narrow:
        classes = devices.class_of[clients]
        state.device_statistics = {
            number: _statistics(stage, state, "statistics of devices", clients[classes == number])
            for number in devices.used
            if not devices.complete[number]
        }


def _statistics(stage: Stage, state: State, name: str, clients: np.ndarray) -> Tensors:
    """Return mean and variance over all training samples of these clients."""
    total: Tensors = {}
    samples = torch.zeros((), dtype=torch.float64, device=stage.setup.settings.device)
    program, context = stage.programs[name], state.context(stage)
    for block in stage.blocks(clients):
        states = state.load(stage, block.tolist())
        upload, _ = stage.executor(program, block, group_of(state, len(block)), states, context)
        sums = {k: v.sum(0, dtype=torch.float64) for k, v in upload.delta.items()}
        total = {k: total[k] + v for k, v in sums.items()} if total else sums
        samples = samples + upload.metrics["samples"].sum(dtype=torch.float64)
    return settled(total, samples, stage.problem.tracked, state.server.shared) if len(clients) else {}
