"""Models that were given as torch.compile makes them: a run takes the model inside.

Stacked clients, keyed draws and hooks change what a pass computes, so that torch would compile it again and
again; `federate` traces steps by itself where that is faster.
"""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any

from torch import nn

from partita.core.frozen import lean_copy


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model without torch.compile: a copy, or itself where no part of it is compiled."""
    if not any(_is_compiled(module) for module in model.modules()):
        return model
    return _without(lean_copy(model))


def _is_compiled(module: nn.Module) -> bool:
    return _is_wrapper(module) or module._compiled_call_impl is not None or _inside(module) is not None


def _inside(module: nn.Module) -> Any:
    """Return the method of `module.forward = torch.compile(module.forward)`, which a copy would share."""
    method = getattr(vars(module).get("forward"), "_torchdynamo_orig_callable", None)
    return method if isinstance(method, MethodType) else None


def _is_wrapper(module: nn.Module) -> bool:
    """Return whether torch.compile has made this module; nothing has, where its code is not loaded."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def _without(module: nn.Module) -> nn.Module:
    while _is_wrapper(module):
        module = module._orig_mod  # type: ignore[assignment]
    module._compiled_call_impl = None
    method = _inside(module)
    if method is not None:
        vars(module)["forward"] = MethodType(method.__func__, module)
    for name, child in module._modules.items():
        if child is not None:
            module._modules[name] = _without(child)
    return module
