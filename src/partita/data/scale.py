"""The scale of features: bring them to mean 0 and deviation 1, and tell when that is likely to help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partita.core import check
from partita.data import arrays
from partita.data.federated import FederatedData
from partita.data.shifts import refuse_overlap, rows_of

BY = ("pooled", "client")
STANDARDIZE = "standardize"
SCALINGS = (STANDARDIZE, "standard")  # of the names in source["shift"]
LARGE, SMALL = 30.0, 1e-3  # root mean squares of features with which usual learning rates fail
RATIO = 100.0  # of the largest feature to the median one
_NUMBERS = 1 << 22  # of x that are looked at, or worked on, at a time


def standardize(
    data: FederatedData, *, by: str | None = None, like: FederatedData | None = None
) -> FederatedData:
    """Return data whose features have mean 0 and deviation 1 over training samples: (x − mean) / deviation.

    `by="pooled"` (the default) takes the statistics over the training samples of all clients, `by="client"`
    over those of each client, which removes differences between clients too: devices of another gain, say.
    Each feature has its own; images (uint8, or samples of three axes [channels, height, width]) have one for
    each channel, and uint8 becomes float32 in [0, 1] before. A feature that never varies becomes 0 in
    training samples; one that varies, but not at a client, is divided there by the deviation of all. A client
    without training samples has the statistics of all.

    `like` are the data of training, standardized or as they were before: clients that come later are scaled
    with the statistics of these, as a trained model expects. Scaled by client, each still has its own, and
    those of `like` stand for the statistics of all.

    >>> standardize(from_arrays(x, y, client=["ann", "ann", "bob"]))
    >>> standardize(later, like=data)
    """
    for name, given in (("data", data), ("like", data if like is None else like)):
        if not isinstance(given, FederatedData):
            raise check.fail(name, given, "a FederatedData, such as from_arrays returns")
        if given.x.dtype in (torch.int32, torch.int64):
            allowed = "real numbers or images, not ids (give counts and the like with astype('float32'))"
            raise check.fail(f"x of {'standardize' if name == 'data' else name}", str(given.x.dtype), allowed)
    by = check.choice("by", _by(like) if by is None else by, BY)
    if by == "client":
        refuse_overlap("standardize(by='client')", data)
    mean, deviation = _of_all(data) if like is None else _expected(data, like, by)
    pooled = torch.where(deviation > 0, deviation, 1.0)
    x = torch.empty_like(data.x, dtype=torch.float64 if data.x.dtype == torch.float64 else torch.float32)
    if by == "pooled":
        _scale(data.x, torch.arange(len(x)), mean, pooled, out=x)
    else:
        axes = _pooled_axes(data.x)
        x.zero_()  # rows of no client
        for i, (start, n) in enumerate(data.train.tolist()):
            centre, own = _statistics(data.x, torch.arange(start, start + n), axes) if n else (mean, pooled)
            _scale(data.x, rows_of(data, i), centre, torch.where(own > 0, own, pooled), out=x)
    shifts = [*data.source.get("shift", []), {"name": STANDARDIZE, "by": by}]
    scaling = (mean.cpu(), pooled.cpu())
    if data.scaling is not None:  # of x as it was before both
        first, size = data.scaling
        scaling = (first + size * scaling[0], size * scaling[1])
    return replace(data, x=x, source={**data.source, "shift": shifts}, scaling=scaling)


def other_scale(ours: FederatedData, theirs: FederatedData) -> str | None:
    """Return a sentence where x of other data is not scaled as ours, as far as is known, else None."""
    steps = [[s for s in d.source.get("shift", []) if s.get("name") in SCALINGS] for d in (ours, theirs)]
    advice = "the model expects x as in training; use partita.data.standardize(new, like=data)"
    if [{**s, "seed": 0} for s in steps[0]] != [{**s, "seed": 0} for s in steps[1]]:
        said = [" then ".join(_call(s) for s in some) or "not scaled" for some in steps]
        return f"data of training are {said[0]}, these are {said[1]}: {advice}"
    known = ours.scaling is not None and theirs.scaling is not None and _by(ours) == BY[0]
    if not known or all(torch.allclose(a, b) for a, b in zip(ours.scaling or (), theirs.scaling or ())):
        return None
    return f"these data are standardized with statistics of their own, not with those of training: {advice}"


def _call(step: dict[str, Any]) -> str:
    options = ", ".join(f"{k}={v!r}" for k, v in step.items() if k not in ("name", "seed"))
    return f"{step['name']}({options})"


def _by(data: FederatedData | None) -> str:
    """Return how data were standardized, 'pooled' where they were not."""
    steps = [] if data is None else [s for s in data.source.get("shift", []) if s.get("name") == STANDARDIZE]
    return str(steps[-1]["by"]) if steps else BY[0]


def _of_all(data: FederatedData) -> tuple[Tensor, Tensor]:
    """Return mean and deviation over the training samples of all clients."""
    trained = torch.from_numpy(np.flatnonzero(arrays.covered(data.train, data.rows)))
    return _statistics(data.x, trained, _pooled_axes(data.x))


def _expected(data: FederatedData, like: FederatedData, by: str) -> tuple[Tensor, Tensor]:
    """Return the statistics by which `like` was standardized, or those with which it would be."""
    if data.x.shape[1:] != like.x.shape[1:]:
        raise check.fail(
            "data: a sample of x", list(data.x.shape[1:]), f"{list(like.x.shape[1:])}, as in like"
        )
    if data.scaling is not None:
        raise check.fail(
            "data", "standardized", "data as they were before, since like says how to scale them"
        )
    if like.scaling is not None and by != _by(like):
        raise check.fail("by", by, f"{_by(like)!r}, as like was standardized")
    mean, deviation = _of_all(like) if like.scaling is None else like.scaling
    return mean.to(data.device), deviation.to(data.device)


def scale_hint(data: FederatedData) -> str | None:
    """Return a sentence where features have a scale with which usual learning rates fail, else None.

    It looks at a sample of the training rows, and at real numbers only: images and ids need no scaling.
    """
    if not data.x.is_floating_point():
        return None
    rows = np.flatnonzero(arrays.covered(data.train, data.rows))
    count = min(len(rows), max(2, _NUMBERS // max(1, data.x[:1].numel())))
    chosen = torch.from_numpy(rows[np.linspace(0, len(rows) - 1, count).round().astype(np.int64)])
    x = data.x.index_select(0, chosen.to(data.device)).reshape(count, -1).double()
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
