"""What a method makes of the loss of a run: a term beside it, or other outputs for it.

The functions here are given by the method, and say by the names of their arguments what they ask for, as a
user's loss does (`partita.core.asks`); so they combine with whatever the run minimizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from partita.core import check
from partita.core.asks import arguments
from partita.core.criterion import OWN, Criterion

OF_LOSS = ("output", "target")


def with_term(loss: Criterion, term: Callable[..., Tensor]) -> Criterion:
    """Return the loss in which sample i counts w_i (ℓ_i + t_i), where it counted w_i ℓ_i.

    `term` returns t_i of each sample of a batch.
    """
    call, asked = _by_name(loss, term)

    def each(output: Tensor, target: Tensor, **given: Any) -> Tensor:
        own = loss.each(output, target, **_for(loss, given))
        return own + _weighted(loss, output, target, call(output, target, given))

    def mean(output: Tensor, target: Tensor, **given: Any) -> Tensor:
        own = loss.mean(output, target, **_for(loss, given))
        terms = call(output, target, given)
        if loss.adds_up:
            return own + terms.sum()
        if loss.weight is None:
            return own + terms.mean()
        weight = loss.weight(output, target).sum()
        total = _weighted(loss, output, target, terms).sum()
        return own + total / torch.where(weight > 0, weight, 1.0)

    return loss._replace(mean=mean, each=each, asks=tuple(dict.fromkeys((*loss.asks, *asked))))


def of_output(loss: Criterion, change: Callable[..., Tensor]) -> Criterion:
    """Return the loss of other outputs, which `change` makes of those of the model."""
    call, asked = _by_name(loss, change)

    def of(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda output, target, **given: function(
            call(output, target, given), target, **_for(loss, given)
        )

    return loss._replace(
        mean=of(loss.mean), each=of(loss.each), asks=tuple(dict.fromkeys((*loss.asks, *asked)))
    )


def _by_name(
    loss: Criterion, function: Callable[..., Tensor]
) -> tuple[Callable[[Tensor, Tensor, Mapping[str, Any]], Tensor], tuple[str, ...]]:
    """Return a method's function as one of (output, target, what is given), and what it asks for."""
    if loss.mean is OWN.mean:
        reason = "the method changes the loss, and the model computes its own"
        raise check.fail("loss", OWN.name, "a named loss, or a function of (output, target)", reason)
    names = [p.name for p in arguments(function)]

    def call(output: Tensor, target: Tensor, given: Mapping[str, Any]) -> Tensor:
        known = {**given, "output": output, "target": target}
        return function(**{name: known[name] for name in names})

    return call, tuple(name for name in names if name not in OF_LOSS)


def _for(loss: Criterion, given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in loss.asks}


def _weighted(loss: Criterion, output: Tensor, target: Tensor, terms: Tensor) -> Tensor:
    return terms if loss.weight is None else loss.weight(output, target) * terms
