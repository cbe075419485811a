"""Aggregation over those who hold a tensor, or a part of it: clients of different capacity.

    Δ[c] = aggregate(Δ_i[c] : i holds c)   for every coordinate c,   0 if nobody in the cohort holds it

Coordinates that the same classes of devices hold are a region, handled together as one vector. Each region is
an aggregation of its own, over other clients: its key is its own, so that it repeats no other region's draws.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from partita.core import draws, tree
from partita.core.types import Tensors, Upload
from partita.engine.screen import read_upload

Shapes = Mapping[str, tuple[int, ...]]
Aggregate = Callable[[Upload, Tensor], Upload]
Forge = Callable[[Upload, tuple[int, ...], Tensor], Mapping[int, Upload]]


class SharedRegion(NamedTuple):
    """Coordinates that the same classes hold: by name, which of the flattened tensor (None: all)."""

    classes: frozenset[int]
    columns: Mapping[str, Tensor | None]


def held_by(
    whole: Shapes, classes: Sequence[Shapes], device: torch.device | str = "cpu"
) -> list[SharedRegion]:
    """Return the regions of a model. A class holds the leading part of a tensor, in its shape, or none of it.

    What no class holds is a region without classes.
    """
    regions: dict[frozenset[int], dict[str, Tensor | None]] = {}
    for name, shape in whole.items():
        holders = torch.zeros(shape, dtype=torch.int64)  # of each coordinate, a bit for each class
        for number, part in enumerate(classes):
            if name in part:
                holders[tuple(slice(0, n) for n in part[name])] += 1 << number
        for bits in torch.unique(holders).tolist():
            columns = (holders.reshape(-1) == bits).nonzero().squeeze(1)
            everywhere = len(columns) == holders.numel()
            numbers = frozenset(i for i in range(len(classes)) if bits >> i & 1)
            regions.setdefault(numbers, {})[name] = None if everywhere else columns.to(device)
    return [SharedRegion(numbers, columns) for numbers, columns in regions.items()]


def over_holders(aggregate: Aggregate, regions: Sequence[SharedRegion], class_of: Sequence[int]) -> Aggregate:
    """Return the method's own aggregation, applied to each region over the clients that hold it.

    class_of: the class of each client. Of what nobody in the cohort holds, delta is not in the result, or
    zero, and `sums` are zero. `extra`, and what is no tensor of the model, belongs to all clients. The server
    divides `sums` by the number of all clients: they are scaled, to be divided by the number of holders.
    """
    members = Counter(class_of)
    in_regions = {name for region in regions for name in region.columns}

    def combine(uploads: Upload, key: Tensor) -> Upload:
        assert uploads.client is not None
        classes = [class_of[c] for c in uploads.client.tolist()]
        others = {k: None for k in (*uploads.delta, *uploads.sums) if k not in in_regions}
        delta: Tensors = {}
        extra: Tensors = {}
        sums: Tensors = {}
        metrics: Tensors = {}
        everyone = SharedRegion(frozenset(members), others)
        parts = (*regions, everyone) if others or uploads.extra else regions
        for number, region in enumerate(parts):
            rows = [i for i, each in enumerate(classes) if each in region.classes]
            held = _held(uploads, region, rows, uploads.extra if region is everyone else {})
            if held is None:
                continue
            combined = aggregate(held, _region_key(key, number, len(parts)))
            share = sum([members[each] for each in region.classes]) / len(class_of)
            _fill(delta, combined.delta, uploads.delta, region)
            _fill(sums, {k: v / share for k, v in combined.sums.items()}, uploads.sums, region)
            extra |= combined.extra
            prefix = f"part{number}." if len(regions) > 1 else ""
            metrics |= {f"{prefix}{k}": _in_cohort(k, v, rows) for k, v in combined.metrics.items()}
        sums |= {k: v.new_zeros(v.shape[1:]) for k, v in uploads.sums.items() if k not in sums}
        weight = None if uploads.weight is None else uploads.weight.sum()
        return Upload(delta, weight, extra, sums, metrics)

    return combine


def forged_by_holders(forge: Forge, regions: Sequence[SharedRegion], class_of: Sequence[int]) -> Forge:
    """Return an attack that sees, of each region of the model, the clients that hold it.

    Of what it does not hold, a Byzantine client sends what it computed. An upload that does not fit the model
    (`malformed`) is sent as it is.
    """

    def forge_regions(uploads: Upload, byzantine: tuple[int, ...], key: Tensor) -> dict[int, Upload]:
        assert uploads.client is not None
        classes = [class_of[c] for c in uploads.client.tolist()]
        sent = {i: Upload(*tree.row(uploads[:4], i)) for i in byzantine}
        malformed: dict[int, Upload] = {}
        for number, region in enumerate(regions):
            rows = [i for i, each in enumerate(classes) if each in region.classes]
            held = _held(uploads, region, rows, {})
            byzantine_holders = tuple([rows.index(i) for i in byzantine if i in rows])
            if held is None or not byzantine_holders:
                continue
            forged = forge(held, byzantine_holders, _region_key(key, number, len(regions)))
            for place in byzantine_holders:
                if place not in forged:
                    continue
                upload, fault = read_upload(forged[place], held)
                if fault:
                    malformed[rows[place]] = forged[place]
                else:
                    sent[rows[place]] = _replaced(sent[rows[place]], upload, region)
        return {**sent, **malformed}

    return forge_regions


def _region_key(key: Tensor, number: int, regions: int) -> Tensor:
    """Return the key of a region; one that is all of the model has the key of the model."""
    return key if regions == 1 else draws.branch(key, "part", number)


def _replaced(upload: Upload, forged: Upload, region: SharedRegion) -> Upload:
    """Return an upload with a region of it replaced."""
    delta, sums = (
        {**old, **{k: with_columns(old[k], region.columns[k], value) for k, value in new.items()}}
        for old, new in ((upload.delta, forged.delta), (upload.sums, forged.sums))
    )
    return upload._replace(delta=delta, sums=sums, weight=forged.weight)


def with_columns(tensor: Tensor, columns: Tensor | None, values: Tensor) -> Tensor:
    """Return a tensor with these columns of its flattened form replaced (None: all)."""
    if columns is None:
        return values
    return tensor.reshape(-1).index_copy(0, columns, values).view(tensor.shape)


def _in_cohort(metric: str, value: Tensor, rows: list[int]) -> Tensor:
    """Return who was chosen by the place in the cohort, not among the holders; other metrics as they are."""
    if metric.rpartition(".")[2] != "chosen":
        return value
    return torch.as_tensor(rows, device=value.device)[value]


def _held(uploads: Upload, region: SharedRegion, rows: list[int], extra: Tensors) -> Upload | None:
    """Return the region of the uploads in these rows; None if nobody sends anything of it."""
    delta, sums = (tree.pick(x, [k for k in region.columns if k in x]) for x in (uploads.delta, uploads.sums))
    if not rows or not (delta or sums or extra):
        return None
    held = uploads._replace(delta=delta, extra=extra, sums=sums)
    assert uploads.client is not None
    if len(rows) < len(uploads.client):
        held = tree.rows(held, rows)
    return held._replace(delta=_columns(held.delta, region), sums=_columns(held.sums, region))


def _columns(stacks: Tensors, region: SharedRegion) -> Tensors:
    """Return the region's columns of stacked tensors."""
    return {
        name: stacks[name] if columns is None else stacks[name].reshape(len(stacks[name]), -1)[:, columns]
        for name, columns in region.columns.items()
        if name in stacks
    }


def _fill(whole: Tensors, values: Tensors, stacks: Tensors, region: SharedRegion) -> None:
    """Put what was aggregated in its place in the whole model, in place."""
    for name, value in values.items():
        columns = region.columns[name]
        if columns is None:
            whole[name] = value
            continue
        if name not in whole:
            whole[name] = value.new_zeros(stacks[name].shape[1:])
        whole[name].view(-1)[columns] = value.reshape(-1)
