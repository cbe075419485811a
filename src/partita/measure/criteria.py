"""Losses and metrics, each as a mean over a batch and as one number per sample.

A user's own function takes (output, target) and returns the mean over the batch. One number per sample is
what short batches need when clients of different sizes are stacked: it is the same function on one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from partita import check

Function = Callable[[Tensor, Tensor], Tensor]


class Criterion(NamedTuple):
    """`mean` over a batch, `each` per sample, and whether more is better."""

    name: str
    mean: Function
    each: Function
    higher_is_better: bool = False


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """−log p(target), averaged over a sequence's positions; targets of −100 do not count."""
    if output.dim() == 2:  # log Σ exp(z) − z_target: cheaper than F.cross_entropy when clients are stacked
        return torch.logsumexp(output, -1) - output.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    flat = F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="none").view(target.shape)
    return flat.flatten(1).sum(1) / (target != -100).flatten(1).sum(1).clamp(min=1)


def _binary(output: Tensor, target: Tensor) -> Tensor:
    """−log p(target) for one logit and targets 0 or 1."""
    logit = output.reshape(target.shape)
    return F.binary_cross_entropy_with_logits(logit, target.to(logit.dtype), reduction="none")


def _squared(output: Tensor, target: Tensor) -> Tensor:
    return (output.reshape(target.shape) - target).square().flatten(1 if target.dim() > 1 else 0)


def _mse(output: Tensor, target: Tensor) -> Tensor:
    error = _squared(output, target)
    return error.mean(1) if error.dim() > 1 else error


def _mae(output: Tensor, target: Tensor) -> Tensor:
    error = (output.reshape(target.shape) - target).abs()
    return error.flatten(1).mean(1) if error.dim() > 1 else error


def _accuracy(output: Tensor, target: Tensor) -> Tensor:
    if output.dim() == target.dim() + 1 and output.shape[-1] > 1:
        right = output.argmax(-1) == target
    else:
        right = (output.reshape(target.shape) > 0) == (target > 0.5)
    if right.dim() == 1:
        return right.to(torch.float32)
    counted = (target != -100).flatten(1)
    return (right.flatten(1) & counted).sum(1) / counted.sum(1).clamp(min=1)


def _built_in(name: str, each: Function, higher_is_better: bool = False) -> Criterion:
    return Criterion(name, lambda output, y: each(output, y).mean(), each, higher_is_better)


LOSSES = {
    "cross_entropy": _built_in("cross_entropy", _cross_entropy),
    "binary_cross_entropy": _built_in("binary_cross_entropy", _binary),
    "mse": _built_in("mse", _mse),
}
METRICS = {
    "accuracy": _built_in("accuracy", _accuracy, higher_is_better=True),
    "mse": _built_in("mse", _mse),
    "mae": _built_in("mae", _mae),
}


def own(function: Function, higher_is_better: bool) -> Criterion:
    """A user's function of (output, target) that returns the mean over a batch."""

    def each(output: Tensor, target: Tensor) -> Tensor:
        try:
            return torch.func.vmap(function)(output.unsqueeze(1), target.unsqueeze(1))
        except (RuntimeError, ValueError):  # what vmap cannot trace, such as .item(), sample by sample
            pairs = zip(output.unsqueeze(1), target.unsqueeze(1))
            return torch.stack([torch.as_tensor(function(o, t), device=output.device) for o, t in pairs])

    name = getattr(function, "__name__", None) or type(function).__name__
    if name.lower().endswith(("loss", "error", "mse", "mae")):
        higher_is_better = False
    return Criterion(name, function, each, getattr(function, "higher_is_better", higher_is_better))


def _function(field: str, given: Any, names: Iterable[str]) -> Function:
    """A user's function; a class such as nn.MSELoss is none before it is called."""
    call = f" (call it: {given.__name__}())" if isinstance(given, type) else ""
    allowed = f"a function of (output, target) or one of {', '.join(names)}{call}"
    return check.takes(field, given, 2, allowed)  # type: ignore[no-any-return]


def choose_loss(loss: str | Function | None, output: Tensor, target: Tensor) -> Criterion:
    """The named loss, the user's own, or the one that fits the targets."""
    if isinstance(loss, str):
        return LOSSES[check.choice("loss", loss, LOSSES)]
    if loss is not None:
        return own(_function("loss", loss, LOSSES), higher_is_better=False)
    if target.is_floating_point():
        return LOSSES["mse"]
    one_logit = output.dim() <= target.dim() or output.shape[-1] == 1
    return LOSSES["binary_cross_entropy" if one_logit else "cross_entropy"]


def choose_metric(metric: str | Function | None, loss: Criterion, target: Tensor) -> Criterion:
    """The named metric, the user's own, or accuracy for classes and the loss for numbers."""
    if metric == "loss":
        return loss._replace(name="loss")
    if isinstance(metric, str):
        return METRICS[check.choice("metric", metric, [*METRICS, "loss"])]
    if metric is not None:
        return own(_function("metric", metric, [*METRICS, "loss"]), higher_is_better=True)
    classes = loss.name in ("cross_entropy", "binary_cross_entropy") or loss.name not in LOSSES
    return METRICS["accuracy"] if classes and not target.is_floating_point() else loss
