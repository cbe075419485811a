"""The blocks of a model: the places where it can be cut.

    f = b_n ∘ … ∘ b_2 ∘ b_1        a cut c leaves b_n ∘ … ∘ b_{c+1} to train and b_c ∘ … ∘ b_1 frozen

Every nn.Sequential has them, and so have the models of this package. Any other model says which of its
submodules it applies one after another, and `check_sequence` finds out whether that is so.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from partita.core import check

ALLOWED = "the names of the submodules that the model applies one after another, ['features', 'head']"


class Part(nn.Module):
    """Some blocks of a model, applied one after another.

    The tensors are the model's own, under the names that they have there. That holds for a tensor too that a
    block here shares with one that is not: it stands beside the blocks under the name that the model knows it
    by, so that `named_parameters` and `functional_call` find it.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self._names = tuple(names)
        self.train(model.training)
        held = {id(t) for name in names for _, t in named_tensors(model.get_submodule(name))}
        first = {name for name, _ in named_tensors(model)}
        # in the model's order: its first name for a tensor is the first one here, too
        for path, module in model.named_modules(remove_duplicate=False):
            if path in names:
                above, _, name = path.rpartition(".")
                _submodule(self, above).add_module(name, module)
            elif not any(_is_in(path, name) for name in names):
                _lend(module, path, self, held, first)

    def forward(self, x: Any) -> Any:
        for name in self._names:
            x = self.get_submodule(name)(x)
        return x


def block_names(model: nn.Module, declared: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the blocks of a model, in the order in which they are applied.

    Those that are `declared`, as dotted names of submodules; else the children of an nn.Sequential; else what
    the model has as its attribute `blocks`, a list of such names. Together they own all buffers and all
    parameters that require gradients.

    >>> block_names(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    ('0', '1', '2')
    """
    names = _declared(model) if declared is None else declared
    if isinstance(names, str) or not isinstance(names, Sequence) or not names:
        children = ", ".join(repr(n) for n, _ in model.named_children()) or "none"
        raise check.fail(
            "blocks",
            names,
            f"{ALLOWED}, for all but an nn.Sequential; a model may have them as its attribute `blocks`, too. "
            f"Submodules of {type(model).__name__}: {children}",
        )
    _check_names(model, names)
    owned = {id(t) for name in names for _, t in named_tensors(model.get_submodule(name))}
    left = [name for name, t in named_tensors(model) if id(t) not in owned and _counts(t)]
    if left:
        allowed = f"blocks that own all of the model's tensors: {_first(left, 3)} is in none of them"
        raise check.fail("blocks", names, allowed)
    return tuple(names)


P = TypeVar("P", bound=Part)


def part(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """Return blocks of a model, applied one after another: the model's tensors, under their full names.

    What the model declares as its `input_part` and `output_part` stays that, as far as it is here; else it is
    the first and the last of the blocks that own parameters. No blocks give the identity.
    """
    return part_as(Part, model, names)


def part_as(kind: type[P], model: nn.Module, names: Sequence[str]) -> P:
    """Return such a part whose blocks are applied in another way."""
    _check_names(model, names)
    blocks = kind(model, names)
    owners = [n for n in names if any(True for _ in model.get_submodule(n).parameters())]
    for field, default in (("input_part", owners[:1]), ("output_part", owners[-1:])):
        if parts := getattr(model, field, None):
            kept = [p for p in parts if any(_is_in(p, n) or _is_in(n, p) for n in names)]
            setattr(blocks, field, tuple(kept or default))
    return blocks


def check_sequence(model: nn.Module, names: Sequence[str], x: Any) -> None:
    """Refuse blocks that, one after another, do not give what the model gives for the batch x.

    Both run in evaluation mode, without gradients, on a copy of the model.
    """
    model = still(model)
    with torch.no_grad():
        whole, y = model(_copied(x)), _copied(x)
        for name in names:
            try:
                y = model.get_submodule(name)(y)
            except Exception as error:
                raise _no_sequence(names, f"{name!r} does not take what comes before it: {error}") from error
    try:
        torch.testing.assert_close(y, whole, equal_nan=True)
    except (AssertionError, TypeError) as error:
        difference = str(error).strip().splitlines()[0]
        raise _no_sequence(names, f"the model gives something else: {difference}") from None


def still(model: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode: whatever it is asked, the model stays as it is."""
    return copy.deepcopy(model).eval()


def _no_sequence(names: Sequence[str], reason: str) -> ValueError:
    return check.fail(
        "blocks",
        tuple(names),
        f"submodules that the model applies one after another, with nothing in between ({reason}); "
        "what lies between two of them, a reshape or a nonlinearity, belongs into one of them",
    )


def _declared(model: nn.Module) -> Sequence[str] | None:
    """Return what a model itself says of its blocks."""
    if isinstance(model, Part):
        return model._names
    if isinstance(model, nn.Sequential):
        return [n for n, _ in model.named_modules(remove_duplicate=False) if n and "." not in n]
    blocks = getattr(model, "blocks", None)
    return blocks if is_words(blocks) else None


def _check_names(model: nn.Module, names: Sequence[str]) -> None:
    """Refuse what is no submodule, and one inside of another."""
    submodules = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for i, name in enumerate(names):
        if name not in submodules:
            listed = _first([*map(repr, submodules)], 8) or "none"
            allowed = f"{ALLOWED}; its submodules: {listed}{check.meant(name, submodules)}"
            raise check.fail("blocks", name, allowed)
        around = [other for j, other in enumerate(names) if i != j and _is_in(name, other)]
        if around:
            raise check.fail("blocks", name, f"each block once, and none inside of another: {around[0]!r}")


def _first(names: Sequence[str], count: int) -> str:
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")


def is_words(value: Any) -> bool:
    """Return whether it is a list of words, and not one word."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and all(isinstance(word, str) for word in value)


def _is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers, each tensor once, under its first name."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _counts(tensor: Tensor) -> bool:
    """Return whether a tensor may change in training: buffers, and parameters that require gradients."""
    return tensor.requires_grad or not isinstance(tensor, nn.Parameter)


def _submodule(root: nn.Module, path: str) -> nn.Module:
    """Return the submodule of this name, made of empty modules where there is none."""
    for name in path.split(".") if path else ():
        if name not in root._modules:
            root.add_module(name, nn.Module().train(root.training))
        root = root.get_submodule(name)
    return root


def _lend(module: nn.Module, path: str, to: nn.Module, held: set[int], first: set[str]) -> None:
    """Register tensors of a module outside that a block holds, too, if this is the model's name for them."""
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    for name, tensor in tensors:
        if id(tensor) in held and (f"{path}.{name}" if path else name) in first:
            place = _submodule(to, path)
            if isinstance(tensor, nn.Parameter):
                place.register_parameter(name, tensor)
            else:
                place.register_buffer(name, tensor)


def _copied(x: Any) -> Any:
    """Return a copy: a layer may work in place."""
    return x.clone() if isinstance(x, Tensor) else copy.deepcopy(x)
