"""Functions for which torch has an equivalent that can be stacked over clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from partita.engine.model.functions import Functions


def _adaptive_mean(mode: Functions, func: Any, input: Tensor, output_size: Any) -> Any:
    """Return the mean of each channel, or of its parts; torch writes strides where channels are last."""
    if not mode.apart(input, noted=not input.is_contiguous()):
        return NotImplemented
    sizes = output_size if isinstance(output_size, tuple | list) else (output_size, output_size)
    if tuple(sizes) == (1, 1):
        return input.mean((-2, -1), keepdim=True)
    return func(input.contiguous(), output_size)


def _scatter(mode: Functions, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
    """Tensor.scatter_, whose form that makes a new tensor can be stacked."""
    if not mode.apart(x):
        return NotImplemented
    return x.copy_(x.scatter(*args, **kwargs))


def _bilinear(
    mode: Functions,
    func: Any,  # noqa: ARG001
    input1: Tensor,
    input2: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Any:
    """F.bilinear: y_o = xᵀ W_o z + b_o."""
    if not mode.apart(input1, input2, weight):
        return NotImplemented
    result = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return result if bias is None else result + bias


def _weight_norm(mode: Functions, func: Any, v: Tensor, g: Tensor, dim: int = 0) -> Any:  # noqa: ARG001
    """torch._weight_norm, of nn.utils.weight_norm: w = g v / ‖v‖, the norm over all axes but one."""
    if not mode.apart(v, g):
        return NotImplemented
    others = [i for i in range(v.dim()) if i != dim % v.dim() or dim == -1]
    return v * (g / torch.linalg.vector_norm(v, 2, others, keepdim=True))


def _normalize(
    mode: Functions,
    func: Any,
    input: Tensor,
    p: float = 2.0,
    dim: Any = 1,
    eps: float = 1e-12,
    out: Tensor | None = None,
) -> Any:
    """F.normalize with `out`, of nn.utils.spectral_norm: u ← W v / ‖W v‖."""
    if out is None or not mode.apart(input, out):
        return NotImplemented
    return out.copy_(func(input, p, dim, eps))


def _fits_nested(mode: Functions, func: Any, x: Tensor, mask: Tensor, **named: Any) -> Any:  # noqa: ARG001
    """torch._nested_tensor_from_mask_left_aligned: whether nn.TransformerEncoder may pack its sequences."""
    return False if mode.apart(x, mask) else NotImplemented


FORMS: dict[Any, Callable[..., Any]] = {
    F.adaptive_avg_pool2d: _adaptive_mean,
    Tensor.scatter_: _scatter,
    F.bilinear: _bilinear,
    torch._weight_norm: _weight_norm,
    F.normalize: _normalize,
    torch._nested_tensor_from_mask_left_aligned: _fits_nested,
}
