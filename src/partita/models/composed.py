"""Models with a personal part beside a shared one: Pillutla et al. (2022), Figures 1c and 2b.

    additive      h(u, x) + h_i(v_i, x)           two models, whose outputs are summed or mixed
    split_units   [W_u x ; W_v x]                 some units of a layer, whose outputs are put side by side

The personal part has the name `personal`: `personal="personal.*"` for the one, `"*.personal.*"` for the other
one.
"""

from __future__ import annotations

import copy
import math
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from partita.core import check
from partita.models.blocks import Blocks

Model = TypeVar("Model", bound=nn.Module)

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
Layer = nn.Linear | Convolution
MIXES = ("sum", "probabilities")


def additive(model: nn.Module, personal: nn.Module, *, mix: str = "sum") -> Additive:
    """Return a generalized additive model of copies of both: `personal="personal.*"` keeps the second one.

    mix="sum"            h(u, x) + h_i(v_i, x), so that each fits what the other leaves: for regression, or
                         for scores of classes
    mix="probabilities"  log(θ p(u, x) + (1 − θ) p_i(v_i, x)), where p are softmax probabilities: for a cross
                         entropy. θ = 1 / (1 + exp(−`weight`)) is learnt by all clients together, from ½;
                         `personal=["personal.*", "weight"]` lets each client learn its own

    Both take the same samples and have outputs of the same shape. Names of the first begin with `shared.`.
    """
    for field, part in (("model", model), ("personal", personal)):
        if not isinstance(part, nn.Module):
            raise check.fail(field, part, "an nn.Module")
    return Additive(copy.deepcopy(model), copy.deepcopy(personal), check.choice("mix", mix, MIXES))


class Additive(nn.Module):
    """Two models on the same samples, see `additive`."""

    def __init__(self, shared: nn.Module, personal: nn.Module, mix: str) -> None:
        super().__init__()
        self.shared, self.personal, self.mix = shared, personal, mix
        if mix == "probabilities":
            like = next(shared.parameters())
            self.weight = nn.Parameter(torch.zeros(1, dtype=like.dtype, device=like.device))

    def forward(self, x: Any) -> Tensor:
        ours, own = self.shared(x), self.personal(x)
        if ours.shape != own.shape:
            raise check.fail("personal", list(own.shape), f"outputs of the model's shape {list(ours.shape)}")
        if self.mix == "sum":
            total: Tensor = ours + own
            return total
        ours, own = ours.log_softmax(-1), own.log_softmax(-1)
        share = nn.functional.logsigmoid
        return torch.logaddexp(share(self.weight) + ours, share(-self.weight) + own)

    def extra_repr(self) -> str:
        return f"mix={self.mix!r}"


def split_units(model: Model, layer: str, personal: float, *, inputs: int | None = None) -> Model:
    """Return a copy of a model in which the last units of a layer are a part of their own.

    The layer, an nn.Linear or a convolution, becomes two: `shared` with the first units, `personal` with the
    others. Their outputs are put side by side, so that the copy computes what the model computes. The new
    names are LAYER.personal.weight and .bias: `personal="*.personal.*"`.

    layer     its name in the model, such as 'hidden1.linear'
    personal  how many units (channels) are personal, or their share
    inputs    so many of the last inputs (channels) are private: only the personal units see them, and they
              see nothing else. What leaves the layer is then another function than before
    """
    model = copy.deepcopy(model)
    layers = {name: m for name, m in model.named_modules() if name and _divisible(m)}
    if layer not in layers:
        names = ", ".join(map(repr, list(layers)[:8])) + (", ..." if len(layers) > 8 else "")
        allowed = "a dense layer or a convolution inside of the model, without groups, hooks or adapters"
        raise check.fail("layer", layer, f"{allowed}: {names or 'there is none'}")
    whole = layers[layer]
    tied = [p for _, p in model.named_parameters(remove_duplicate=False) if p is whole.weight]
    if len(tied) > 1:
        raise check.fail("layer", layer, "one whose weight is no other layer's too")
    (units, width), private = whole.weight.shape[:2], inputs is not None
    first = units - _count("personal", personal, units)
    known = width if inputs is None else width - check.integer("inputs", inputs, low=1, high=width - 1)
    shared = _part(whole, slice(0, first), slice(0, known))
    own = _part(whole, slice(first, units), slice(known if private else 0, width))
    parent, _, name = layer.rpartition(".")
    setattr(model.get_submodule(parent), name, Split(shared, own, private).train(whole.training))
    if isinstance(model, Blocks):
        model._made = None  # its narrow forms would be those of the model that it was
    return model


class Split(nn.Module):
    """A shared and a personal layer, whose outputs are put side by side, see `split_units`."""

    def __init__(self, shared: Layer, personal: Layer, private: bool) -> None:
        super().__init__()
        self.shared, self.personal, self.private = shared, personal, private

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.shared, self.personal)
        axis = (
            1 - self.shared.weight.dim()
        )  # of units: the last of a dense layer, that before space of others
        widths = [part.weight.shape[1] for part in parts]
        chunks = torch.split(x, widths, axis) if self.private else (x, x)
        return torch.cat([part(chunk) for part, chunk in zip(parts, chunks)], axis)


def _divisible(layer: nn.Module) -> TypeGuard[Layer]:
    hooked = layer._forward_hooks or layer._forward_pre_hooks or next(layer.children(), None) is not None
    return isinstance(layer, nn.Linear | Convolution) and getattr(layer, "groups", 1) == 1 and not hooked


def _count(field: str, value: float, units: int) -> int:
    """Return a number of units from 1 to all but one, given as such or as a share."""
    if isinstance(value, float):
        share = check.number(field, value, low=0, high=1)
        value = math.floor(share * units + 0.5)
    return check.integer(field, value, low=1, high=units - 1)


def _part(layer: Layer, units: slice, inputs: slice) -> Layer:
    """Return a copy of a layer with some of its units, and of its inputs."""
    part = copy.deepcopy(layer)
    part.weight = _cut(layer.weight, (units, inputs))
    part.bias = None if layer.bias is None else _cut(layer.bias, units)
    if isinstance(part, nn.Linear):
        part.out_features, part.in_features = part.weight.shape
    else:
        part.out_channels, part.in_channels = part.weight.shape[:2]
    return part


def _cut(parameter: Tensor, where: Any) -> nn.Parameter:
    return nn.Parameter(parameter.detach()[where].clone(), requires_grad=parameter.requires_grad)
