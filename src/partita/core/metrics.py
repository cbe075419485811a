"""Losses and metrics, each as one number for a batch and as what every sample contributes to it.

A user's own function takes (output, target) and returns the mean over the batch. What a sample contributes is
what short batches need when clients of different sizes are stacked: it is the same function on one sample, or
what `partita.core.losses` knows about one of torch's losses.
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

from partita.core import check
from partita.core.losses import Function as Function
from partita.core.losses import parts


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
    ignored: int | None = None  # the label that one of torch's losses does not count

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
    """Sum over real samples, by `where` and not by a product, since padding may hold anything."""
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
    return _by_sample(F.binary_cross_entropy_with_logits(logit, target.to(logit.dtype), reduction="none"))


def _by_sample(each: Tensor) -> Tensor:
    """Return the mean over the places of each sample."""
    return each.flatten(1).mean(1) if each.dim() > 1 else each


def _mse(output: Tensor, target: Tensor) -> Tensor:
    return _by_sample((output.reshape(target.shape) - target).square())


def _mae(output: Tensor, target: Tensor) -> Tensor:
    return _by_sample((output.reshape(target.shape) - target).abs())


def _right(output: Tensor, target: Tensor, axis: int = -1) -> Tensor:
    """Return whether each place of each sample is right: by classes on this axis, or by one output."""
    if output.dim() == target.dim() + 1 and output.shape[axis] > 1:
        return output.argmax(axis) == target
    return (output.reshape(target.shape) > 0) == (target > 0.5)


def _accuracy(output: Tensor, target: Tensor) -> Tensor:
    return _by_sample(_right(output, target).to(torch.float32))


def _counts(output: Tensor, target: Tensor, axis: int, ignored: int | None) -> Tensor:
    """Return which labels count: not the one that the loss ignores, and none that is no class."""
    counts = torch.ones_like(target, dtype=torch.bool) if ignored is None else target != ignored
    if output.dim() == target.dim() + 1 and output.shape[axis] > 1:
        counts = counts & (target >= 0) & (target < output.shape[axis])
    return counts


def _accuracy_of_counted(axis: int, ignored: int | None, places: bool) -> Criterion:
    """Return accuracy over the labels that count: all `places` alike, or the mean over samples' means."""

    def each(output: Tensor, target: Tensor) -> Tensor:
        counts = _counts(output, target, axis, ignored).reshape(len(target), -1)
        right = (_right(output, target, axis).reshape(counts.shape) & counts).sum(1).to(torch.float32)
        return right if places else right / counts.sum(1).clamp(min=1)

    def weight(output: Tensor, target: Tensor) -> Tensor:
        counts = _counts(output, target, axis, ignored).reshape(len(target), -1)
        return (counts.sum(1) if places else counts.any(1)).to(torch.float32)

    def mean(output: Tensor, target: Tensor) -> Tensor:
        return each(output, target).sum() / weight(output, target).sum()

    return Criterion("accuracy", mean, each, True, weight, built_in=True)


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
    """Return the criterion of a user's function of (output, target), the mean over a batch."""
    name = name or name_of(function)
    if hasattr(function, "reset") and hasattr(function, "update"):
        return _with_state(function, higher_is_better, name)
    torch_parts = parts(function)
    if torch_parts is not None and torch_parts.each is not None:
        mean = torch_parts.mean or function
        return Criterion(
            name, mean, torch_parts.each, higher_is_better, torch_parts.weight, ignored=torch_parts.ignored
        )

    def each(output: Tensor, target: Tensor) -> Tensor:
        try:
            return torch.func.vmap(function)(output.unsqueeze(1), target.unsqueeze(1))
        except (RuntimeError, ValueError):  # what vmap cannot trace, such as .item(), sample by sample
            return _one_by_one(function, output, target)

    ignored = torch_parts.ignored if torch_parts is not None else None
    return Criterion(name, function, each, higher_is_better, adds_up=torch_parts is not None, ignored=ignored)


