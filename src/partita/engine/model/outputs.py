"""What is inside a model: the outputs of its submodules, taken down by hooks while samples pass through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from partita.capacity.blocks import block_names
from partita.core import check
from partita.core.types import Tensors


def outputs(
    module: nn.Module, tensors: tuple[Tensors, ...], x: Tensor, names: Sequence[str] | None = None
) -> Tensors:
    """What the named submodules (None: the blocks) put out for x, by name, without gradients.

    Of a submodule that is called several times it is the last output, and of several outputs the first one.
    """
    chosen = owners(module) if names is None else tuple(names)
    inside = {name: submodule(module, name) for name in chosen}
    found: dict[str, Any] = {}
    with ExitStack() as hooked, torch.no_grad():
        for name, part in inside.items():
            hooked.callback(part.register_forward_hook(_keep(found, name)).remove)
        functional_call(module, tensors, (x,))
    return {name: _rows(name, found.get(name), len(x)) for name in chosen}


def owners(module: nn.Module) -> tuple[str, ...]:
    """The blocks of a model that own parameters."""
    return tuple(k for k in block_names(module) if any(True for _ in module.get_submodule(k).parameters()))


def submodule(module: nn.Module, name: str) -> nn.Module:
    """The part of a module that has this dotted name; an error that names what is near."""
    known: dict[str, nn.Module] = {k: part for k, part in module.named_modules(remove_duplicate=False) if k}
    if name not in known:
        near = check.meant(name, known)
        allowed = f"a submodule of {type(module).__name__}, such as {_children(module)}{near}"
        raise check.fail("blocks", name, allowed)
    return known[name]


def _children(module: nn.Module) -> str:
    return ", ".join(repr(k) for k, _ in module.named_children())


def _keep(found: dict[str, Any], name: str) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, given: Any, output: Any) -> None:  # noqa: ARG001
        found[name] = output[0] if isinstance(output, tuple) and output else output

    return hook


def _rows(name: str, output: Any, samples: int) -> Tensor:
    if output is None:
        raise check.fail("blocks", name, "a submodule that the model calls when it is evaluated")
    if not isinstance(output, Tensor) or output.dim() == 0 or len(output) != samples:
        given = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise check.fail("blocks", name, f"a submodule that returns a row for each sample, not {given}")
    return output
