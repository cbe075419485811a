"""The scale of features: bring them to mean 0 and deviation 1, and tell when that is likely to help."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partita.core import check
from partita.data import arrays, columns
from partita.data.columns import Column
from partita.data.federated import FederatedData
from partita.data.mapped import Mapped
from partita.data.shifts import refuse_overlap, rows_of

BY = ("pooled", "client")
STANDARDIZE = "standardize"
SCALINGS = (STANDARDIZE, "standard")  # of the names in source["shift"]
LARGE, SMALL = 30.0, 1e-3  # root mean squares of features with which usual learning rates fail
RATIO = 100.0  # of the largest feature to the median one
_NUMBERS = 1 << 22  # of x that are looked at, or worked on, at a time


def standardize(
    data: FederatedData,
    *,
    by: str | None = None,
    like: FederatedData | None = None,
    only: str | int | None = None,
) -> FederatedData:
    """Return data whose features have mean 0 and deviation 1 over training samples: (x − mean) / deviation.

    `by="pooled"` (the default) takes the statistics over the training samples of all clients, `by="client"`
    over those of each client, which removes differences between clients too: devices of another gain, say.
    Each feature has its own; images (uint8, or samples of three axes [channels, height, width]) have one for
    each channel, and uint8 becomes float32 in [0, 1] before. A feature that never varies becomes 0 in
    training samples; one that varies, but not at a client, is divided there by the deviation of all. A client
    without training samples has the statistics of all. Of several inputs those with real numbers or images
    are standardized, or `only` the one of this name or place; entries of sequences count one by one.

    `like` are the data of training, standardized or as they were before: clients that come later are scaled
    with the statistics of these, as a trained model expects. Scaled by client, each still has its own, and
    those of `like` stand for the statistics of all.

    >>> standardize(from_arrays(x, y, client=["ann", "ann", "bob"]))
    >>> standardize(later, like=data)
    """
    for field, given in (("data", data), ("like", data if like is None else like)):
        if not isinstance(given, FederatedData):
            raise check.fail(field, given, "a FederatedData, such as from_arrays returns")
        chosen = _scaled_columns(given, only, "standardize" if field == "data" else field)
    by = check.choice("by", _by(like) if by is None else by, BY)
    if by == "client":
        refuse_overlap("standardize(by='client')", data)
    if like is not None:
        _refuse_unlike(data, like, by)
    new, scaling = {}, dict(data.scaling)
    for name in chosen:
        column = dict(columns.named(data.x))[name]
        mean, deviation = _of_all(data, name) if like is None else _expected(data, like, name)
        pooled = torch.where(deviation > 0, deviation, 1.0)
        new[name] = _standardized(data, column, mean, pooled, by)
        own = (mean.cpu(), pooled.cpu())
        if name in scaling:  # of x as it was before both
            first, size = scaling[name]
            own = (first + size * own[0], size * own[1])
        scaling[name] = own
    x = columns.each_named(lambda name, column: new.get(name, column), data.x)
    step = {"name": STANDARDIZE, "by": by, **({} if only is None else {"only": only})}
    shifts = [*data.source.get("shift", []), step]
    return replace(data, x=x, source={**data.source, "shift": shifts}, scaling=scaling)


def _scaled_columns(data: FederatedData, only: str | int | None, who: str) -> list[str]:
    """Return the names of the inputs to scale."""
    named = dict(columns.named(data.x))
    if only is not None:
        if f"x[{only!r}]" not in named:
            raise check.fail("only", only, f"one of the inputs {', '.join(named)}")
        named = {f"x[{only!r}]": named[f"x[{only!r}]"]}
    chosen = [n for n, c in named.items() if c.dtype.is_floating_point or c.dtype == torch.uint8]
    if not chosen:
        allowed = "real numbers or images, not ids (give counts and the like with astype('float32'))"
        kinds = ", ".join(str(column.dtype) for column in named.values())
        raise check.fail(f"x of {who}", kinds, allowed)
    if any(isinstance(named[name], Mapped) for name in chosen):
        allowed = (
            "data.to('cpu'), if memory holds all samples; else let the model's forward begin with "
            "(x - mean) / deviation, of some training samples such as data.client(0)[0]"
        )
        raise check.fail(f"x of {who}", "rows of a file", allowed, "files are not changed")
    return chosen


def _standardized(data: FederatedData, column: Column, mean: Tensor, pooled: Tensor, by: str) -> Column:
    """Return a column scaled by the statistics of all clients, or by those of each."""
    values = columns.entries(column)
    out = torch.empty_like(values, dtype=torch.float64 if values.dtype == torch.float64 else torch.float32)
    if by == "pooled":
        _scale(values, torch.arange(len(values)), mean, pooled, out=out)
    else:
        axes = _pooled_axes(values)
        out.zero_()  # rows of no client
        for i, (start, n) in enumerate(data.train.tolist()):
            trained = columns.places(column, torch.arange(start, start + n).to(values.device))
            centre, own = _statistics(values, trained, axes) if n else (mean, pooled)
            rows = columns.places(column, rows_of(data, i))
            _scale(values, rows, centre, torch.where(own > 0, own, pooled), out=out)
    return replace(column, values=out) if isinstance(column, columns.Ragged) else out


def other_scale(ours: FederatedData, theirs: FederatedData) -> str | None:
    """Return a sentence where x of other data is not scaled as ours, as far as is known, else None."""
    steps = [[s for s in d.source.get("shift", []) if s.get("name") in SCALINGS] for d in (ours, theirs)]
    advice = "the model expects x as in training; use partita.data.standardize(new, like=data)"
    if [{**s, "seed": 0} for s in steps[0]] != [{**s, "seed": 0} for s in steps[1]]:
        said = [" then ".join(_call(s) for s in some) or "not scaled" for some in steps]
        return f"data of training are {said[0]}, these are {said[1]}: {advice}"
    known = ours.scaling and ours.scaling.keys() == theirs.scaling.keys() and _by(ours) == BY[0]
    pairs = [pair for name in ours.scaling for pair in zip(ours.scaling[name], theirs.scaling.get(name, ()))]
    if not known or all(torch.allclose(a, b) for a, b in pairs):
        return None
    return f"these data are standardized with statistics of their own, not with those of training: {advice}"


def is_pooled(data: FederatedData) -> bool:
    """Return whether data are known to be standardized with statistics over the samples of all clients."""
    steps = [s for s in data.source.get("shift", []) if s.get("name") == STANDARDIZE]
    return any(step.get("by") == BY[0] for step in steps)


def _call(step: dict[str, Any]) -> str:
    options = ", ".join(f"{k}={v!r}" for k, v in step.items() if k not in ("name", "seed"))
    return f"{step['name']}({options})"


def _by(data: FederatedData | None) -> str:
    """Return how data were standardized, 'pooled' where they were not."""
    steps = [] if data is None else [s for s in data.source.get("shift", []) if s.get("name") == STANDARDIZE]
    return str(steps[-1]["by"]) if steps else BY[0]


def _of_all(data: FederatedData, name: str) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of an input over the training samples of all clients."""
    column = dict(columns.named(data.x))[name]
    trained = torch.from_numpy(np.flatnonzero(arrays.covered(data.train, data.rows))).to(data.device)
    values = columns.entries(column)
    return _statistics(values, columns.places(column, trained), _pooled_axes(values))


