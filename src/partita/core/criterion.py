"""Losses, and scores that are means over samples: one number for a batch, and what each sample adds to it.

A user's own loss takes (output, target), and what else it asks for (`partita.core.asks`); it returns the mean
over the batch. What a sample contributes is what short batches need when clients of different sizes are
stacked: it is the same function on one sample, or what `partita.core.losses` knows about one of torch's
losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from partita.core import asks, check
from partita.core.losses import Function as Function
from partita.core.losses import parts

IGNORED = -100
"""The label of a position that does not count, for built-in losses as for torch's."""

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Criterion(NamedTuple):
    """A function of (output, target) on a batch, and what each sample contributes to it.

    mean = Σ_i each_i / Σ_i weight_i      over the samples of a batch; without weights every sample counts
                                          once, and where none counts it is 0. `adds_up`: the value of a batch
                                          is Σ_i each_i

    `mean` and `each` also take what the loss `asks` for, by name; weights follow from (output, target) alone.
    """

    name: str
    mean: Callable[..., Tensor]
    each: Callable[..., Tensor]
    weight: Function | None = None
    adds_up: bool = False
    ignored: int | None = None  # the label that does not count
    ahead: bool = False  # whether the output at a place of a sequence predicts the target of the next one
    asks: tuple[str, ...] = ()

    def of_batch(
        self, output: Tensor, target: Tensor, mask: Tensor | None, given: Mapping[str, Any] = NOTHING
    ) -> Tensor:
        """Return the value on the real samples of a batch; a mask of None says that all are real."""
        if mask is None:
            return self.mean(output, target, **given)
        total, weight = self.sums(output, target, mask, given)
        if self.adds_up:
            return total
        return _divided(total, weight)

    def sums(
        self, output: Tensor, target: Tensor, mask: Tensor | None, given: Mapping[str, Any] = NOTHING
    ) -> tuple[Tensor, Tensor]:
        """Return Σ_i each_i and Σ_i weight_i over the real samples of a batch."""
        total = _sum(self.each(output, target, **given), mask)
        if self.weight is not None:
            return total, _sum(self.weight(output, target), mask)
        return total, total.new_full((), len(target)) if mask is None else mask.sum()


def _sum(each: Tensor, mask: Tensor | None) -> Tensor:
    """Sum over real samples, by `where` and not by a product, since padding may hold anything."""
    return each.sum() if mask is None else torch.where(mask > 0, each, 0.0).sum()


def _divided(total: Tensor, weight: Tensor) -> Tensor:
    """Return total / weight; 0 where nothing counts, as for a client that waits for others."""
    return total / torch.where(weight > 0, weight, 1.0)


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """−log p(target), summed over a sequence's positions; targets of −100 do not count."""
    if output.dim() == 2:  # log Σ exp(z) − z_target: cheaper than F.cross_entropy when clients are stacked
        return torch.logsumexp(output, -1) - output.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    flat = F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="none").view(target.shape)
    return flat.flatten(1).sum(1)


def places(output: Tensor, target: Tensor) -> Tensor:
    """Return how many positions of each sequence count; 1 for a sample with a single label."""
    kind = output.dtype if output.is_floating_point() else torch.float32
    if target.dim() == 1:
        return torch.ones_like(target, dtype=kind)
    return (target != IGNORED).flatten(1).sum(1).to(kind)


def following(target: Tensor) -> Tensor:
    """Return the target of the next position at each position of a sequence; the last has none."""
    return torch.cat([target[:, 1:], torch.full_like(target[:, :1], IGNORED)], 1)


def next_token(function: Function) -> Function:
    """Return a function of (output, target) in which each position predicts the next one."""
    return lambda output, target: function(output, following(target))


def prompted(function: Function) -> Function:
    """Return the same where trained prompts come first: the last of them predicts the first token."""
    return lambda output, target: function(output[:, -target.shape[1] - 1 : -1], target)


