"""Clients that train a narrower model: HeteroFL, Diao et al. (2021), and FjORD, Horváth et al. (2021).

    w_p = the first ⌊p C⌋ of the C channels of every layer of w
    Δ[c] = Σ_{i holds c} n_i Δ_i[c] / Σ_{i holds c} n_i         for every coordinate c

HeteroFL, static: a client of width p trains w_p in all of its steps, with

    a_l = (W_l a_{l-1} + b_l) / p         in training, after each layer but the last: the scaler
    z_k = 0                               in its loss, for each class k that it has no sample of

FjORD, ordered dropout: in each step it draws one of the widths up to its own, each with the same probability,
and trains that part of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from partita.capacity.assign import assigned
from partita.capacity.blocks import named_tensors, still
from partita.capacity.depth import Assigned, by_class
from partita.core import check
from partita.core.inputs import call, each, functional
from partita.core.options import Option, checked
from partita.core.parts import Capacity, Share
from partita.core.types import Inputs

Shapes = Mapping[str, tuple[int, ...]]


RATES = "{'strong': 1.0, 'moderate': 0.45, 'weak': 0.2}"


def _rates(field: str, value: Any) -> dict[str, float]:
    value = by_class(field, value, f"the width of each class, such as {RATES}")
    return {
        str(k): check.number(f"{field}[{k!r}]", p, low=0, high=1, open_low=True) for k, p in value.items()
    }


Rates = Annotated[
    Mapping[str, float],
    Option(
        "the share of each layer's channels that a class holds",
        allowed=RATES,
        check=_rates,
        example={"strong": 1.0, "weak": 0.5},
    ),
]
Build = Annotated[
    Callable[[float], nn.Module] | None,
    Option("width -> the model (None: the models of this package know how)", allowed="a function"),
]


@checked("capacity ")
def width(
    rates: Rates,
    assign: Assigned = None,
    *,
    build: Build = None,
    scale: Annotated[
        bool, Option("whether layers of a narrow model put out 1/width as much in training, as in HeteroFL")
    ] = False,
    mask: Annotated[
        bool,
        Option("whether a client's loss has logits of 0 for classes that it does not have, as in HeteroFL"),
    ] = False,
) -> Capacity:
    """Weak clients train a narrow model: the first channels of every layer, the same in each step.

    Use it as the rival of `depth`, or where all of a client's layers must be its own.
    """
    return _capacity("width", rates, assign, build, scale=scale, mask=mask)


@checked("capacity ")
def heterofl(rates: Rates, assign: Assigned = None, *, build: Build = None) -> Capacity:
    """As `width`, with the scaler and the masked loss of HeteroFL.

    Use it with norm="static" where the model has BatchNorm, as the paper does.
    """
    return _capacity("heterofl", rates, assign, build, scale=True, mask=True)


@checked("capacity ")
def fjord(rates: Rates, assign: Assigned = None, *, build: Build = None) -> Capacity:
    """As `width`, but in each step a client draws one of the widths up to its own (ordered dropout, FjORD).

    Use it where narrow parts of the model shall work on their own.
    """
    return _capacity("fjord", rates, assign, build, ordered=True)


def _capacity(
    name: str,
    rates: Mapping[str, float],
    assign: Any,
    build: Callable[[float], nn.Module] | None,
    *,
    ordered: bool = False,
    scale: bool = False,
    mask: bool = False,
) -> Capacity:
    def shares(model: nn.Module, x: Inputs, batch: int = 1) -> tuple[Share, ...]:  # noqa: ARG001
        models = {p: model if p == 1 else _narrow(model, p, build) for p in sorted(set(rates.values()))}
        for p, narrow in models.items() if scale else ():
            _scale(narrow, p, x)
        for narrow in models.values() if ordered else ():
            _check_masked(model, narrow, x)
        shapes = {p: _shapes(m) for p, m in models.items()}
        return tuple(
            Share(k, models[p], widths=tuple(shapes[q] for q in shapes if q < p) if ordered else ())
            for k, p in rates.items()
        )

    classes = tuple(rates)
    options = {"rates": dict(rates), "assign": assign, "build": build}
    options |= {"scale": scale, "mask": mask} if scale or mask else {}
    return Capacity(
        name, classes, shares, lambda n, seed: assigned(assign, classes, n, seed), options, mask=mask
    )


@dataclass(frozen=True)
class Scaler:
    """A hook of a layer: what it puts out in training is divided by the width of the model."""

    width: float

    def __call__(self, layer: nn.Module, args: Any, output: Tensor) -> Tensor:  # noqa: ARG002
        """Return the output as the next layer sees it."""
        return output / self.width if layer.training else output


def _scale(model: nn.Module, p: float, x: Inputs) -> None:
    """Scale all layers of a narrow model but the last, in place; the whole model needs no scaler."""
    last = _last_layer(model, x) if p < 1 else ""
    for name, layer in _layers(model) if p < 1 else ():
        if name != last:
            layer.register_forward_hook(Scaler(p))


def _last_layer(model: nn.Module, x: Inputs) -> str:
    """Return the layer that a sample meets last; a head may be registered first."""
    model, met = still(model), [""]
    for name, layer in _layers(model):
        layer.register_forward_hook(lambda *_, name=name: met.append(name))
    with torch.no_grad():
        call(model, each(Tensor.clone, x))
    return met[-1]


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(k, m) for k, m in model.named_modules() if isinstance(m, nn.modules.conv._ConvNd | nn.Linear)]


def _narrow(model: nn.Module, p: float, build: Callable[[float], nn.Module] | None) -> nn.Module:
    """Return the model of this width; its tensors are leading parts of the whole model's."""
    make = build or (model.at_width if getattr(model, "_made", None) else None)
    if not callable(make):
        raise check.fail(
            "capacity build",
            build,
            f"a function of the width that returns the model: {type(model).__name__} does not know its "
            "narrow forms",
        )
    narrow = make(p)
    if not isinstance(narrow, nn.Module):
        raise check.fail("capacity build", narrow, "a function of the width that returns an nn.Module")
    whole, part = _shapes(model), _shapes(narrow)
    wrong = [
        k for k in {**whole, **part} if k not in part or k not in whole or not _inside(part[k], whole[k])
    ]
    if wrong:
        raise check.fail(
            "capacity build",
            f"width {p:g}",
            f"a model with the same names, of at most the same shapes: it differs in {wrong[0]}",
        )
    first = next(model.parameters())
    narrow = copy.deepcopy(narrow)  # `build` may give the same one each time
    return _like(model, narrow.to(first.device, first.dtype).train(model.training))


