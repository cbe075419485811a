"""Attention of several clients by one fused kernel.

    O = P V,   P = softmax(s Q Kᵀ + M)
    ∂V = Pᵀ ∂O,   ∂S = P ∘ (∂O Vᵀ − rowsum(∂O ∘ O)),   ∂Q = s ∂S K,   ∂K = s ∂Sᵀ Q

Attention has no weights, so stacked clients are a larger batch: the rule for `vmap` folds them into it. A
kernel has no derivative of its gradient; there the formula above is differentiated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
ALIGNMENT = 8  # rows begin at a multiple of this many numbers: what the kernels of CUDA ask for


class Options(NamedTuple):
    """What is no tensor: the kernel's name, whether a place sees only those before it, and s."""

    kernel: str
    causal: bool
    scale: float


def fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Options) -> Tensor:
    """Return the attention by a kernel, under a mask of who sees whom; who sees nobody has zeros."""
    *lead, length, width = query.shape
    batch, heads = math.prod(lead[:-1]), lead[-1] if lead else 1
    query, key, value = (x.reshape(batch, heads, *x.shape[-2:]) for x in (query, key, value))
    unseen = None
    if mask is not None:
        mask, unseen = _bias(mask.expand(*mask.shape[:-1], key.shape[-2]), query.dtype)
        mask, unseen = _four_axes(mask, lead), _four_axes(unseen, lead)
    out: Tensor = Attention.apply(options, query, key, value, mask)[0]  # type: ignore[no-untyped-call]
    if unseen is not None:
        out = torch.where(unseen, 0.0, out)
    return out.reshape(*lead, length, width)


def _bias(mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return what is added to the scores, and the places that see nothing, which here see everything."""
    unseen = ~mask.any(-1, keepdim=True)
    return torch.where(mask | unseen, 0.0, -math.inf).to(dtype), unseen


def _four_axes(mask: Tensor, lead: list[int]) -> Tensor:
    """Return the mask as [1 or batch, 1 or heads, ...], for attention with these axes before the last two."""
    mask = mask.reshape(*[1] * (len(lead) + 2 - mask.dim()), *mask.shape)
    before, heads = mask.shape[:-3], mask.shape[-3] if lead else 1
    if math.prod(before) > 1:
        mask = mask.expand(*lead[:-1], *mask.shape[-3:])
    return mask.reshape(-1, heads, *mask.shape[-2:])


class Attention(torch.autograd.Function):
    """Attention of q, k, v [B, H, L, D] under an additive mask, and what its gradient needs of it."""

    @staticmethod
    def forward(
        options: Options, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, ...]:
        return KERNELS[options.kernel].forward(
            _dense(query), _dense(key), _dense(value), mask, options.causal, options.scale
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.options = inputs[0]
        ctx.save_for_backward(*inputs[1:], *output)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        of_inputs = Gradient.apply(ctx.options, gradient, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return None, *of_inputs, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, options: Options, *tensors: Tensor | None) -> Any:
        n, batch = info.batch_size, _batch(tensors[0], in_dims[1])
        output = Attention.apply(options, *_folded(tensors, in_dims[1:], n, batch))  # type: ignore[no-untyped-call]
        out, sums, *state = output
        return (_unfolded(out, n), _unfolded(sums, n), *state), (0, 0, *[None] * len(state))


class Gradient(torch.autograd.Function):
    """∂Q, ∂K, ∂V of ∂O, the inputs of `Attention`, and all that it returned."""

    @staticmethod
    def forward(options: Options, gradient: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
        query, key, value, mask, *output = tensors
        inputs = [_dense(x) for x in (gradient, query, key, value)]
        return KERNELS[options.kernel].backward(*inputs, mask, *output, options.causal, options.scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ARG004
        ctx.options, ctx.others = inputs[0], len(inputs) - 5
        ctx.save_for_backward(*inputs[1:6])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Differentiate the formula with respect to ∂O, Q, K and V, of which O is a function."""
        *tensors, mask = ctx.saved_tensors

        def formula(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
            return _gradient(gradient, query, key, value, mask, ctx.options)

        return None, *torch.func.vjp(formula, *tensors)[1](gradients), *[None] * ctx.others

    @staticmethod
    def vmap(info: Any, in_dims: Any, options: Options, gradient: Tensor, *tensors: Any) -> Any:
        n, batch = info.batch_size, _batch(tensors[0], in_dims[2])
        inputs, output, state = tensors[:4], tensors[4:6], tensors[6:]
        folded = [
            *_folded((gradient,), in_dims[1:2], n, batch),
            *_folded(inputs, in_dims[2:6], n, batch),
            *_folded(output, in_dims[6:8], n, batch),
        ]
        results = Gradient.apply(options, *folded, *state)  # type: ignore[no-untyped-call]
        return tuple([_unfolded(x, n) for x in results]), (0, 0, 0)


def _gradient(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Options
) -> tuple[Tensor, ...]:
    """Return ∂Q, ∂K, ∂V by the formula, in single precision at least."""
    dtype = query.dtype
    if dtype in (torch.bfloat16, torch.float16):
        gradient, query, key, value = (x.float() for x in (gradient, query, key, value))
    scores = query @ key.mT * options.scale
    if mask is not None:
        scores = scores + mask
    if options.causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    weights = torch.softmax(scores, -1)
    of_weights = gradient @ value.mT
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * options.scale
    return tuple(x.to(dtype) for x in (of_scores @ key, of_scores.mT @ query, weights.mT @ gradient))


# ---- clients as a larger batch


def _batch(query: Tensor | None, dim: int | None) -> int:
    """Return B, where the clients are in the axis `dim`."""
    assert query is not None
    return query.shape[0] if dim is None or dim > 0 else query.shape[1]


def _folded(tensors: Any, dims: Any, n: int, batch: int) -> list[Tensor | None]:
    """Return [n, B, ...] as [n B, ...]; a mask that all samples share stays one."""
    folded: list[Tensor | None] = []
    for x, dim in zip(tensors, dims):
        if x is None or (dim is None and x.shape[0] == 1 < batch):
            folded.append(x)
            continue
        rows = x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)
        folded.append(rows.expand(n, batch, *rows.shape[2:]).flatten(0, 1))
    return folded


def _unfolded(x: Tensor, n: int) -> Tensor:
    return x.reshape(n, -1, *x.shape[1:])


# ---- kernels


class Kernel(NamedTuple):
    """A fused kernel.

    forward     of q, k, v, mask, causal, scale: the attention, the logarithms of its sums, and its state
    backward    of ∂O, q, k, v, mask, all that forward returned, causal, scale: ∂Q, ∂K, ∂V
    """

    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, ...]]