def _refuse_unlike(data: FederatedData, like: FederatedData, by: str) -> None:
    """Refuse samples of another shape, and what cannot be scaled as these others were."""
    ours, theirs = (
        [(name, columns.sample_shape(c)) for name, c in columns.named(some.x)] for some in (data, like)
    )
    if ours != theirs:
        one = len(ours) == len(theirs) == 1
        got, want = (shapes[0][1] if one else dict(shapes) for shapes in (ours, theirs))
        raise check.fail("data: a sample of x", got, f"{want}, as in like")
    if data.scaling:
        raise check.fail(
            "data", "standardized", "data as they were before, since like says how to scale them"
        )
    if like.scaling and by != _by(like):
        raise check.fail("by", by, f"{_by(like)!r}, as like was standardized")


def _expected(data: FederatedData, like: FederatedData, name: str) -> tuple[Tensor, Tensor]:
    """Return the statistics by which `like` was standardized, or those with which it would be."""
    mean, deviation = like.scaling[name] if name in like.scaling else _of_all(like, name)
    return mean.to(data.device), deviation.to(data.device)


def scale_hint(data: FederatedData) -> str | None:
    """Return a sentence where features have a scale with which usual learning rates fail, else None.

    It looks at a sample of the training rows, and at real numbers only: images and ids need no scaling.
    """
    if isinstance(data.x, tuple | dict | columns.Ragged) or not data.x.dtype.is_floating_point:
        return None
    rows = np.flatnonzero(arrays.covered(data.train, data.rows))
    count = min(len(rows), max(2, _NUMBERS // max(1, math.prod(data.x.shape[1:]))))
    chosen = torch.from_numpy(rows[np.linspace(0, len(rows) - 1, count).round().astype(np.int64)])
    x = columns.read(data.x, chosen.to(columns.home(data.x))).reshape(count, -1).double()
    size = x.square().mean(0).sqrt()[x.amax(0) > x.amin(0)]  # of features that vary
    if not len(size):
        return None
    largest, median = float(size.max()), float(size.median())
    if largest > LARGE:
        what = f"x is large: a feature is about {largest:.3g} on average"
    elif largest > 3 and largest > RATIO * median:
        what = f"features differ in scale: one is about {largest:.3g} on average, half are below {median:.2g}"
    elif largest < SMALL:
        what = f"x is small: no feature is above {largest:.2g} on average"
    else:
        return None
    return f"{what}, so that one learning rate does not fit; try data = partita.data.standardize(data)"


def _pooled_axes(x: Tensor) -> tuple[int, ...]:
    """Return the axes over which statistics are taken: rows, and the places of an image."""
    if x.ndim == 4:
        return (0, 2, 3)
    return tuple(range(x.ndim)) if x.dtype == torch.uint8 and x.ndim == 3 else (0,)


def _blocks(x: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield some rows at a time, and x there in double precision: large data are not copied as a whole."""
    size = max(1, _NUMBERS // max(1, x[:1].numel()))
    for start in range(0, len(rows), size):
        block = rows[start : start + size].to(x.device)
        yield block, arrays.decode(x.index_select(0, block)).double()


def _statistics(x: Tensor, rows: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return mean and deviation over some rows; 0 for the deviation of what varies by rounding only."""
    count = len(rows) * int(np.prod([x.shape[a] for a in axes[1:]]))
    zero = torch.zeros((), dtype=torch.float64, device=x.device)
    mean = sum((values.sum(axes, keepdim=True) for _, values in _blocks(x, rows)), zero) / count
    squares = sum(((v - mean).square().sum(axes, keepdim=True) for _, v in _blocks(x, rows)), zero)
    deviation = (squares / count).sqrt()
    rounding = torch.finfo(x.dtype if x.is_floating_point() else torch.float32).eps * mean.abs()
    return mean, torch.where(deviation > rounding, deviation, 0.0)


def _scale(x: Tensor, rows: Tensor, mean: Tensor, deviation: Tensor, *, out: Tensor) -> None:
    for block, values in _blocks(x, rows):
        out.index_copy_(0, block, ((values - mean) / deviation).to(out.dtype))