def _binary(output: Tensor, target: Tensor) -> Tensor:
    """−log p(target) for logits and targets 0 or 1, averaged over the labels of a sample."""
    logit = output.reshape(target.shape)
    return by_sample(F.binary_cross_entropy_with_logits(logit, target.to(logit.dtype), reduction="none"))


def by_sample(each: Tensor) -> Tensor:
    """Return the mean over the places of each sample."""
    return each.flatten(1).mean(1) if each.dim() > 1 else each


def by_position(each: Tensor, target: Tensor) -> Tensor:
    """Return the mean over the positions of each sample that count; 0 where none does."""
    if target.dim() == 1:
        return each
    counts = (target != IGNORED).flatten(1)
    return _divided(torch.where(counts, each.flatten(1), 0.0).sum(1), counts.sum(1))


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Return (output − target)², averaged over the places of each sample."""
    return by_sample((output.reshape(target.shape) - target).square())


def absolute_error(output: Tensor, target: Tensor) -> Tensor:
    """Return |output − target|, averaged over the places of each sample."""
    return by_sample((output.reshape(target.shape) - target).abs())


def averaged(name: str, each: Function, weight: Function | None = None) -> Criterion:
    """Return the mean of what each sample contributes; `weight` says how much each counts (None: once)."""

    def mean(output: Tensor, target: Tensor) -> Tensor:
        total = each(output, target)
        if weight is None or (weight is places and target.dim() == 1):  # all weights are 1
            return total.mean()
        return _divided(total.sum(), weight(output, target).sum())

    return Criterion(name, mean, each, weight)


LOSSES = {
    "cross_entropy": averaged("cross_entropy", _cross_entropy, places),
    "next_token": averaged("next_token", next_token(_cross_entropy), next_token(places))._replace(ahead=True),
    "binary_cross_entropy": averaged("binary_cross_entropy", _binary),
    "mse": averaged("mse", squared_error),
}


def _of_the_model(output: Tensor, target: Tensor) -> Tensor:  # noqa: ARG001
    raise check.fail("loss", OWN.name, "a loss of (output, target): the model's own needs its inputs")


OWN = Criterion("model", _of_the_model, _of_the_model)
"""The loss that the model returns when it gets the targets too."""


def own(function: Function) -> Criterion:
    """Return the criterion of a user's function of (output, target), the mean over a batch."""
    name = name_of(function)
    torch_parts = parts(function)
    if torch_parts is not None and torch_parts.each is not None:
        found = averaged(name, torch_parts.each, torch_parts.weight)
        return found._replace(ignored=torch_parts.ignored)

    ignored = torch_parts.ignored if torch_parts is not None else None
    each, adds_up = asks.by_sample(function), torch_parts is not None
    return Criterion(name, function, each, adds_up=adds_up, ignored=ignored, asks=asks.asked_by(function))


def name_of(function: Any) -> str:
    """Return what a function, a partial one or an object is called."""
    inner = function.func if isinstance(function, partial) else function
    return getattr(inner, "__name__", None) or type(inner).__name__


def users_function(field: str, value: Any, names: Iterable[str]) -> Function:
    """Return a user's function; a class such as nn.MSELoss is none before it is called."""
    return check.takes(field, value, 2, _allowed(value, names))  # type: ignore[no-any-return]


def _allowed(value: Any, names: Iterable[str]) -> str:
    call = f" (call it: {value.__name__}())" if isinstance(value, type) else ""
    return f"a function of (output, target) or one of {', '.join(names)}{call}"


def choose_loss(loss: str | Function | None, output: Tensor, target: Tensor) -> Criterion:
    """Return the named loss, the user's own, or the one that fits the targets."""
    if isinstance(loss, str):
        return OWN if loss == OWN.name else LOSSES[check.choice("loss", loss, [*LOSSES, OWN.name])]
    if loss is not None:
        return own(asks.takes_asked("loss", loss, _allowed(loss, LOSSES)))
    if target.is_floating_point():
        return LOSSES["mse"]
    one_logit = output.dim() <= target.dim() or output.shape[-1] == 1
    return LOSSES["binary_cross_entropy" if one_logit else "cross_entropy"]
