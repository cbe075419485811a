"""Aggregation over those who hold a tensor, or a part of it: clients of different capacity.

    Δ[c] = aggregate(Δ_i[c] : i holds c)   for every coordinate c,   0 if nobody in the cohort holds it

Coordinates that the same classes of devices hold are handled together, as one vector. Each such part is an
aggregation of its own, over other clients: its key is its own, so that it repeats no other part's draws.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from partita.core import draws, tree
from partita.core.types import Tensors, Upload
from partita.engine.screen import taken

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
    """Who holds what. A class has the leading part of a tensor, in the shape that it says, or none of it.

    What no class holds is among it, too, with no classes.
    """
    found: dict[frozenset[int], dict[str, Tensor | None]] = {}
    for name, shape in whole.items():
        kinds = torch.zeros(shape, dtype=torch.int64)
        for number, part in enumerate(classes):
            if name in part:
                kinds[tuple(slice(0, n) for n in part[name])] += 1 << number
        for bits in torch.unique(kinds).tolist():
            columns = (kinds.reshape(-1) == bits).nonzero().squeeze(1)
            everywhere = len(columns) == kinds.numel()
            holders = frozenset(i for i in range(len(classes)) if bits >> i & 1)
            found.setdefault(holders, {})[name] = None if everywhere else columns.to(device)
    return [SharedRegion(classes, columns) for classes, columns in found.items()]


def over_holders(aggregate: Aggregate, held: Sequence[SharedRegion], kinds: Sequence[int]) -> Aggregate:
    """The method's own aggregation, on each part of the model over those who hold it.

    kinds: the class of each client. Of what nobody in the cohort holds, delta is not in the result, or zero,
    and `sums` are zero. `extra`, and what is no tensor of the model, is everybody's. The server divides
    `sums` by the number of all clients: they are scaled, to be divided by the holders'.
    """
    members = Counter(kinds)
    known = {name for part in held for name in part.columns}

    def combine(uploads: Upload, key: Tensor) -> Upload:
        assert uploads.client is not None
        classes = [kinds[c] for c in uploads.client.tolist()]
        others = {k: None for k in (*uploads.delta, *uploads.sums) if k not in known}
        delta: Tensors = {}
        extra: Tensors = {}
        sums: Tensors = {}
        notes: Tensors = {}
        everyone = SharedRegion(frozenset(members), others)
        parts = (*held, everyone) if others or uploads.extra else held
        for number, part in enumerate(parts):
            rows = [i for i, kind in enumerate(classes) if kind in part.classes]
            some = _part(uploads, part, rows, uploads.extra if part is everyone else {}) if rows else None
            if some is None:
                continue
            done = aggregate(some, _own(key, number, len(parts)))
            share = sum([members[kind] for kind in part.classes]) / len(kinds)
            _fill(delta, done.delta, uploads.delta, part)
            _fill(sums, {k: v / share for k, v in done.sums.items()}, uploads.sums, part)
            extra |= done.extra
            prefix = f"part{number}." if len(held) > 1 else ""
            notes |= {f"{prefix}{k}": _of_all(k, v, rows) for k, v in done.metrics.items()}
        sums |= {k: v.new_zeros(v.shape[1:]) for k, v in uploads.sums.items() if k not in sums}
        weight = None if uploads.weight is None else uploads.weight.sum()
        return Upload(delta, weight, extra, sums, notes)

    return combine


def forged_by_holders(forge: Forge, held: Sequence[SharedRegion], kinds: Sequence[int]) -> Forge:
    """What liars send: on each part of the model the attack sees those who hold it, as the aggregator does.

    Of what it does not hold, a liar sends what it would. What does not fit (`malformed`) is sent as it is.
    """

    def lie(uploads: Upload, liars: tuple[int, ...], key: Tensor) -> dict[int, Upload]:
        assert uploads.client is not None
        classes = [kinds[c] for c in uploads.client.tolist()]
        sent = {i: _row_of(uploads, i) for i in liars}
        odd: dict[int, Upload] = {}
        for number, part in enumerate(held):
            rows = [i for i, kind in enumerate(classes) if kind in part.classes]
            some = _part(uploads, part, rows, {}) if rows else None
            there = tuple([rows.index(i) for i in liars if i in rows])
            if some is None or not there:
                continue
            forged = forge(some, there, _own(key, number, len(held)))
            for place in there:
                if place not in forged:
                    continue
                lies, wrong = taken(forged[place], some)
                if wrong:
                    odd[rows[place]] = forged[place]
                else:
                    sent[rows[place]] = _replaced(sent[rows[place]], lies, part)
        return {**sent, **odd}

    return lie


def _own(key: Tensor, number: int, parts: int) -> Tensor:
    """The key of a part; what is all of the model has the key of the model."""
    return key if parts == 1 else draws.branch(key, "part", number)


def _row_of(uploads: Upload, i: int) -> Upload:
    return Upload(*tree.row(uploads[:4], i))


def _replaced(own: Upload, lies: Upload, part: SharedRegion) -> Upload:
    """The upload with some columns of it replaced."""
    delta, sums = ({**x} for x in (own.delta, own.sums))
    for whole, values in ((delta, lies.delta), (sums, lies.sums)):
        for name, value in values.items():
            where = part.columns[name]
            if where is None:
                whole[name] = value
            else:
                flat = whole[name].reshape(-1).index_copy(0, where, value)
                whole[name] = flat.view(whole[name].shape)
    return own._replace(delta=delta, sums=sums, weight=lies.weight)


def _of_all(note: str, value: Tensor, rows: list[int]) -> Tensor:
    """Who was chosen, by the place in the cohort and not among the holders."""
    if note.rpartition(".")[2] != "chosen":
        return value
    return torch.as_tensor(rows, device=value.device)[value]


def _part(uploads: Upload, part: SharedRegion, rows: list[int], extra: Tensors) -> Upload | None:
    """Some columns of some clients; nothing if no one sends any of these names."""
    delta, sums = (tree.pick(x, [k for k in part.columns if k in x]) for x in (uploads.delta, uploads.sums))
    if not delta and not sums and not extra:
        return None
    some = uploads._replace(delta=delta, extra=extra, sums=sums)
    assert uploads.client is not None
    if len(rows) < len(uploads.client):
        some = tree.rows(some, rows)
    return some._replace(delta=_columns(some.delta, part), sums=_columns(some.sums, part))


def _columns(stacks: Tensors, part: SharedRegion) -> Tensors:
    found = {}
    for name, where in part.columns.items():
        if name in stacks:
            x = stacks[name]
            found[name] = x if where is None else x.reshape(len(x), -1)[:, where]
    return found


def _fill(whole: Tensors, values: Tensors, stacks: Tensors, part: SharedRegion) -> None:
    """Puts what was aggregated in its place."""
    for name, value in values.items():
        where = part.columns[name]
        if where is None:
            whole[name] = value
            continue
        if name not in whole:
            whole[name] = value.new_zeros(stacks[name].shape[1:])
        whole[name].view(-1)[where] = value.reshape(-1)
