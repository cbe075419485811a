"""Is the value of a loss on a batch the mean of its values on the samples?

Stacked clients with short batches need that. Functions of users are tried on
samples of several clients, as they are and with made-up outputs and targets that exclude coincidences: all
classes, unevenly often, labels that do not count, sequences of several lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from partita.core import check
from partita.core.asks import FEATURES, of_samples
from partita.core.criterion import Criterion
from partita.core.inputs import each
from partita.data import FederatedData

TRIAL_CLIENTS, SAMPLES_PER_CLIENT = 8, 8
TRIAL_BYTES = 1 << 26  # of outputs of a trial: those of a language model are large
FEW = 4  # samples that pass through a large model at once
BATCH_SIZES = (64, 37, 5)
SEARCHED_TARGETS = 1 << 16  # for values that are rare
PAIRED_TRIALS = 2  # that pair each output with its own target
TOLERANCE = 1e-4

NOT_TRIED = (
    "its loss could be tried on no other pairs of outputs and targets than the first of the data, so that it "
    "is not known whether it is a mean over samples"
)
NOT_BY_SAMPLE = (
    "its loss on a batch is not the mean of its values on the samples, which short batches need; pass one of "
    "torch's own (nn.CrossEntropyLoss(weight=...) and the like) as it is, or a named loss"
)


class TrialSize(NamedTuple):
    """How many samples of several clients a trial has, and how many pass through the model at once."""

    samples: int = TRIAL_CLIENTS * SAMPLES_PER_CLIENT
    at_once: int = TRIAL_CLIENTS * SAMPLES_PER_CLIENT

    @staticmethod
    def of(saved: int, output: int) -> TrialSize:
        """Return the size where a sample has so many bytes, of what autograd saves and of its output."""
        most = TRIAL_BYTES // (TRIAL_CLIENTS * max(1, output))
        samples = TRIAL_CLIENTS * max(1, min(SAMPLES_PER_CLIENT, most))
        return TrialSize(samples, samples if samples * saved <= 4 * TRIAL_BYTES else FEW)


def rows_of_several(data: FederatedData, count: int) -> Tensor:
    """Return so many training samples: of the largest client and of others, as many of each (some again)."""
    order = np.argsort(-data.train[:, 1], kind="stable")
    order = order[data.train[order, 1] > 0]
    chosen = order[np.linspace(0, len(order) - 1, TRIAL_CLIENTS).astype(np.int64)]
    rows = [start + np.arange(count // TRIAL_CLIENTS) % size for start, size in data.train[chosen]]
    return torch.from_numpy(np.concatenate(rows)).to(data.device)


def not_by_sample(
    loss: Criterion, output: Tensor, data: FederatedData, given: Mapping[str, Any] | None = None
) -> str:
    """Return why a loss cannot be taken of batches with padding; '' if value and gradient agree.

    `given` is what it may ask for on the samples of these outputs; other trials have other rows of it.
    """
    tried = 0
    asked = {k: (given or {})[k] for k in loss.asks}
    for trial, (scores, target) in enumerate(_trials(output, data)):
        rows = (torch.arange(len(target), device=output.device) + trial) % len(output)
        real = len(target) - len(target) // 4
        mask = (torch.arange(len(target), device=scores.device) < real).float()
        try:
            whole = _with_gradient(loss, scores[:real], target[:real], None, _rows(asked, rows[:real]))
        except Exception:  # what was made up need not be possible
            continue
        if not all(bool(torch.isfinite(x).all()) for x in whole):
            continue
        tried += 1
        try:
            padded = _with_gradient(loss, scores, target, mask, _rows(asked, rows))
        except Exception as error:
            return f"its loss fails on one sample: {check.reason(error)[:200]}"
        padded = (padded[0], *[g[:real] for g in padded[1:]])
        for value, expected in zip(padded, whole):
            if not (value - expected).norm() <= TOLERANCE * (expected.norm() + TOLERANCE):
                return NOT_BY_SAMPLE
    return "" if tried > PAIRED_TRIALS else NOT_TRIED


def _with_gradient(
    loss: Criterion, output: Tensor, target: Tensor, mask: Tensor | None, given: dict[str, Any]
) -> tuple[Tensor, ...]:
    """Return the value, and its gradient with respect to outputs and features."""
    with torch.enable_grad():
        output = output.detach().requires_grad_()
        moving = [output]
        if FEATURES in given:
            given[FEATURES] = given[FEATURES].detach().requires_grad_()
            moving.append(given[FEATURES])
        value = loss.of_batch(output, target, mask, given)
        gradient = torch.autograd.grad(value, moving, allow_unused=len(moving) > 1)
        zeros = (torch.zeros_like(x) for x in moving)
        return value.detach(), *(zero if g is None else g for g, zero in zip(gradient, zeros))


def _rows(given: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:
    return {k: each(lambda t: t[rows], v) if of_samples(k) else v for k, v in given.items()}


def _trials(output: Tensor, data: FederatedData) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield outputs and targets, as they are and made up.

    A loss may take probabilities only, or positive numbers: made-up targets also meet outputs of the model.
    """
    target = data.gather(rows_of_several(data, len(output)))[1]
    draw = torch.Generator().manual_seed(0)
    order = torch.randperm(len(target), generator=draw).to(target.device)
    yield output, target
    yield output[order], target[order]  # several clients in each part of the batch
    spread = output.float().std().clamp(min=1e-3).to(output.dtype) if output.is_floating_point() else 1
    values = values_of(data.y)
    for size in sorted({min(n, len(output)) for n in BATCH_SIZES}, reverse=True):
        noise = torch.randn(size, *output.shape[1:], generator=draw).to(output)
        resampled = output[torch.randint(len(output), (size,), generator=draw).to(output.device)]
        for labels in made_up(target, size, values, draw):
            yield 3 * spread * noise, labels
            yield resampled, labels


def values_of(y: Tensor) -> Tensor:
    """Return values that targets take, in order, with the smallest and the largest, however rare."""
    flat = y.flatten()
    spaced = flat[:: max(1, len(flat) // SEARCHED_TARGETS)]
    values: Tensor = torch.unique(torch.cat([spaced, flat.min()[None], flat.max()[None]]))
    return values.cpu()


def made_up(target: Tensor, size: int, values: Tensor, draw: torch.Generator) -> Iterator[Tensor]:
    """Yield targets of the data's kind; the smallest or largest value may mean 'does not count'."""
    shape, low, high = (size, *target.shape[1:]), values[0], values[-1]
    uneven = torch.rand(shape, generator=draw).square()  # some classes more often than others
    drawn = values[(uneven * len(values)).long().clamp(max=len(values) - 1)]
    yield drawn.to(target)
    every = torch.arange(drawn.numel()) * max(1, len(values) // drawn.numel())
    yield values[every % len(values)].view(shape).to(target)
    if target.is_floating_point():
        yield (low + (high - low) * torch.rand(shape, generator=draw)).to(target)
    for left_out in (low, high):
        yield torch.where(torch.rand(shape, generator=draw) < 0.3, left_out, drawn).to(target)
    if target.dim() > 1:  # sequences that end early
        length = torch.arange(size) % target.shape[1] + 1
        over = torch.arange(target.shape[1]) >= length[:, None]
        for end in (low, values[values >= 0][:1].squeeze()):
            yield torch.where(over.view(size, -1, *[1] * (target.dim() - 2)), end, drawn).to(target)
