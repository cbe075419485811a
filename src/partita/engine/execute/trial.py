"""A trial before any work: is a faster way of computing the same as the reference, for this model?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partita.core import tree
from partita.core.asks import COUNTS, PREVIOUS, RECEIVED
from partita.core.criterion import LOSSES
from partita.core.inputs import each
from partita.core.types import Batch, Inputs, Tensors
from partita.data import FederatedData
from partita.engine.execute.refusal import (
    explained,
    first_difference,
    layer_outputs,
    refusing_slow_operations,
)
from partita.engine.execute.stack import Stack, lift
from partita.engine.model.by_sample import TrialSize, not_by_sample, rows_of_several
from partita.engine.model.features import assumed
from partita.engine.model.probe import evaluated, first_samples
from partita.engine.model.problem import ModelProblem

ALL = TrialSize()
TOLERANCE = 1e-3
ROUNDINGS = 8  # of the coarsest numbers in a model, by which gradients may differ
DIFFERENT = (
    "its gradients differ when clients are stacked: a layer or the loss mixes the samples of a "
    "batch, or draws random numbers of its own"
)
OF_NUMBERS = (
    "the model computes its loss by itself, and among targets that are numbers there is none that does not "
    "count, which the padding of short batches needs; pass the loss as a function of (output, target)"
)
COUNTS_PADDING = "its statistics differ when clients are stacked: a layer counts the padding of short batches"


def not_stackable(
    loop: ModelProblem,
    stacked: ModelProblem,
    params: Tensors,
    data: FederatedData,
    batch: int = 3,
    trial: TrialSize = ALL,
) -> str:
    """Return why two stacked clients do not get the gradients that each would get alone; '' if they do.

    They are tried with batches of this size, full ones and a padded one: a model may treat large batches in
    another way than small ones. Roundings grow in some models until single precision cannot tell: then double
    precision decides. A loss of the user's is tried on more samples, unless their outputs are large.
    """
    if loop.forward.labels and data.y.is_floating_point():
        return OF_NUMBERS
    if loop.loss not in LOSSES.values() and not loop.forward.labels:
        samples = data.fixed()  # outputs of one width
        output = evaluated(loop.evaluation, samples, loop.forward, trial, params)
        reason = not_by_sample(loop.loss, output, samples, _assumed(loop, params, samples, output))
        if reason:
            return reason
    x, y = data.gather(_rows_of_two(data, batch))
    for sizes in ((batch, batch - max(1, batch // 3)), (batch, batch)):
        reason = _compare(loop, stacked, params, x, y, sizes)
        if reason in (DIFFERENT, COUNTS_PADDING) and _same_in_double(loop, stacked, params, x, y, sizes):
            continue
        if reason == DIFFERENT:
            return DIFFERENT + _first_different(loop, stacked, params, x, y, sizes)
        if reason:
            return reason
    return ""


def _assumed(loop: ModelProblem, params: Tensors, data: FederatedData, output: Tensor) -> dict[str, Any]:
    """Return what the loss may ask for on the samples of several clients."""
    if loop.layout is None or not loop.loss.asks:
        return {}
    x, y = data.gather(rows_of_several(data, len(output)))
    batch = Batch(x, y, None, torch.zeros((), dtype=torch.int64, device=y.device))
    features = [loop.features(params, batch)] if loop.layout.shape else []
    return assumed(loop.layout, x, y, output, features)


def _given(problem: ModelProblem, params: Tensors) -> dict[str, Any]:
    """Return other models, and counts of classes, for a loss that asks for them."""
    if problem.layout is None or not problem.loss.asks:
        return {}
    counts = torch.arange(1, problem.layout.classes + 1, device=next(iter(params.values())).device)
    return {RECEIVED: _scaled(params, 0.9), PREVIOUS: _scaled(params, 0.8), COUNTS: counts.double()}


def _scaled(params: Tensors, factor: float) -> Tensors:
    return {k: v * factor if v.is_floating_point() else v for k, v in params.items()}


def _same_in_double(
    loop: ModelProblem, stacked: ModelProblem, params: Tensors, x: Inputs, y: Tensor, sizes: tuple[int, int]
) -> bool:
    def wide(t: Tensor) -> Tensor:
        return t.double() if t.is_floating_point() else t

    try:
        params, x, y = tree.map_tensors(wide, (params, x, y))
        return _compare(loop, stacked, params, x, y, sizes) == ""
    except Exception:  # constants of its own in single precision: nothing is shown
        return False


def _compare(
    loop: ModelProblem, stacked: ModelProblem, params: Tensors, x: Inputs, y: Tensor, sizes: tuple[int, int]
) -> str:
    """Return what differs between two stacked clients with so many samples and each of them alone, if any."""
    given, tolerance = _given(loop, params), _tolerance(loop)
    models, batches = _stacks(params, x, y, sizes)
    try:
        with refusing_slow_operations():
            result = lift(
                lambda p, b: stacked.grad(p, b._replace(given=given), stacked.trainable), models, batches
            )
            loss, gradient, buffers = result.full()
            lift(lambda p, b: stacked.score(p, b._replace(given=given)), models, batches)
    except Exception as error:  # any module may fail in its own way; the loop runs them all
        return explained(stacked, error)
    for i, n in enumerate(sizes):
        batch = _batch(x, y, i, n)._replace(given=given)
        alone, expected, after = loop.grad(params, batch, loop.trainable)
        pairs = (tree.row(gradient, i), expected), ({"loss": loss[i]}, {"loss": alone})
        if any(_differ(mine, reference, tolerance) for mine, reference in pairs):
            return DIFFERENT
        if _differ(tree.row(buffers, i), after, tolerance):
            return COUNTS_PADDING
    return ""


def _first_different(
    loop: ModelProblem, stacked: ModelProblem, params: Tensors, x: Inputs, y: Tensor, sizes: tuple[int, int]
) -> str:
    """Return the layer from which on a client in a stack gets other outputs than alone, in words."""
    given = _given(loop, params)
    try:
        result = lift(
            lambda p, b: layer_outputs(stacked, p, b._replace(given=given)), *_stacks(params, x, y, sizes)
        )
        outputs = result.full()
        for i, n in enumerate(sizes):
            alone = layer_outputs(loop, params, _batch(x, y, i, n)._replace(given=given))
            layer = first_difference(stacked, tree.row(outputs, i), alone, n, y.shape[1])
            if layer:
                return f"; the first output to differ is that of {layer}"
    except Exception:  # a layer may refuse to be watched: the reason stays without its name
        pass
    return ""


def _stacks(params: Tensors, x: Inputs, y: Tensor, sizes: tuple[int, int]) -> tuple[Stack, Stack]:
    """Return two clients with the same model and so many samples each, the shorter batch padded."""
    short = torch.arange(y.shape[1], device=y.device) < torch.tensor(sizes, device=y.device)[:, None]
    keys = torch.arange(2, device=y.device)
    batches = Stack.of(Batch(x, y, None if bool(short.all()) else short.float(), keys), 2, rows=True)
    return Stack.of(tree.map_tensors(lambda t: t.expand(2, *t.shape).clone(), params), 2, rows=True), batches


def _batch(x: Inputs, y: Tensor, i: int, size: int) -> Batch:
    """Return the batch of one of these clients alone."""
    return Batch(each(lambda t: t[i, :size], x), y[i, :size], None, torch.tensor(i, device=y.device))


def takes_channels_last(problem: ModelProblem, params: Tensors, data: FederatedData) -> bool:
    """Return whether a model with convolutions computes the same with channels last, on a CPU.

    Some cannot: a `view` of what a convolution puts out needs them first.
    """
    x, y = first_samples(data)
    able = y.device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not able or all(v.dim() != 4 for v in params.values()):
        return False
    batch = Batch(x, y, None, torch.zeros((), dtype=torch.int64), None, _given(problem, params))
    try:
        first, last = (_computed(p, params, batch) for p in (problem, replace(problem, last=True)))
    except Exception:  # any module may fail in its own way
        return False
    return not any(_differ(value, expected) for value, expected in zip(last, first))


def _computed(problem: ModelProblem, params: Tensors, batch: Batch) -> tuple[Tensors, Tensors]:
    """Return gradients and scores of a batch."""
    _, gradient, _ = problem.grad(params, batch, problem.trainable)
    scores = problem.score(params, batch)
    return gradient, {"metric": scores.metric, "loss": scores.loss}


def _tolerance(problem: ModelProblem) -> float:
    """Return what roundings may explain, where frozen parameters are of 16 bits or less."""
    kinds = {p.dtype for p in problem.training.parameters() if p.is_floating_point()}
    return max([TOLERANCE, *(ROUNDINGS * torch.finfo(kind).eps for kind in kinds if kind.itemsize < 4)])


def _differ(tensors: Tensors, expected: Tensors, tolerance: float = TOLERANCE) -> bool:
    tensors, expected = ({k: v.double() for k, v in x.items()} for x in (tensors, expected))
    return bool(tree.norm(tree.sub(tensors, expected)) > tolerance * (tree.norm(expected) + 1e-3))


def _rows_of_two(data: FederatedData, count: int) -> Tensor:
    """Return `count` rows of each of the two largest clients, some again; of one, if others have too few."""
    order = np.argsort(-data.train[:, 1], kind="stable")
    first, second = order[0], order[min(1, len(order) - 1)]
    chosen = data.train[[first, second if data.train[second, 1] >= 3 else first]]
    rows = np.stack([start + np.arange(count) % size for start, size in chosen])
    return torch.from_numpy(rows).to(data.device)