def _like(model: nn.Module, narrow: nn.Module) -> nn.Module:
    """Return the narrow model with the whole one's numbers, and frozen where that one is."""
    whole = dict(named_tensors(model))
    with torch.no_grad():
        for name, value in named_tensors(narrow):
            value.copy_(whole[name][tuple(slice(0, n) for n in value.shape)])
            value.requires_grad_(whole[name].requires_grad)
    return narrow


def _check_masked(model: nn.Module, narrow: nn.Module, x: Inputs) -> None:
    """Refuse ordered dropout where the model with zeros in place of some channels is not the narrow one."""
    kept, masked = dict(named_tensors(narrow)), {}
    with torch.no_grad():
        for name, value in named_tensors(model):
            masked[name] = torch.zeros_like(value)
            masked[name][tuple(slice(0, n) for n in kept[name].shape)] = kept[name]
        wanted = _first(call(still(narrow), each(Tensor.clone, x)))
        output = _first(functional(still(model), masked, each(Tensor.clone, x)))
    if not torch.allclose(output, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max())):
        raise check.fail(
            "capacity",
            "fjord",
            "width(...) for this model: with some channels at zero it is not the narrow one, as where a "
            "layer looks at several channels at a time (GroupNorm, LayerNorm)",
        )


def _first(outputs: Any) -> Tensor:
    """Return the first tensor of what a model returns."""
    return next(t for t in tree_leaves(outputs) if isinstance(t, Tensor))


def _inside(part: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    return len(part) == len(whole) and all(a <= b for a, b in zip(part, whole))


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {k: tuple(v.shape) for k, v in named_tensors(model)}
