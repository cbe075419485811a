"""The features of a model: what its last layer takes, or what a submodule of the user's choice puts out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from partita.algorithms.partition import Names, last_layer
from partita.core import check
from partita.core.asks import COUNTS, FEATURES, INPUTS, PREVIOUS, RECEIVED
from partita.core.criterion import Criterion
from partita.core.inputs import samples
from partita.core.types import Inputs, Layout

NAMED = "the name of a submodule that returns a row for each sample"


class Place(NamedTuple):
    """A submodule, and whether features are what it takes, or what it puts out."""

    module: str
    enters: bool


def place_of(model: nn.Module, names: Names, chosen: str | None) -> Place:
    """Return where the features are: behind the submodule that was chosen, or before the last layer."""
    if chosen is not None:
        known = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
        if chosen not in known:
            children = ", ".join(repr(k) for k, _ in model.named_children())
            allowed = f"a submodule of {type(model).__name__}, such as {children}{check.meant(chosen, known)}"
            raise check.fail("features", chosen, allowed)
        return Place(chosen, enters=False)
    layer = last_layer(model, names)
    if layer is None:
        reason = f"{type(model).__name__} has no single layer that a sample meets last"
        raise check.fail("features", None, NAMED, reason)
    return Place(layer, enters=True)


@contextmanager
def recording(module: nn.Module, place: Place | Layout | None) -> Iterator[list[Any]]:
    """Record the features of the samples that pass within, those of the last call; None: nothing."""
    seen: list[Any] = []
    if place is None or (isinstance(place, Layout) and not place.shape):
        yield seen
        return

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen[:] = (*args, *kwargs.values())[:1]

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001
        seen[:] = [output[0] if isinstance(output, tuple) and output else output]

    layer = module.get_submodule(place.module)
    if place.enters:
        hook = layer.register_forward_pre_hook(before, with_kwargs=True)
    else:
        hook = layer.register_forward_hook(after)
    try:
        yield seen
    finally:
        hook.remove()


def layout_of(
    model: nn.Module, place: Place | None, x: Inputs, y: Tensor, output: Tensor, features: list[Any]
) -> Layout:
    """Return the layout of a model, by what passed there in a trial; refuse what has no rows of samples.

    Without a place, nobody asks for features.
    """
    if place is None:
        return Layout("", True, (), _classes(output, y))
    name = f"features of {type(model).__name__}"
    if not features:
        raise check.fail(name, place.module, "a submodule that the model calls")
    h = features[0]
    if not isinstance(h, Tensor) or h.dim() < 2 or len(h) != samples(x):
        shape = list(h.shape) if isinstance(h, Tensor) else type(h).__name__
        raise check.fail(name, place.module, f"{NAMED}, not {shape}")
    return Layout(place.module, place.enters, tuple(h.shape[1:]), _classes(output, y), _head(model, place))


def _classes(output: Tensor, y: Tensor) -> int:
    """Return K: the classes are the last axis of outputs, or the second one, as for torch's losses."""
    if y.is_floating_point() or output.dim() != y.dim() + 1:
        return 0
    return int(output.shape[-1 if output.shape[:-1] == y.shape else 1])


def _head(model: nn.Module, place: Place) -> tuple[str, ...]:
    layer = model.get_submodule(place.module)
    if not place.enters or type(layer) is not nn.Linear:
        return ()
    return tuple(f"{place.module}.{k}".lstrip(".") for k, _ in layer.named_parameters())


def supposing(
    loss: Criterion, layout: Layout | None, x: Inputs, y: Tensor, output: Tensor, features: list[Any]
) -> Criterion:
    """Return a loss of (output, target) alone, with what it asks for as a trial has it."""
    if not loss.asks or layout is None:
        return loss
    known = assumed(layout, x, y, output, features)
    given = {name: known[name] for name in loss.asks}
    return loss._replace(mean=partial(loss.mean, **given), each=partial(loss.each, **given), asks=())


def assumed(layout: Layout, x: Inputs, y: Tensor, output: Tensor, features: list[Tensor]) -> dict[str, Any]:
    """Return all that a user's loss may ask for, in a trial on a batch: other models predict other rows."""
    h = features[0] if features else output
    known: dict[str, Any] = {FEATURES: h, INPUTS: x}
    for places, model in enumerate((RECEIVED, PREVIOUS)):
        known[f"{model}_output"] = output.detach().roll(places, 0)
        known[f"{model}_{FEATURES}"] = h.detach().roll(places, 0)
    if layout.classes:
        labels = y.flatten()[(y.flatten() >= 0) & (y.flatten() < layout.classes)]
        known[COUNTS] = (torch.bincount(labels.long(), minlength=layout.classes) + 1).to(output.dtype)
    return known
