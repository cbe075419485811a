"""Parameters that are not trained: all copies of a model share their memory.

Of a large model that is fine-tuned with adapters nearly everything is frozen, and copies of it would take
many times its size. Whoever writes into a frozen tensor, as peft's `merge_and_unload` does, thus changes it
for all copies; `refuse_changed` notices that.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from partita.core import check

Module = TypeVar("Module", bound=nn.Module)
LOOKED_AT = 64  # entries of each tensor: who merges adapters into it changes nearly all
_noted: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()


def lean_copy(module: Module, own: Collection[str] = ()) -> Module:
    """Return a copy whose frozen parameters are new objects over the same memory, but for those to `own`.

    Subclasses of parameters, as quantized ones, are copied by their own rule.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    owned = {id(named[name]) for name in own if name in named}  # whatever else is tied to it
    memo: dict[int, object] = {
        id(p): nn.Parameter(p.detach(), requires_grad=False)
        for p in module.parameters()
        if _is_shared(p) and id(p) not in owned
    }
    return copy.deepcopy(module, {**left_behind(module), **memo})


def left_behind(module: nn.Module) -> dict[int, object]:
    """Return for copies what torch's old weight_norm and spectral_norm have left as a layer's weight.

    It is no parameter, and a pass computes it anew; `copy.deepcopy` refuses it.
    """
    memo: dict[int, object] = {}
    for layer in module.modules():
        for hook in layer._forward_pre_hooks.values():
            weight = vars(layer).get(hook.name) if isinstance(hook, SpectralNorm | WeightNorm) else None
            if isinstance(weight, Tensor):
                ended = is_functorch_wrapped_tensor(weight)  # of a pass for several clients
                memo[id(weight)] = torch.zeros(0) if ended else weight.detach().clone()
    return memo


def _is_shared(p: nn.Parameter) -> bool:
    return not p.requires_grad and type(p) is nn.Parameter and not p.is_meta


def note(module: nn.Module) -> nn.Module:
    """Remember what the frozen parameters of a run's model are; return the model."""
    _noted[module] = _mark(module)
    return module


def refuse_changed(module: nn.Module) -> None:
    """Refuse to go on with a model whose frozen parameters are no longer those of the run."""
    before = _noted.get(module)
    if before is not None and not torch.equal(before, _mark(module)):
        raise check.fail(
            "model",
            type(module).__name__,
            "copy.deepcopy(client.model()) before a model is changed in place, and the run made anew",
            "its frozen parameters have been written into since training; client.model() and the model that "
            "was given share their memory with the run",
        )


def _mark(module: nn.Module) -> Tensor:
    """Return some entries of each frozen parameter, added up."""
    sums = [_sum(p.detach()) for p in module.parameters() if _is_shared(p) and p.numel()]
    return torch.stack(sums).cpu() if sums else torch.zeros(0)


def _sum(x: Tensor) -> Tensor:
    while x.dim() > 1 and not x.is_contiguous():  # without a copy
        x = x[..., 0]
    flat = torch.view_as_real(x.reshape(-1)).reshape(-1) if x.is_complex() else x.reshape(-1)
    return flat[:: max(1, len(flat) // LOOKED_AT)].double().nan_to_num().sum()
