"""How a run computes its measures: as rules that clients execute, like an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from partita import check, tree
from partita.measures.ended import ENDED
from partita.partition import split
from partita.types import ClientState, Cohort, Download, Group, LocalRule, Measure, Partition, Upload

if TYPE_CHECKING:
    from partita.federation import Federation

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
    return lambda problem: measure.client(replace(problem, partition=partition), run.algorithm)


def _of_everyone(run: Federation, measure: Measure) -> dict[str, Any]:
    """The server's model for all, and a personal part of the measure's split as at the start."""
    clients = np.flatnonzero(run.honest & (run.data.train[:, 1] > 0))
    partition = split_of(run, measure, run.partition)
    shared = tree.pick(run.server.shared, partition.shared)
    download = Download(shared, run.server.extra, run.server.version)
    new = ClientState(tree.pick(run.base, partition.personal), {})

    def block(places: list[int]) -> tuple[Group, ClientState]:
        return Group(tuple(range(len(places))), download), tree.expand(new, len(places))

    return _execute(run, measure, clients, block)


def _of_cohort(
    run: Federation, measure: Measure, cohort: Cohort, uploads: Upload, good: Sequence[bool]
) -> dict[str, Any]:
    """The server's model now, and beside it the model that each client of the cohort ended with."""
    able = run.honest & (run.data.train[:, 1] > 0)
    there = [i for i, c in enumerate(cohort.clients) if good[i] and able[c]]
    clients = np.asarray([cohort.clients[i] for i in there], dtype=np.int64)

    def block(places: list[int]) -> tuple[Group, ClientState]:
        some = [there[i] for i in places]
        now = (run.server.shared, run.server.extra)
        shared, extra = tree.expand(now, len(some))
        download = Download(shared, {**extra, **_ended(cohort, uploads, some)}, run.server.version)
        return Group(tuple(range(len(some))), download, stacked=True), run.load(clients[places].tolist())

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
    """The rule for these clients, as many at once as their states and uploads fit."""
    found: list[Upload] = []
    moment, build = run.moment(f"measure {measure.name}"), run.measure_rules[measure.name]
    some = max(1, min(run.block, BLOCK_BYTES // max(1, tree.nbytes(run.base))))
    for a in range(0, len(clients), some):
        places = list(range(a, min(a + some, len(clients))))
        group, states = block(places)
        upload = run.execute_group(build, clients[places], group, states, moment)[0]
        found.append(upload if measure.reduce is None else measure.reduce(upload))
    samples = torch.as_tensor(run.data.train[clients, 1], device=run.settings.device)
    return measure.summarize(tree.cat(found), samples) if found else {}


def split_of(run: Federation, measure: Measure, partition: Partition) -> Partition:
    """The split that a measure looks at, under a method with this one; a ValueError if they do not agree."""
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
