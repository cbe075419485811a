"""The samples of a probe: what all clients pass through their models, so that these can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partita.core import check, draws
from partita.core.inputs import single
from partita.core.parts import Measure, Problem
from partita.core.types import Download, Tensors
from partita.data import FederatedData, arrays, columns
from partita.data.federated import SPLITS

PROBE = "probe"
SAMPLES = "a tensor or an array of at least 2 samples"


def samples_or_count(field: str, value: Any) -> Any:
    """Return the samples of a probe, or how many to take of the clients' test samples."""
    if isinstance(value, Tensor | np.ndarray):
        if value.ndim == 0 or len(value) < 2:
            raise check.fail(f"shape of {field}", list(value.shape), SAMPLES)
        return value
    try:
        return check.integer(field, value, low=2)
    except check.Refused as error:
        raise check.fail(field, value, f"{error.allowed}, or {SAMPLES}") from None


def described(x: Any) -> int | str:
    """Describe the samples of a probe in a few words that tell them from others."""
    if isinstance(x, int):
        return x
    values = x.detach().double().cpu().numpy() if isinstance(x, Tensor) else x
    values = values.astype(np.float64) if values.dtype.kind in "biuf" else values  # all else is refused later
    digest = hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()
    return f"{len(x)} samples of shape {list(x.shape[1:])}, {digest[:16]}"


def probed(download: Download) -> tuple[Tensor, Download]:
    """Return the samples, and what the client received beside them."""
    extra = {k: v for k, v in download.extra.items() if k != PROBE}
    return download.extra[PROBE], download._replace(extra=extra)


def probe_samples(measure: Measure, data: FederatedData, seed: int) -> Tensors:
    """Return the samples of a measure's probe as the model takes them, on the device of the data."""
    if measure.probe is None:
        return {}
    if isinstance(measure.probe.x, int):
        return {PROBE: single(data.gather(_unseen(data, measure.probe.x, seed))[0], "a probe of samples")}
    given = columns.in_memory(arrays.features(measure.probe.x), "a probe")
    arrays.finite("x", given, lambda row: "the probe")  # noqa: ARG005
    like = single(data.gather(torch.zeros(1, dtype=torch.int64))[0], "a probe of samples")
    x = arrays.decode(given)
    both_real = x.is_floating_point() and like.is_floating_point()
    return {PROBE: x.to(like.device, like.dtype if both_real else x.dtype)}


def _unseen(data: FederatedData, count: int, seed: int) -> Tensor:
    """Draw rows among the clients' test samples that no client trains on."""
    covered = {name: arrays.covered(data.ranges(name), data.rows) for name in SPLITS}
    free = np.flatnonzero(covered["test"] & ~covered["train"])
    if count > len(free):
        reason = "so many of the clients' test samples are none that a client trains on"
        raise check.fail("x", count, f"samples, or at most {len(free)}: {reason}")
    return torch.from_numpy(np.sort(draws.generator(seed, "probe").choice(free, count, replace=False)))


def try_probe(
    measure: Measure, problem: Problem, params: Mapping[str, Any], data: FederatedData, seed: int
) -> None:
    """Refuse samples that the model does not take, and blocks that it does not have, before any work."""
    if measure.probe is None:
        return
    try:
        x = probe_samples(measure, data, seed)[PROBE][:2]
        _pass(problem, dict(params), x)
        problem.outputs(dict(params), x, measure.probe.blocks)
    except check.Refused as error:
        raise error.within(f"measure {measure.name}") from error


def _pass(problem: Problem, params: Tensors, x: Tensor) -> None:
    try:
        problem.outputs(params, x, ())
    except Exception as error:  # any module may fail in its own way
        reason = check.reason(error)
        samples = f"samples of shape {list(x.shape[1:])}, {x.dtype}"
        raise check.fail("x", samples, f"samples that the model takes: {reason}") from error