def _with_state(metric: Any, higher_is_better: bool, name: str) -> Criterion:
    """Return the criterion of an object that adds up what it sees (torchmetrics); each call resets it."""
    alone = threading.Lock()  # clients on several cores ask the same object

    def fresh(output: Tensor, target: Tensor) -> Tensor:
        with alone:
            metric.reset()
            try:
                value: Tensor = metric(output, target)
                return value
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


def _function(field: str, value: Any, names: Iterable[str]) -> Function:
    """Return a user's function; a class such as nn.MSELoss is none before it is called."""
    call = f" (call it: {value.__name__}())" if isinstance(value, type) else ""
    allowed = f"a function of (output, target) or one of {', '.join(names)}{call}"
    return check.takes(field, value, 2, allowed)  # type: ignore[no-any-return]


def _direction(metric: Any) -> bool:
    """Return whether more is better, or raise a ValueError where nothing says so."""
    direction = getattr(metric, "higher_is_better", None)  # torchmetrics has it too
    if isinstance(direction, bool):
        return direction
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
    """Return the named loss, the user's own, or the one that fits the targets."""
    if isinstance(loss, str):
        return LOSSES[check.choice("loss", loss, LOSSES)]
    if loss is not None:
        return own(_function("loss", loss, LOSSES), higher_is_better=False)
    if target.is_floating_point():
        return LOSSES["mse"]
    one_logit = output.dim() <= target.dim() or output.shape[-1] == 1
    return LOSSES["binary_cross_entropy" if one_logit else "cross_entropy"]


def choose_metric(
    metric: str | Function | None, loss: Criterion, output: Tensor, target: Tensor, labels: Tensor
) -> Criterion:
    """Return the named metric, the user's own, or accuracy for classes and the loss for numbers.

    `output` and `target` are of some samples, `labels` all targets that there are.
    """
    if isinstance(metric, str):  # what is no text may answer == in its own way, as torchmetrics does
        chosen = check.choice("metric", metric, [*METRICS, "loss"])
        if chosen == "loss":
            return loss._replace(name="loss")
        return _accuracy_beside(loss, output, target, labels) if chosen == "accuracy" else METRICS[chosen]
    if isinstance(metric, Metric):
        return own(metric.function, metric.higher_is_better, metric.name)
    if metric is not None:
        return own(_function("metric", metric, [*METRICS, "loss"]), _direction(metric))
    classes = loss.name in ("cross_entropy", "binary_cross_entropy") or loss.name not in LOSSES
    if classes and not target.is_floating_point():
        return _accuracy_beside(loss, output, target, labels)
    return loss


def _accuracy_beside(loss: Criterion, output: Tensor, target: Tensor, labels: Tensor) -> Criterion:
    """Return accuracy with the classes on the axis where the loss has them, over the labels it counts."""
    axis = _axis_of_classes(loss, output, target)
    if axis == -1 and (labels.is_floating_point() or bool(_counts(output, labels, axis, loss.ignored).all())):
        return METRICS["accuracy"]
    return _accuracy_of_counted(axis, loss.ignored, places=loss not in LOSSES.values())


def _axis_of_classes(loss: Criterion, output: Tensor, target: Tensor) -> int:
    """Return 1 or -1: torch's losses have the classes before the places of a sequence, ours behind them.

    Of a user's function the shapes tell; where both would do, outputs that are right on one axis have less
    loss on that one.
    """
    if output.dim() != target.dim() + 1 or output.dim() == 2 or loss in LOSSES.values():
        return -1
    if loss.ignored is not None:
        return 1
    shapes = {axis: output.movedim(axis, -1).shape[:-1] == target.shape for axis in (-1, 1)}
    if not all(shapes.values()):
        return 1 if shapes[1] else -1
    classes = target.clamp(0, output.shape[-1] - 1).long()
    logits = (20.0 * F.one_hot(classes, output.shape[-1]) - 10.0).to(output)
    try:
        last, first = (float(loss.mean(z, target)) for z in (logits, logits.movedim(-1, 1)))
    except Exception:  # a user's function may fail in its own way
        return -1
    return 1 if first < last else -1
