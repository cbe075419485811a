"""Losses and metrics, each as one number for a batch and as what every sample contributes to it.

A user's own function takes (output, target) and returns the mean over the batch. What a sample contributes is
what short batches need when clients of different sizes are stacked: it is the same function on one sample, or
what `partita.measure.losses` knows about one of torch's losses.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from partita import check
from partita.measure.losses import Function as Function
from partita.measure.losses import parts


class Criterion(NamedTuple):
    """A function of (output, target) on a batch, and what each sample contributes to it.

    mean = Σ_i each_i / Σ_i weight_i      over the samples of a batch; without weights every sample counts
                                          once. `adds_up`: the value of a batch is Σ_i each_i
    """

    name: str
    mean: Function
    each: Function
    higher_is_better: bool = False
    weight: Function | None = None
    adds_up: bool = False
    built_in: bool = False
    classes_first: bool = False  # torch has the classes of a sequence on axis 1, before its places

    def of_batch(self, output: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
        """Return the value on the real samples of a batch; a mask of None says that all are real."""
        if mask is None:
            return self.mean(output, target)
        total, weight = self.sums(output, target, mask)
        if self.adds_up:
            return total
        # a client that waits for others has no real sample
        return total / (weight.clamp(min=1) if self.weight is None else torch.where(mask.any(), weight, 1.0))

    def sums(self, output: Tensor, target: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return Σ_i each_i and Σ_i weight_i over the real samples of a batch."""
        total = _sum(self.each(output, target), mask)
        if self.weight is not None:
            return total, _sum(self.weight(output, target), mask)
        return total, total.new_full((), len(target)) if mask is None else mask.sum()


def _sum(each: Tensor, mask: Tensor | None) -> Tensor:
    """The sum over real samples; `where` and not a product, since padding may hold anything."""
    return each.sum() if mask is None else torch.where(mask > 0, each, 0.0).sum()


@dataclass(frozen=True)
class Metric:
    """A metric of your own: a function of (output, target), and whether more of it is better.

    function          returns the mean over a batch, as a number or a tensor of one
    higher_is_better  True for scores such as accuracy, False for errors such as Brier's
    name              what tables and files call it (None: the function's name)

        pt.federate(..., metric=pt.Metric(brier, higher_is_better=False))
    """

    function: Function
    higher_is_better: bool
    name: str | None = None

    def __post_init__(self) -> None:
        call_it = f" (call it: {self.function.__name__}())" if isinstance(self.function, type) else ""
        check.takes("function", self.function, 2, f"a function of (output, target){call_it}")
        check.boolean("higher_is_better", self.higher_is_better)
        if self.name is not None and (not isinstance(self.name, str) or not self.name):
            raise check.fail("name", self.name, "a name, or None for the function's own")

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over a batch."""
        return self.function(output, target)


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """−log p(target), averaged over a sequence's positions; targets of −100 do not count."""
    if output.dim() == 2:  # log Σ exp(z) − z_target: cheaper than F.cross_entropy when clients are stacked
        return torch.logsumexp(output, -1) - output.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    flat = F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="none").view(target.shape)
    return flat.flatten(1).sum(1) / (target != -100).flatten(1).sum(1).clamp(min=1)


def _binary(output: Tensor, target: Tensor) -> Tensor:
    """−log p(target) for logits and targets 0 or 1, averaged over the labels of a sample."""
    logit = output.reshape(target.shape)
    each = F.binary_cross_entropy_with_logits(logit, target.to(logit.dtype), reduction="none")
    return each.flatten(1).mean(1) if each.dim() > 1 else each


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
    return Criterion(name, lambda output, y: each(output, y).mean(), each, higher_is_better, built_in=True)


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


def own(function: Function, higher_is_better: bool, name: str | None = None) -> Criterion:
    """A user's function of (output, target) that returns the mean over a batch."""
    name = name or name_of(function)
    if hasattr(function, "reset") and hasattr(function, "update"):
        return _with_state(function, higher_is_better, name)
    known = parts(function)
    if known is not None and known.each is not None:
        mean = known.mean or function
        return Criterion(name, mean, known.each, higher_is_better, known.weight, classes_first=True)

    def each(output: Tensor, target: Tensor) -> Tensor:
        try:
            return torch.func.vmap(function)(output.unsqueeze(1), target.unsqueeze(1))
        except (RuntimeError, ValueError):  # what vmap cannot trace, such as .item(), sample by sample
            return _one_by_one(function, output, target)

    return Criterion(name, function, each, higher_is_better, adds_up=known is not None)


def _with_state(metric: Any, higher_is_better: bool, name: str) -> Criterion:
    """An object that adds up what it has seen, such as a metric of torchmetrics: it forgets between calls."""

    alone = threading.Lock()  # clients on several cores ask the same object

    def fresh(output: Tensor, target: Tensor) -> Tensor:
        with alone:
            metric.reset()
            try:
                found: Tensor = metric(output, target)
                return found
            finally:
                metric.reset()

    return Criterion(name, fresh, partial(_one_by_one, fresh), higher_is_better)


def _one_by_one(function: Function, output: Tensor, target: Tensor) -> Tensor:
    pairs = zip(output.unsqueeze(1), target.unsqueeze(1))
    return torch.stack([torch.as_tensor(function(o, t), device=output.device) for o, t in pairs])


def name_of(function: Any) -> str:
    """Return what a function, a partial one or an object is called."""
    inner = function.func if isinstance(function, partial) else function
    return getattr(inner, "__name__", None) or type(inner).__name__


def _function(field: str, given: Any, names: Iterable[str]) -> Function:
    """A user's function; a class such as nn.MSELoss is none before it is called."""
    call = f" (call it: {given.__name__}())" if isinstance(given, type) else ""
    allowed = f"a function of (output, target) or one of {', '.join(names)}{call}"
    return check.takes(field, given, 2, allowed)  # type: ignore[no-any-return]


def _direction(metric: Any) -> bool:
    """Whether more is better; a ValueError where nothing says so."""
    known = getattr(metric, "higher_is_better", None)  # torchmetrics has it too
    if isinstance(known, bool):
        return known
    name, inner = name_of(metric), metric.func if isinstance(metric, partial) else metric
    if name in METRICS:
        return METRICS[name].higher_is_better
    if name in LOSSES or str(getattr(inner, "__module__", "")).startswith("torch.nn."):
        return False
    raise check.fail(
        "metric",
        name,
        "a metric that says which way is better: partita.Metric(f, higher_is_better=True) or False",
    )


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
    if isinstance(metric, str):  # what is no text may answer == in its own way, as torchmetrics does
        chosen = check.choice("metric", metric, [*METRICS, "loss"])
        return loss._replace(name="loss") if chosen == "loss" else _beside(loss, METRICS[chosen])
    if isinstance(metric, Metric):
        return own(metric.function, metric.higher_is_better, metric.name)
    if metric is not None:
        return own(_function("metric", metric, [*METRICS, "loss"]), _direction(metric))
    classes = loss.name in ("cross_entropy", "binary_cross_entropy") or loss.name not in LOSSES
    return _beside(loss, METRICS["accuracy"]) if classes and not target.is_floating_point() else loss


def _beside(loss: Criterion, metric: Criterion) -> Criterion:
    """The metric of outputs as the loss has them."""
    if not loss.classes_first or metric is not METRICS["accuracy"]:
        return metric
    return _built_in(metric.name, lambda output, y: _accuracy(output.movedim(1, -1), y), True)
