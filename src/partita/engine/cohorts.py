"""Cohorts: cut into chunks that fit, joined to one batch, and their uploads corrected for staleness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from partita.aggregate.mean import mean
from partita.core import check, tree
from partita.core.device import beside, put
from partita.core.types import Cohort, Download, Group, RoundContext, Tensors, Upload


def refuse_twice(cohort: Cohort, names: Sequence[str]) -> NoReturn:
    """Refuse a schedule that names a client twice: it would train twice and count twice."""
    client, times = Counter(cohort.clients).most_common(1)[0]
    repeated = f"client {client} ({names[client]!r}) {times} times"
    raise check.fail("cohort of the schedule", repeated, "each client once in a round")


def chunks_of(cohort: Cohort, most: int) -> Iterator[Cohort]:
    """Cut a cohort into chunks of one size with at most so many clients."""
    n = len(cohort.clients)
    size = -(-n // -(-n // most))
    for a in range(0, n, size):
        b = a + size
        groups = []
        for group in cohort.groups:
            rows = [i for i, place in enumerate(group.positions) if a <= place < b]
            if rows:
                groups.append(subgroup(group, rows, [group.positions[i] - a for i in rows]))
        yield Cohort(cohort.clients[a:b], tuple(groups), cohort.staleness[a:b], cohort.time)


def subgroup(group: Group, rows: list[int], positions: Sequence[int]) -> Group:
    """Return the group of the clients in these rows of it, at these positions of a cohort."""
    download = group.download
    if group.stacked:
        shared, extra = tree.rows(download[:2], rows)
        download = download._replace(shared=shared, extra=extra)
    return group._replace(positions=tuple(positions), download=download)


def as_one_group(groups: Sequence[Group], contexts: Sequence[RoundContext]) -> tuple[Group, RoundContext]:
    """Return several groups as one, in the cohort's order: with a model and a round for each client.

    `contexts` are those in which each group received its model.
    """
    positions = sorted((place, g) for g, group in enumerate(groups) for place in group.positions)
    owners = [g for _, g in positions]
    shared, extra = tree.stack([groups[g].download[:2] for g in owners])
    context = contexts[0]._replace(
        round=torch.tensor([contexts[g].round for g in owners]),
        stage_round=torch.tensor([contexts[g].stage_round for g in owners]),
    )
    return Group(tuple(range(len(owners))), Download(shared, extra, 0), stacked=True), context


def merged(parts: Sequence[Upload]) -> Upload | None:
    """Combine the combinations of chunks: Δ = Σ_p w_p Δ_p / Σ_p w_p; sums and extras add up."""
    if len(parts) < 2:
        return parts[0] if parts else None
    weight = torch.stack([part.weight for part in parts if part.weight is not None])
    deltas, extra, sums = (
        {k: torch.stack([part[k] for part in same]) for k in same[0]}
        for same in zip(*[part.payload for part in parts])
    )
    delta = mean().combine(deltas, weight, weight).delta
    extra, sums = ({k: v.sum(0) for k, v in stacks.items()} for stacks in (extra, sums))
    return Upload(delta, weight.sum(), extra, sums)


def rebased(uploads: Upload, groups: Sequence[Group], now: Tensors, names: Sequence[str]) -> Upload:
    """Count stale deltas of these names from what the server has now: now − (received − delta).

    Statistics are no directions: a client's is where the server's should be. Many stale differences to the
    same old mean would add up, and carry a variance below zero.
    """
    delta = dict(uploads.delta)
    for name in [k for k in names if k in delta]:
        received = torch.empty_like(delta[name])
        for group in groups:
            received[put(np.array(group.positions), received.device)] = group.download.shared[name]
        delta[name] = now[name] - (received - delta[name])
    return uploads._replace(delta=delta)


def discounted(uploads: Upload, scale: Sequence[float]) -> Upload:
    """Scale each delta by its staleness; sample counts weight it later, so that the two never cancel."""
    factors = beside(uploads.delta.values(), np.array(scale, dtype=np.float64))
    return uploads._replace(delta={k: _scaled(x, factors[x.device]) for k, x in uploads.delta.items()})


def _scaled(stack: Tensor, factor: Tensor) -> Tensor:
    """Multiply each row by its factor; counters, such as BatchNorm's number of batches, stay whole."""
    if not stack.is_floating_point():
        return stack
    return stack * factor.to(stack).reshape(-1, *[1] * (stack.dim() - 1))
