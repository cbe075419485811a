"""Scaled dot-product attention in operations that can be stacked over clients.

    softmax(Q Kᵀ / √d + M) V      with the mask M, and dropout of the probabilities

torch's own function has no form for several clients at once. There are two here: the plain one takes it apart
into products and a softmax, the fused one calls torch's kernel for all clients at once. `form` decides.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_all_functorch_interpreters

from partita.engine.model.functions.fused import Options, fused

if TYPE_CHECKING:
    from partita.engine.model.functions import Functions

PLAIN, CPU, EFFICIENT, FLASH = "plain", "cpu", "efficient", "flash"
FASTER_FROM: dict[str, dict[int, int]] = {
    CPU: {2: 512, 4: 256, 8: 256},
    EFFICIENT: {2: 256, 4: 512},
    FLASH: {2: 256},
}
"""The keys from which a kernel is faster than the plain form, as measured, by the bytes of a number.

On a GPU that is so for recorded steps; what is not recorded waits for the host, which fused attention keeps
busier.
"""
DTYPES = {
    CPU: (torch.float32, torch.float64, torch.bfloat16),
    EFFICIENT: (torch.float32, torch.bfloat16, torch.float16),
    FLASH: (torch.bfloat16, torch.float16),
}
CAPABILITY = (8, 0)  # of a GPU, at least
MAX_HEAD, HEAD_MULTIPLE = 128, 8  # of the size of a head on a GPU
MAX_BATCH = (1 << 16) - 1  # samples of all clients, and heads, on a GPU


def attention(
    mode: Functions,
    func: Any,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Return the attention of stacked clients, or of one whose draws must be the same as in a stack."""
    if not mode.apart(query, key, value) and not dropout_p:
        return NotImplemented
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    chosen = PLAIN if dropout_p else form(query, key, value, attn_mask, is_causal)
    if chosen != PLAIN:
        query, key, value = (x.to(_dtype(query)) for x in (query, key, value))
        return fused(query, key, value, attn_mask, Options(chosen, is_causal, scale))
    scores, unseen = _masked(query @ key.transpose(-2, -1) * scale, attn_mask, is_causal)
    weights = torch.softmax(scores, -1)
    if unseen is not None:
        weights = torch.where(unseen, 0.0, weights)
    if dropout_p:
        with mode:
            weights = F.dropout(weights, dropout_p)
    return weights @ value


def form(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> str:
    """Return the form that computes this attention, without dropout: `PLAIN` or the name of a kernel."""
    for kernel in (CPU,) if query.device.type == "cpu" else (FLASH, EFFICIENT):
        least = FASTER_FROM[kernel].get(_dtype(query).itemsize)
        if least is not None and key.shape[-2] >= least and _runs(kernel, query, key, value, mask, causal):
            return kernel
    return PLAIN


def _runs(kernel: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> bool:
    """Return whether the kernel computes this attention, with all the derivatives that are taken of it."""
    return (
        _dtype(query) in DTYPES[kernel]
        and _alike(query, key, value, mask)
        and (kernel == CPU or _runs_on_gpu(query))
        and (kernel != FLASH or (mask is None and not (causal and query.shape[-2] != key.shape[-2])))
        and not (causal and mask is not None)
        and not _differentiated_otherwise()
        and not torch.compiler.is_dynamo_compiling()
    )


def _dtype(x: Tensor) -> torch.dtype:
    """Return the type in which torch's own function computes: autocast has it among products of matrices."""
    device = x.device.type
    half = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if half else x.dtype


def _alike(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether the tensors fit each other as they are, and none is empty."""
    shape = (*query.shape[:-1], key.shape[-2])
    return (
        query.shape[:-2] == key.shape[:-2]
        and key.shape == value.shape
        and query.shape[-1] == key.shape[-1]
        and _dtype(query) == _dtype(key) == _dtype(value)
        and 0 not in (*query.shape, *key.shape)
        and (mask is None or _fits(mask, shape))
    )


def _fits(mask: Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether the mask says who sees whom, and can be expanded to this shape.

    Numbers that are added to the scores are left to the plain form: where they are huge and negative in a
    whole row, it loses the scores in them as torch's own function does, and a kernel does not.
    """
    axes = zip(reversed(mask.shape), reversed(shape))
    expands = 0 < mask.dim() <= len(shape) and all(n in (1, length) for n, length in axes)
    return mask.dtype == torch.bool and expands


def _runs_on_gpu(query: Tensor) -> bool:
    """Return whether kernels of CUDA know heads of this size, and as many samples."""
    if query.device.type != "cuda" or torch.version.hip is not None:
        return False
    clients = [
        i.batch_size() for i in retrieve_all_functorch_interpreters() if isinstance(i, VmapInterpreter)
    ]
    *lead, _, width = query.shape
    batch, heads = math.prod((*clients, *lead[:-1])), lead[-1] if lead else 1
    return (
        torch.cuda.get_device_capability(query.device) >= CAPABILITY
        and width % HEAD_MULTIPLE == 0
        and width <= MAX_HEAD
        and max(batch, heads) <= MAX_BATCH
    )


def _differentiated_otherwise() -> bool:
    """Return whether derivatives are taken that kernels do not have: forward ones, or several."""
    levels = [interpreter.key() for interpreter in retrieve_all_functorch_interpreters()]
    return TransformType.Jvp in levels or levels.count(TransformType.Grad) > 1


def _masked(scores: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor | None]:
    """Return the scores under the mask, and the places that see nothing, whose attention is zero."""
    if causal:
        length, width = scores.shape[-2:]
        seen = torch.ones(length, width, dtype=torch.bool, device=scores.device).tril()
        return scores.masked_fill(~seen, -math.inf), None
    if mask is None:
        return scores, None
    hidden = ~mask if mask.dtype == torch.bool else mask == -math.inf
    unseen = hidden.all(-1, keepdim=True)
    scores = torch.where(hidden, -math.inf, scores if mask.dtype == torch.bool else scores + mask)
    return torch.where(unseen, 0.0, scores), unseen
