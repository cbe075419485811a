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
    progress = tuple([group.progress[i] for i in rows]) if group.progress else ()
    return group._replace(positions=tuple(positions), download=download, progress=progress)


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


class RunningSum:
    """What shares were combined to, added up as it comes: Δ = Σ_p w_p Δ_p / Σ_p w_p; sums and extras add up.

    Shares are added in their order, whichever comes first, so that roundings are the same each time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._next = device, 0
        self._early: dict[int, Upload | None] = {}
        self._kinds: dict[str, torch.dtype] | None = None  # of the deltas, once several are added up
        self._total: Upload | None = None

    def add(self, number: int, part: Upload | None) -> None:
        """Add a share, whose memory is only lent; None: nothing of it was usable."""
        if number != self._next:
            self._early[number] = tree.map_tensors(torch.clone, part)
            return
        self._fold(part)
        while self._next in self._early:
            self._fold(self._early.pop(self._next))

    def _fold(self, part: Upload | None) -> None:
        self._next += 1
        if part is None:
            return
        part = tree.to(part, self._device)
        assert part.weight is not None
        weight, total = float(part.weight), self._total
        if total is None or total.weight is None:
            self._total = tree.map_tensors(torch.clone, part)  # the only one stays as it is
            return
        if self._kinds is None:
            self._kinds, first = {k: v.dtype for k, v in total.delta.items()}, float(total.weight)
            total = total._replace(delta={k: v.to(_wide(v)).mul_(first) for k, v in total.delta.items()})
        for name, value in part.delta.items():
            total.delta[name].add_(value, alpha=weight)
        for ours, theirs in ((total.extra, part.extra), (total.sums, part.sums)):
            for name, value in theirs.items():
                ours[name] += value
        assert total.weight is not None
        self._total = total._replace(weight=total.weight + part.weight)

    def result(self) -> Upload | None:
        """Return all of them as one; None if nothing was usable."""
        total, kinds = self._total, self._kinds
        if total is None or kinds is None:
            return total
        assert total.weight is not None
        weight = float(total.weight) or 1.0
        means = {k: v.div_(weight) for k, v in total.delta.items()}
        # counters, such as BatchNorm's number of batches, stay whole
        delta = {
            k: v.to(kinds[k]) if kinds[k].is_floating_point else v.round().to(kinds[k])
            for k, v in means.items()
        }
        return total._replace(delta=delta)


def _wide(value: Tensor) -> torch.dtype:
    """Return the type to add up in: float32 for what is shorter, float64 for counters."""
    if not value.is_floating_point():
        return torch.float64
    return torch.float32 if torch.finfo(value.dtype).bits < 32 else value.dtype


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
