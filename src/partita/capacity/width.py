"""Clients that train a narrower model: HeteroFL, Diao et al. (2021), and FjORD, Horváth et al. (2021).

    w_p = the first ⌊p C⌋ of the C channels of every layer of w
    Δ[c] = Σ_{i holds c} n_i Δ_i[c] / Σ_{i holds c} n_i         for every coordinate c

HeteroFL, static: a client of width p trains w_p in all of its steps. FjORD, ordered dropout: in each step it
draws one of the widths up to its own, each with the same probability, and trains that part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from partita.capacity.assign import assigned
from partita.capacity.blocks import named_tensors, still
from partita.capacity.depth import Assigned, by_class
from partita.core import check
from partita.core.options import Option, checked
from partita.core.parts import Capacity, Share

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
def width(rates: Rates, assign: Assigned = None, *, build: Build = None) -> Capacity:
    """Weak clients train a narrow model: the first channels of every layer, the same in each step (HeteroFL).

    Use it as the rival of `depth`, or where all of a client's layers must be its own.
    """
    return _capacity("width", rates, assign, build, ordered=False)


@checked("capacity ")
def fjord(rates: Rates, assign: Assigned = None, *, build: Build = None) -> Capacity:
    """As `width`, but in each step a client draws one of the widths up to its own (ordered dropout, FjORD).

    Use it where narrow parts of the model shall work on their own.
    """
    return _capacity("fjord", rates, assign, build, ordered=True)


heterofl = width


def _capacity(
    name: str,
    rates: Mapping[str, float],
    assign: Any,
    build: Callable[[float], nn.Module] | None,
    *,
    ordered: bool,
) -> Capacity:
    def shares(model: nn.Module, x: Tensor, batch: int = 1) -> tuple[Share, ...]:  # noqa: ARG001
        models = {p: model if p == 1 else _narrow(model, p, build) for p in sorted(set(rates.values()))}
        for narrow in models.values() if ordered else ():
            _check_masked(model, narrow, x)
        shapes = {p: _shapes(m) for p, m in models.items()}
        return tuple(
            Share(k, models[p], widths=tuple(shapes[q] for q in shapes if q < p) if ordered else ())
            for k, p in rates.items()
        )

    classes = tuple(rates)
    options = {"rates": dict(rates), "assign": assign, "build": build}
    return Capacity(name, classes, shares, lambda n, seed: assigned(assign, classes, n, seed), options)


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
    return _like(model, narrow.to(first.device, first.dtype).train(model.training))


def _like(model: nn.Module, narrow: nn.Module) -> nn.Module:
    """Return the narrow model with the whole one's numbers, and frozen where that one is."""
    whole = dict(named_tensors(model))
    with torch.no_grad():
        for name, value in named_tensors(narrow):
            value.copy_(whole[name][tuple(slice(0, n) for n in value.shape)])
            value.requires_grad_(whole[name].requires_grad)
    return narrow


def _check_masked(model: nn.Module, narrow: nn.Module, x: Tensor) -> None:
    """Refuse ordered dropout where the model with zeros in place of some channels is not the narrow one."""
    kept, masked = dict(named_tensors(narrow)), {}
    with torch.no_grad():
        for name, value in named_tensors(model):
            masked[name] = torch.zeros_like(value)
            masked[name][tuple(slice(0, n) for n in kept[name].shape)] = kept[name]
        wanted, output = still(narrow)(x.clone()), functional_call(still(model), masked, (x.clone(),))
    if not torch.allclose(output, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max())):
        raise check.fail(
            "capacity",
            "fjord",
            "width(...) for this model: with some channels at zero it is not the narrow one, as where a "
            "layer looks at several channels at a time (GroupNorm, LayerNorm)",
        )


def _inside(part: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    return len(part) == len(whole) and all(a <= b for a, b in zip(part, whole))


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {k: tuple(v.shape) for k, v in named_tensors(model)}
