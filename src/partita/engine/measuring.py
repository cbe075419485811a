"""How a run computes its measures: as rules that clients execute, like an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from partita.algorithms.partition import split
from partita.core import check, draws, tree
from partita.core.parts import LocalRule, Measure, Probe
from partita.core.types import ClientState, Cohort, Download, Group, Partition, Tensors, Upload
from partita.data import FederatedData, arrays
from partita.data.federated import SPLITS
from partita.measures.ended import ENDED
from partita.measures.probe import PROBE

if TYPE_CHECKING:
    from partita.engine.federation import Federation

BLOCK_BYTES = 1 << 28  # of models that are held at once


def measured(run: Federation, cohort: Cohort, uploads: Upload, good: Sequence[bool]) -> dict[str, Any]:
    """What each of the run's measures finds now, by its name; liars have no part in it."""
    found = {}
    for measure in run.measures:
        if measure.of_cohort:
            found[measure.name] = _of_cohort(run, measure, cohort, uploads, good)
        else:
            found[measure.name] = _of_everyone(run, measure)
    return found


def rule(run: Federation, measure: Measure) -> Callable[[Any], LocalRule]:
    """The measure's rule on its own split of the model; the same object for a whole stage."""
    partition = split_of(run, measure, run.partition)
    if measure.probe is not None:
        _try(run, measure, measure.probe)
    method = replace(run.algorithm, personalize=run.personalize)
    return lambda problem: measure.client(replace(problem, partition=partition), method)


def _of_everyone(run: Federation, measure: Measure) -> dict[str, Any]:
    """The server's model for all, and the clients' states, or a personal part as at the start."""
    clients = np.flatnonzero(run.honest & (run.data.train[:, 1] > 0))
    partition = split_of(run, measure, run.partition)
    shared = tree.pick(run.server.shared, partition.shared)
    download = Download(shared, {**run.server.extra, **_probe(run, measure)}, run.server.version)
    new = ClientState(tree.pick(run.base, partition.personal), {})

    def block(places: list[int]) -> tuple[Group, ClientState]:
        own = run.load(clients[places]) if measure.own else tree.expand(new, len(places))
        return Group(tuple(range(len(places))), download), own

    return _execute(run, measure, clients, block)


def _of_cohort(
    run: Federation, measure: Measure, cohort: Cohort, uploads: Upload, good: Sequence[bool]
) -> dict[str, Any]:
    """The server's model now, and beside it the model that each client of the cohort ended with."""
    able = run.honest & (run.data.train[:, 1] > 0)
    there = [i for i, c in enumerate(cohort.clients) if good[i] and able[c]]
    clients = np.asarray([cohort.clients[i] for i in there], dtype=np.int64)
    now = (run.server.shared, {**run.server.extra, **_probe(run, measure)})

    def block(places: list[int]) -> tuple[Group, ClientState]:
        some = [there[i] for i in places]
        shared, extra = tree.expand(now, len(some))
        download = Download(shared, {**extra, **_ended(cohort, uploads, some)}, run.server.version)
        return Group(tuple(range(len(some))), download, stacked=True), run.load(clients[places])

    return _execute(run, measure, clients, block)


def _ended(cohort: Cohort, uploads: Upload, places: Sequence[int]) -> dict[str, torch.Tensor]:
    """What each of these received, less its delta."""
    had: dict[str, list[torch.Tensor]] = {k: [] for k in uploads.delta}
    for place in places:
        group = next(g for g in cohort.groups if place in g.positions)
        row = group.positions.index(place)
        for k, rows in had.items():
            rows.append(group.download.shared[k][row] if group.stacked else group.download.shared[k])
    return {f"{ENDED}{k}": torch.stack(rows) - uploads.delta[k][list(places)] for k, rows in had.items()}


def _execute(
    run: Federation,
    measure: Measure,
    clients: np.ndarray,
    block: Callable[[list[int]], tuple[Group, ClientState]],
) -> dict[str, Any]:
    """The rule for these clients, as many at once as their states and uploads (and a probe's outputs) fit."""
    found: list[Upload] = []
    context, build = run.context(f"measure {measure.name}"), run.measure_rules[measure.name]
    width = tree.nbytes(run.base)
    if measure.probe is not None:
        width += measure.probe.batch * run.profile.sample_bytes
    some = max(1, min(run.block, BLOCK_BYTES // max(1, width)))
    for a in range(0, len(clients), some):
        places = list(range(a, min(a + some, len(clients))))
        group, states = block(places)
        upload = run.execute_group(build, clients[places], group, states, context)[0]
        found.append(upload if measure.reduce is None else measure.reduce(upload))
    samples = torch.as_tensor(run.data.train[clients, 1], device=run.settings.device)
    return measure.summarize(tree.cat(found), samples) if found else {}


def split_of(run: Federation, measure: Measure, partition: Partition) -> Partition:
    """The split that a measure looks at, under a method with this one; a ValueError if they do not agree."""
    if measure.own:
        return partition
    if measure.personal is None:  # what is shared and kept as a copy too is shared
        mine = tuple(k for k in partition.personal if k not in set(partition.shared))
        return Partition(partition.shared, mine)
    found = split(run.model, run.names, measure.personal)
    lost = [k for k in found.shared if k not in partition.shared]
    if lost:
        raise check.fail(
            f"measure {measure.name} personal",
            measure.personal,
            f"a split whose shared part is shared by the method too ({lost[0]} is not)",
        )
    return found


# ---- samples for all clients


def _probe(run: Federation, measure: Measure) -> Tensors:
    """The samples of the measure's probe as the model takes them, on the run's device."""
    if measure.probe is None:
        return {}
    if isinstance(measure.probe.x, int):
        return {PROBE: run.data.gather(_unseen(run.data, measure.probe.x, run.settings.seed))[0]}
    x = arrays.features(measure.probe.x)
    arrays.finite("x", x, lambda row: "the probe")  # noqa: ARG005
    x, like = arrays.decode(x), arrays.decode(run.data.x[:1])
    both = x.is_floating_point() and like.is_floating_point()
    return {PROBE: x.to(like.device, like.dtype if both else x.dtype)}


def _unseen(data: FederatedData, count: int, seed: int) -> torch.Tensor:
    """Rows among the clients' test samples that no client trains on, drawn by the seed."""
    there = {name: arrays.covered(data.ranges(name), len(data.x)) for name in SPLITS}
    free = np.flatnonzero(there["test"] & ~there["train"])
    if count > len(free):
        reason = "so many of the clients' test samples are none that a client trains on"
        raise check.fail("x", count, f"samples, or at most {len(free)}: {reason}")
    return torch.from_numpy(np.sort(draws.generator(seed, "probe").choice(free, count, replace=False)))


def _try(run: Federation, measure: Measure, probe: Probe) -> None:
    """Refuses samples that the model does not take, and blocks that it does not have, before any work."""
    try:
        x = _probe(run, measure)[PROBE][:2]
        _pass(run, x)
        run.problem.outputs(run.base, x, probe.blocks)
    except check.Refused as error:
        field = f"measure {measure.name} {error.field}"
        raise check.fail(field, error.value, error.allowed, error.reason) from error


def _pass(run: Federation, x: torch.Tensor) -> None:
    try:
        run.problem.outputs(run.base, x, ())
    except Exception as error:  # any module may fail in its own way
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        given = f"samples of shape {list(x.shape[1:])}, {x.dtype}"
        raise check.fail("x", given, f"samples that the model takes: {reason}") from error
