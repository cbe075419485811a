"""What each sample contributes to one of torch's losses, read off its options.

    loss of a batch = Σ_i Σ_t w(y_it) ℓ_it / Σ_i Σ_t w(y_it)      over samples i and their places t

with w(y) the weight of the class, 0 for the label that is ignored. Class weights and ignored labels make a
batch's loss something else than the mean of its samples' losses, in each of which they cancel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Function = Callable[[Tensor, Tensor], Tensor]

_CLASSES: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.CrossEntropyLoss: F.cross_entropy,
    nn.NLLLoss: F.nll_loss,
}


class Parts(NamedTuple):
    """What samples contribute to a loss: their weighted losses and their weights.

    `each` is None where a batch's loss is the sum of the function's values on its samples. `ignored` is the
    label that does not count.
    """

    each: Function | None
    weight: Function | None = None
    ignored: int | None = None


def parts(function: Any) -> Parts | None:
    """Return the parts of a loss that says more than that it is a mean over samples; None for all others."""
    call, options = _opened(function)
    ignored: Any = options.get("ignore_index", -100) if call in _CLASSES.values() else None
    if options.get("reduction") == "sum":
        return Parts(None, ignored=ignored)
    if call not in _CLASSES.values() or options.get("reduction", "mean") != "mean":
        return None
    if options.keys() - {"weight", "ignore_index", "label_smoothing", "reduction"}:
        return None
    weights: Tensor | None = options.get("weight")

    def each(output: Tensor, target: Tensor) -> Tensor:
        return _by_sample(call(output, target, **{**options, "reduction": "none"}))

    def weight(output: Tensor, target: Tensor) -> Tensor:
        if target.is_floating_point():  # probabilities of the classes: every place counts once
            return _by_sample(torch.ones_like(output.select(1, 0)))
        counts = torch.ne(target, ignored)
        of_class: Any = 1.0 if weights is None else weights[torch.where(counts, target, 0)]
        return _by_sample(torch.where(counts, of_class, 0.0).to(output.dtype))

    return Parts(each, weight, ignored)


def _by_sample(places: Tensor) -> Tensor:
    """Return the sum over the places of each sample."""
    return places.flatten(1).sum(1) if places.dim() > 1 else places


def _opened(function: Any) -> tuple[Any, dict[str, Any]]:
    """Return the function behind a loss of torch, and the options that it is called with."""
    if isinstance(function, partial):
        return (function.func, dict(function.keywords)) if not function.args else (None, {})
    for kind, call in _CLASSES.items():
        if isinstance(function, kind) and type(function).forward is kind.forward:
            names = inspect.signature(call).parameters
            return call, {k: v for k, v in vars(function).items() if k in names} | _weights(function)
    if isinstance(function, nn.modules.loss._Loss):
        return type(function), {"reduction": function.reduction}
    return function, {}


def _weights(module: nn.Module) -> dict[str, Any]:
    return {"weight": module.weight} if getattr(module, "weight", None) is not None else {}
