"""Pooling in operations that can be stacked over clients, also where channels are the last axis in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from partita.engine.model.functions import Functions


def _adaptive_mean(mode: Functions, func: Any, input: Tensor, output_size: Any) -> Any:
    """Return the mean of each channel, or of its parts; torch writes strides where channels are last."""
    if not mode.stacked:
        mode.used = mode.used or not input.is_contiguous()
        return NotImplemented
    sizes = output_size if isinstance(output_size, tuple | list) else (output_size, output_size)
    if tuple(sizes) == (1, 1):
        return input.mean((-2, -1), keepdim=True)
    return func(input.contiguous(), output_size)


FORMS: dict[Any, Callable[..., Any]] = {F.adaptive_avg_pool2d: _adaptive_mean}
