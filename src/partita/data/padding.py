"""The masks that models ask for, of which entries of a padded sequence are real."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from partita.core import check
from partita.data.columns import Columns, Ragged


class Mask(NamedTuple):
    """How a mask is made of what is real (no padding), and how it is read."""

    made: Callable[[Tensor], Tensor]
    real: Callable[[Tensor], Tensor]


MASKS = {  # by the names of arguments
    "attention_mask": Mask(lambda real: real.to(torch.int64), lambda mask: mask != 0),
    "src_key_padding_mask": Mask(torch.logical_not, torch.logical_not),
    "key_padding_mask": Mask(torch.logical_not, torch.logical_not),
}
SEQUENCES = ("input_ids", "inputs_embeds", "input_values", "input_features", "src")
"""Names of the input that a mask belongs to."""


def mask_for(model: nn.Module, x: Columns) -> str:
    """Return the name of the mask that a model takes with these sequences; '': none, or it is given."""
    if not isinstance(x, dict) or any(name in x for name in MASKS):
        return ""
    arguments = _arguments(model)
    mask = next((name for name in MASKS if name in arguments), "")
    sequences = {name: column for name, column in x.items() if isinstance(column, Ragged)}
    name = masked_input(x)
    if not mask or name not in sequences:
        return ""
    lengths = sequences[name].length
    if name not in SEQUENCES and not all(torch.equal(c.length, lengths) for c in sequences.values()):
        allowed = f"{mask!r} among the inputs, or the name 'input_ids' or 'src' to what it belongs to"
        reason = f"the model takes {mask}, and these sequences differ in length"
        raise check.fail("x", ", ".join(sequences), allowed, reason)
    return mask


def masked_input(x: Mapping[str, Any]) -> str:
    """Return the name of the input that a mask belongs to: a usual one, or that of the first sequences."""
    ragged = (name for name, column in x.items() if isinstance(column, Ragged))
    return next((name for name in SEQUENCES if name in x), next(ragged, ""))


def real_entries(x: Mapping[str, Tensor], name: str) -> Tensor | None:
    """Return which entries of an input of one sample its mask calls real; None where it has none."""
    mask = next((mask for mask in MASKS if mask in x), None)
    if mask is None or x[mask].shape != x[name].shape[:1] or masked_input(x) not in ("", name):
        return None
    return MASKS[mask].real(x[mask])


def _arguments(model: nn.Module) -> set[str]:
    """Return the names of a model's arguments; those of the model inside, where a wrapper takes any."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    inside = getattr(model, "get_base_model", None)  # of peft
    if any(p.kind == p.VAR_KEYWORD for p in parameters) and callable(inside):
        names |= _arguments(inside())
    return names
