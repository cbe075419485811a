"""The outputs of a model's submodules, recorded by hooks while samples pass through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from partita.capacity.blocks import block_names
from partita.core import check
from partita.core.inputs import functional, samples
from partita.core.types import Inputs, Tensors


def outputs(
    module: nn.Module, tensors: tuple[Tensors, ...], x: Inputs, names: Sequence[str] | None = None
) -> Tensors:
    """Return what the named submodules (None: the blocks) put out for x, by name, without gradients.

    A submodule that is called several times has its last output, and one with several outputs the first.
    """
    chosen = owners(module) if names is None else tuple(names)
    submodules = {name: submodule(module, name) for name in chosen}
    recorded: dict[str, Any] = {}
    with ExitStack() as hooks, torch.no_grad():
        for name, part in submodules.items():
            hooks.callback(part.register_forward_hook(_keep(recorded, name)).remove)
        functional(module, tensors, x)
    return {name: _rows(name, recorded.get(name), samples(x)) for name in chosen}


def owners(module: nn.Module) -> tuple[str, ...]:
    """Return the blocks of a model that own parameters."""
    return tuple(k for k in block_names(module) if any(True for _ in module.get_submodule(k).parameters()))


def submodule(module: nn.Module, name: str) -> nn.Module:
    """Return the submodule of this dotted name; refuse another name, with one that is near."""
    submodules: dict[str, nn.Module] = {k: m for k, m in module.named_modules(remove_duplicate=False) if k}
    if name not in submodules:
        children = ", ".join(repr(k) for k, _ in module.named_children())
        near = check.meant(name, submodules)
        allowed = f"a submodule of {type(module).__name__}, such as {children}{near}"
        raise check.fail("blocks", name, allowed)
    return submodules[name]


def _keep(recorded: dict[str, Any], name: str) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:  # noqa: ARG001
        recorded[name] = output[0] if isinstance(output, tuple) and output else output

    return hook


def _rows(name: str, output: Any, samples: int) -> Tensor:
    if output is None:
        raise check.fail("blocks", name, "a submodule that the model calls when it is evaluated")
    if not isinstance(output, Tensor) or output.dim() == 0 or len(output) != samples:
        shape = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise check.fail("blocks", name, f"a submodule that returns a row for each sample, not {shape}")
    return output
