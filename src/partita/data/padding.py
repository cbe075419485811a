"""The masks that models ask for, of which entries of a padded sequence are real."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from partita.data.columns import Columns, Ragged

MASKS: dict[str, Callable[[Tensor], Tensor]] = {  # by the names of arguments, of what is no padding
    "attention_mask": lambda real: real.to(torch.int64),
    "src_key_padding_mask": torch.logical_not,
    "key_padding_mask": torch.logical_not,
}


def mask_for(model: nn.Module, x: Columns) -> str:
    """Return the name of the mask that a model takes with these sequences; '': none, or it is given."""
    sequences = isinstance(x, dict) and any(isinstance(column, Ragged) for column in x.values())
    if not isinstance(x, dict) or not sequences or any(name in x for name in MASKS):
        return ""
    arguments = _arguments(model)
    return next((name for name in MASKS if name in arguments), "")


def _arguments(model: nn.Module) -> set[str]:
    """Return the names of a model's arguments; those of the model inside, where a wrapper takes any."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    inside = getattr(model, "get_base_model", None)  # of peft
    if any(p.kind == p.VAR_KEYWORD for p in parameters) and callable(inside):
        names |= _arguments(inside())
    return names