def _dense(x: Tensor) -> Tensor:
    """Return the tensor with the numbers of a row side by side, and rows that begin where kernels like it."""
    return x if _is_dense(x) else x.contiguous()


def _is_dense(x: Tensor) -> bool:
    return x.stride(-1) == 1 and not any(step % ALIGNMENT for step in x.stride()[:-1])


def _cpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)


def _cpu_backward(*args: Any) -> Any:
    gradient, q, k, v, mask, out, sums, causal, scale = args
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, q, k, v, out, sums, 0.0, causal, attn_mask=mask, scale=scale
    )


def _aligned(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return the mask as [B, H, L, S] with rows that begin at a multiple of `ALIGNMENT`."""
    if mask is None:
        return None
    width = k.shape[-2]
    if not _is_dense(mask):
        mask = F.pad(mask.contiguous(), (0, -width % ALIGNMENT))[..., :width]
    return mask.expand(*q.shape[:-1], width)


def _efficient(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Any:
    return aten._scaled_dot_product_efficient_attention(
        q, k, v, _aligned(mask, q, k), True, 0.0, causal, scale=scale
    )


def _efficient_backward(*args: Any) -> Any:
    gradient, q, k, v, mask, out, sums, seed, offset, causal, scale = args
    gradient, out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (gradient, out))
    needed = [True, True, True, False]
    return aten._scaled_dot_product_efficient_attention_backward(
        gradient,
        q,
        k,
        v,
        _aligned(mask, q, k),
        out,
        sums,
        seed,
        offset,
        0.0,
        needed,
        causal,
        scale=scale,
    )[:3]


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Any:
    assert mask is None
    out, sums, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return out, sums, seed, offset


def _flash_backward(*args: Any) -> Any:
    gradient, q, k, v, _, out, sums, seed, offset, causal, scale = args
    lengths = None, None, q.shape[-2], k.shape[-2]
    return aten._scaled_dot_product_flash_attention_backward(
        gradient, q, k, v, out, sums, *lengths, 0.0, causal, seed, offset, scale=scale
    )


KERNELS = {
    "cpu": Kernel(_cpu, _cpu_backward),
    "efficient": Kernel(_efficient, _efficient_backward),
    "flash": Kernel(_flash, _flash_backward),
}
