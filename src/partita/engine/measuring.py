"""Measures at work: who is measured, on which model, and with what beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partita.core import tree
from partita.core.parts import Measure
from partita.core.types import ClientState, Cohort, Download, Group, RoundContext, Tensors, Upload
from partita.engine.execute.plan import progress_of
from partita.engine.newcomers import among
from partita.engine.stage import STATE_BYTES, Stage
from partita.engine.state import State
from partita.measures.ended import ENDED
from partita.measures.probe import probe_samples
from partita.measures.sent import MADE, SENT

Block = Callable[[list[int]], tuple[Group, ClientState]]
"""What the clients at these places receive and bring, as one group."""


def measures(
    stage: Stage, state: State, cohort: Cohort, uploads: Upload, usable: Sequence[bool]
) -> dict[str, Any]:
    """Return what each of the run's measures finds now, by its name; Byzantine clients have no part in it."""
    values: dict[str, Any] = {}
    nothing_leaves = not any(stage.upload_like.payload)
    for measure in stage.setup.settings.measures:
        if nothing_leaves and (measure.of_upload or measure.newcomers):
            values[measure.name] = {}  # as where every client trains alone
        elif measure.of_cohort or measure.of_upload:
            values[measure.name] = _of_cohort(stage, state, measure, cohort, uploads, usable)
        else:
            values[measure.name] = _of_everyone(stage, state, measure)
    return values


# ---- the server's model, at everyone


def _of_everyone(stage: Stage, state: State, measure: Measure) -> dict[str, Any]:
    """Measure the server's model for all, and for those who were held out where the measure asks for them."""
    found, samples = _of_clients(stage, state, measure)
    if not measure.newcomers:
        return _summary(measure, found, samples)
    held_out = stage.setup.newcomers
    assert held_out is not None
    others, of_others = _of_clients(*among(stage, state, held_out), measure)
    marked = [*_marked(found, 0), *_marked(others, 1)]
    return _summary(measure, marked, torch.cat([samples, of_others]))


def _of_clients(stage: Stage, state: State, measure: Measure) -> tuple[list[Upload], Tensor]:
    """Measure the server's model, with the clients' states, or a personal part as at the start."""
    clients, partition = stage.setup.measurable, stage.measured_partition(measure)
    new = ClientState(tree.pick(state.initial, partition.personal), {})
    shared = tree.pick(state.server.shared, partition.shared)
    download = Download(shared, _extra(stage, state, measure), state.server.version)

    def block(places: list[int]) -> tuple[Group, ClientState]:
        states = state.load(stage, clients[places]) if measure.own else tree.expand(new, len(places))
        return Group(tuple(range(len(places))), download), states

    return _found(stage, measure, clients, block, state.context(stage), state)


def _marked(uploads: Sequence[Upload], newcomer: int) -> list[Upload]:
    """Return what was found, with a mark of who is a newcomer."""
    marked = []
    for upload in uploads:
        first = next(iter(upload.metrics.values()))
        mark = torch.full((len(first),), newcomer, device=first.device)
        marked.append(upload._replace(metrics={**upload.metrics, "newcomer": mark}))
    return marked


# ---- what a cohort has just sent


def _of_cohort(
    stage: Stage, state: State, measure: Measure, cohort: Cohort, uploads: Upload, usable: Sequence[bool]
) -> dict[str, Any]:
    """Measure those who have just reported: the models that they ended with, or what the server saw."""
    able, of_uploads = set(stage.setup.measurable.tolist()), measure.of_upload
    if of_uploads and (progress := progress_of(cohort)) is not None:  # stragglers draw other batches
        usable = [ok and done == 1 for ok, done in zip(usable, progress.tolist())]
    positions = [i for i, c in enumerate(cohort.clients) if usable[i] and c in able][: measure.most]
    clients = np.asarray([cohort.clients[i] for i in positions], dtype=np.int64)
    common, now = _extra(stage, state, measure), state.server
    if of_uploads:
        common |= {f"{MADE}{k}": v for k, v in now.shared.items()}

    def block(places: list[int]) -> tuple[Group, ClientState]:
        chosen = [positions[i] for i in places]
        received, n = _received(cohort, chosen), len(places)
        deltas = {k: v[chosen] for k, v in uploads.delta.items()}
        if of_uploads:
            shared, beside = received, {f"{SENT}{k}": v for k, v in deltas.items()}
        else:
            shared = tree.expand(now.shared, n)
            beside = {f"{ENDED}{k}": received[k] - v for k, v in deltas.items()}
        download = Download(shared, {**tree.expand(common, n), **beside}, now.version)
        return Group(tuple(range(n)), download, stacked=True), state.load(stage, clients[places])

    context = _of_training(stage, state, cohort, positions) if of_uploads else state.context(stage)
    return _summary(measure, *_found(stage, measure, clients, block, context, state))


def _received(cohort: Cohort, positions: Sequence[int]) -> Tensors:
    """Return what these clients had received, stacked."""
    rows: dict[str, list[Tensor]] = {}
    for position in positions:
        group = next(g for g in cohort.groups if position in g.positions)
        row = group.positions.index(position)
        for k, v in group.download.shared.items():
            rows.setdefault(k, []).append(v[row] if group.stacked else v)
    return {k: torch.stack(values) for k, values in rows.items()}


def _of_training(stage: Stage, state: State, cohort: Cohort, positions: Sequence[int]) -> RoundContext:
    """Return the context in which these clients have trained, so that they draw the same batches again."""
    contexts = {place: state.context(stage, g) for g in cohort.groups for place in g.positions}
    chosen = [contexts[i] for i in positions]
    if not chosen:
        return state.context(stage)
    return chosen[0]._replace(
        round=torch.tensor([c.round for c in chosen]),
        stage_round=torch.tensor([c.stage_round for c in chosen]),
    )


# ---- both


def _extra(stage: Stage, state: State, measure: Measure) -> Tensors:
    """What a client receives beside the model: what the method sends, and the samples of a probe."""
    return {**state.server.extra, **probe_samples(measure, stage.setup.data, stage.setup.settings.seed)}


def _found(
    stage: Stage, measure: Measure, clients: np.ndarray, block: Block, context: RoundContext, state: State
) -> tuple[list[Upload], Tensor]:
    """Run a measure for these clients, as many at once as their states, uploads and probes fit."""
    setup, results = stage.setup, list[Upload]()
    program = stage.programs[f"measure {measure.name}"]
    client_bytes = tree.nbytes(state.initial)
    if measure.probe is not None:
        client_bytes += measure.probe.batch * setup.profile.sample_bytes
    most = max(1, min(stage.limits.clients_per_block, STATE_BYTES // max(1, client_bytes)))
    for a in range(0, len(clients), most):
        places = list(range(a, min(a + most, len(clients))))
        group, states = block(places)
        upload = stage.executor(program, clients[places], group, states, context.of(slice(a, a + most)))[0]
        results.append(upload if measure.reduce is None else measure.reduce(upload))
    return results, torch.as_tensor(setup.data.train[clients, 1], device=setup.settings.device)


def _summary(measure: Measure, found: Sequence[Upload], samples: Tensor) -> dict[str, Any]:
    return measure.summarize(tree.cat(list(found)), samples) if found else {}
