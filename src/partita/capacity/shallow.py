"""Clients that hold the first blocks and a head: the shape of InclusiveFL, Liu et al. (2022), section 3.

    f_k = head ∘ b_k ∘ … ∘ b_1         a class that leaves out n blocks has k = K − n of those before the head
    Δ[c] = Σ_{i holds c} n_i Δ_i[c] / Σ_{i holds c} n_i         for every coordinate c

A weak device trains a smaller model of its own: no block is frozen, and none is missing before its last one.
The head is everybody's. Where it does not fit what the last block puts out (in the paper's transformers it
always does), the features are averaged over places, and then

    fewer features than the head takes     a device holds the first columns of the head's first layer
    more features                          neighbours are averaged

Of the paper this is which blocks each device has and how they are aggregated. Two things are left out: each
size of model keeps its last block to itself, and larger models guide that block by momentum distillation.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partita.capacity.assign import assigned
from partita.capacity.blocks import Part, block_names, check_sequence, part_as, still
from partita.capacity.depth import CUTS, Assigned, Blocks, as_cuts
from partita.core import check
from partita.core.inputs import single
from partita.core.options import Option, checked
from partita.core.parts import Capacity, Share
from partita.core.types import Inputs


@checked("capacity ")
def shallow(
    cuts: Annotated[
        Mapping[str, int],
        Option(
            "how many of the blocks before the head a class leaves out, the last ones",
            allowed=CUTS,
            check=as_cuts,
            example={"strong": 0, "weak": 1},
        ),
    ],
    assign: Assigned = None,
    *,
    head: Annotated[int, Option("how many of the last blocks are the head, which all hold", low=1)] = 1,
    blocks: Blocks = None,
) -> Capacity:
    """Weak clients train the first blocks of the model and its head (the shape of InclusiveFL).

    Use it as the rival of `depth`: it compares the first blocks with the last ones.
    """

    def shares(model: nn.Module, x: Inputs, batch: int = 1) -> tuple[Share, ...]:  # noqa: ARG001
        x = single(x, "capacity='shallow'")
        names = block_names(model, blocks)
        check_sequence(model, names, x)
        return tuple(Share(name, _held(model, name, names, cut, head, x)) for name, cut in cuts.items())

    classes = tuple(cuts)
    options = {"cuts": dict(cuts), "assign": assign, "head": head, "blocks": blocks}
    return Capacity("shallow", classes, shares, lambda n, seed: assigned(assign, classes, n, seed), options)


class Shallow(Part):
    """The first blocks of a model, and a head that takes what they put out.

    _head      how many of the blocks are the head
    _averages  whether features are averaged over their places before it
    _features  how many of them it takes (None: as many as there are)
    """

    _head = 1
    _averages = False
    _features: int | None = None

    def forward(self, x: Any) -> Any:
        for i, name in enumerate(self._names):
            if i == len(self._names) - self._head:
                x = self._met(x)
            x = self.get_submodule(name)(x)
        return x

    def _met(self, x: Any) -> Any:
        """Return the features as the head takes them: [B, C, ...] are images, [B, T, C] are sequences."""
        if self._averages:
            x = x.flatten(2).mean(2) if x.dim() != 3 else x.mean(1)
        return x if self._features is None else F.adaptive_avg_pool1d(x, self._features)


def _held(model: nn.Module, name: str, names: Sequence[str], cut: int, head: int, x: Tensor) -> nn.Module:
    if cut == 0:
        return model
    kept = len(names) - head - cut
    if kept < 1:
        allowed = f"a cut that leaves one of the {len(names) - head} blocks before the head"
        raise check.fail(f"capacity cuts[{name!r}]", cut, allowed)
    if not _layers(model, names[kept : kept + 1]):
        # the last layer that is kept would lose what follows it, such as its activation, and nothing is saved
        before = len(names) - head
        cuts = [before - i for i in range(before - 1, 0, -1) if _layers(model, names[i : i + 1])]
        allowed = f"one of {cuts}: the first block that {cut} leaves out, {names[kept]!r}, has no parameters"
        raise check.fail(f"capacity cuts[{name!r}]", cut, allowed)
    small = part_as(Shallow, model, [*names[:kept], *names[len(names) - head :]])
    small._head = head
    return _fitted(small, model, x)


def _fitted(small: Shallow, model: nn.Module, x: Tensor) -> nn.Module:
    """Return the small model with a head that takes its features."""
    whole = still(model)
    with torch.no_grad():
        wanted = whole(x.clone()).shape
        if _shape(small, x) == wanted:
            return small
        path, linear = next(iter(_layers(small, small._names[-small._head :])), ("", None))
        if not isinstance(linear, nn.Linear):
            allowed = "a head that begins with nn.Linear, or takes what the block before it puts out"
            raise check.fail("capacity head", small._names[-small._head], allowed)
        places = _input(whole, path, x)
        small = copy.deepcopy(small)
        arrived = _input(still(small), path, x)
        if arrived is None or places is None or arrived.shape[:-1] != places.shape[:-1]:
            small._averages = True
            arrived = _input(still(small), path, x)
        n = 0 if arrived is None else arrived.shape[-1]
        if n > linear.in_features:
            small._features = linear.in_features
        elif n:
            narrow = small.get_submodule(path)
            assert isinstance(narrow, nn.Linear)
            narrow.weight = nn.Parameter(linear.weight[:, :n].clone(), linear.weight.requires_grad)
            narrow.in_features = n
        if _shape(small, x) != wanted:
            allowed = "a cut whose features the head can take, averaged over their places"
            raise check.fail("capacity cuts", small._names, allowed)
    return small


def _layers(model: nn.Module, names: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Return the layers with parameters of these blocks, with their names."""
    inside = [(k, m) for name in names for k, m in model.get_submodule(name).named_modules(prefix=name)]
    return [(k, m) for k, m in inside if any(True for _ in m.parameters(recurse=False))]


def _input(model: nn.Module, path: str, x: Tensor) -> Tensor | None:
    """Return what a layer gets in a pass; None if it gets nothing."""
    inputs: list[Tensor] = []
    layer = model.get_submodule(path)
    handle = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    _shape(model, x)
    handle.remove()
    return inputs[0] if inputs else None


def _shape(model: nn.Module, x: Tensor) -> torch.Size | None:
    """Return the shape of what a model puts out; None if it cannot take x."""
    try:
        with torch.no_grad():
            return torch.Size(still(model)(x.clone()).shape)
    except (RuntimeError, ValueError, IndexError):
        return None
