"""BatchNorm over the real samples of a batch, whatever class a layer is of.

A layer keeps its names, its tensors and its place in the model; only the function that normalizes is another
one. The `forward` of PyTorch's own classes is replaced. That of a subclass stays as it is (with an activation
after the normalization, say), and each of its calls of `F.batch_norm` comes here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

MASK = "batch_mask"
# clients do not synchronize their batches: SyncBatchNorm is as the others
_TORCH_CLASSES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Normalized(torch.autograd.Function):
    """Batch normalization of x [B, C, L], in which sample b counts for its share s_b, Σ_b s_b = 1.

        μ = Σ_b s_b μ_b,   σ² = Σ_b s_b (σ²_b + (μ_b − μ)²),   r = 1/√(σ² + ε),   y = w r (x − μ) + b
        ∂x = w r (∂y − s_b/L · (Σ ∂y + r² (x − μ) Σ ∂y (x − μ))),   ∂w = r Σ ∂y (x − μ),   ∂b = Σ ∂y

    with each sample's own mean μ_b and variance σ²_b, and sums over samples and places. A sample without a
    share has no ∂y. Written out because the derivative of the formula takes twice as many passes over x.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, share: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean, var = _statistics(x, share)
        scale = torch.rsqrt(var + eps) * weight
        return torch.addcmul(bias[:, None], x - mean[:, None], scale[:, None]), mean, var

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.save_for_forward(*inputs[:3])
        ctx.eps = inputs[4]
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, share, weight = ctx.saved_tensors
        mean, var = _statistics(x, share)  # again, so that this too can be differentiated
        scale, centred = torch.rsqrt(var + ctx.eps), x - mean[:, None]
        of_bias, along = gradient.sum((0, 2)), (gradient * centred).sum((0, 2))
        a, part = scale * weight, -(share / x.shape[2])[:, None, None]
        back = torch.addcmul(
            part * (a * of_bias)[:, None], centred, part * (a * scale.square() * along)[:, None]
        )
        return torch.addcmul(back, gradient, a[:, None]), None, scale * along, of_bias, None

    @staticmethod
    def jvp(ctx: Any, x_dot: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the change of y along a change of x, w and b."""
        x, share, weight = ctx.saved_for_forward
        mean, var = _statistics(x, share)
        scale, centred = torch.rsqrt(var + ctx.eps), x - mean[:, None]
        along, turn, lift = x_dot, others[1], others[2]
        change = torch.zeros_like(x)
        if along is not None:
            part = (share / x.shape[2])[:, None, None]
            of_mean, of_var = (part * along).sum((0, 2)), 2 * (part * centred * along).sum((0, 2))
            slope = -0.5 * scale.pow(3) * of_var
            change = weight[:, None] * (
                slope[:, None] * centred + scale[:, None] * (along - of_mean[:, None])
            )
        if turn is not None:
            change = change + (turn * scale)[:, None] * centred
        return change if lift is None else change + lift[:, None], None, None


def _statistics(x: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Return μ and σ² in one pass over x."""
    each_var, each = torch.var_mean(x, -1, correction=0)
    part = share[:, None]
    mean = (part * each).sum(0)
    return mean, (part * (each_var + (each - mean).square())).sum(0)


class MaskedBatchNorm(nn.Module):
    """What a BatchNorm layer becomes an instance of, beside its own class.

    Without a mask it is PyTorch's, except that a batch of a single value normalizes to zero, and is no error.
    """

    batch_mask: Tensor
    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    eps: float
    momentum: float | None
    track_running_stats: bool
    tracks = True  # else a batch leaves the statistics as they are
    measures = False  # whether they become those of the last batch

    def normalize(
        self,
        x: Tensor,
        mean: Tensor | None,
        var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float | None = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Return what `F.batch_norm` would for the real samples, in single precision at least."""
        # the function below `F.batch_norm`, which a layer around this one does not replace
        cudnn = torch.backends.cudnn.enabled
        if not training:
            return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, cudnn)
        if not self.tracks:
            mean = var = None
        rate = 1.0 if self.measures else momentum
        if self.batch_mask.dim() == 0 and rate is not None and x.numel() > x.shape[1]:
            return torch.batch_norm(x, weight, bias, mean, var, True, rate, eps, cudnn)
        values = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        mask = self.batch_mask.to(values.dtype).expand(x.shape[0])
        places = values.flatten(2) if x.dim() > 2 else values[..., None]
        weight = values.new_ones(x.shape[1]) if weight is None else weight
        bias = values.new_zeros(x.shape[1]) if bias is None else bias
        y, its_mean, its_var = Normalized.apply(places, mask / mask.sum(), weight, bias, eps)  # type: ignore[no-untyped-call]
        if mean is not None and var is not None:
            count = mask.sum() * places.shape[-1]
            self._track(mean, its_mean.detach(), rate)
            self._track(var, (its_var * count / (count - 1).clamp(min=1)).detach(), rate)
        normalized: Tensor = y.reshape(x.shape).to(x.dtype)
        return normalized

    def _track(self, statistic: Tensor, of_batch: Tensor, rate: float | None) -> None:
        """Move a statistic; without a rate it is the mean over all batches so far."""
        assert rate is not None or self.num_batches_tracked is not None
        by = rate if rate is not None else 1.0 / self.num_batches_tracked  # type: ignore[operator]
        statistic.copy_(statistic + by * (of_batch - statistic))


class _MaskedTorch(MaskedBatchNorm):
    """A layer of one of PyTorch's own classes: its whole forward pass is here."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.tracks and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        by_batch = self.training or self.running_mean is None
        statistics = (self.running_mean, self.running_var)
        return self.normalize(x, *statistics, self.weight, self.bias, by_batch, self.momentum, self.eps)


class _MaskedSubclass(MaskedBatchNorm):
    """A layer of a subclass: in its own forward pass, `F.batch_norm` is `normalize`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _NormalizeWith(self):
            return super().forward(*args, **kwargs)


class _NormalizeWith(TorchFunctionMode):
    """Replaces `F.batch_norm` in one thread, before `vmap` sees the call."""

    def __init__(self, norm: MaskedBatchNorm) -> None:
        super().__init__()
        self.norm = norm

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = self.norm.normalize if func is F.batch_norm else func
        return called(*args, **(kwargs or {}))


@functools.cache
def _class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of such a layer from now on: `isinstance(layer, nn.BatchNorm2d)` still holds."""
    return type(
        f"Masked{kind.__name__}", (_MaskedTorch if kind in _TORCH_CLASSES else _MaskedSubclass, kind), {}
    )


def mask_padding(module: nn.Module) -> None:
    """Let this layer, if it is a BatchNorm, go by the real samples of a batch."""
    if isinstance(module, _BatchNorm) and not isinstance(module, MaskedBatchNorm):
        module.__class__ = _class(type(module))  # type: ignore[assignment,arg-type]
        device = next((t.device for t in (module.weight, module.running_mean) if t is not None), None)
        module.register_buffer(MASK, torch.ones((), device=device), persistent=False)


def static(module: nn.Module) -> nn.Module:
    """Let the module's BatchNorm layers leave their statistics as they are, and go by each batch's own."""
    for norm in _norms(module):
        norm.tracks = False
        if isinstance(norm, _MaskedSubclass):  # it counts batches, and passes statistics on, by itself
            norm.track_running_stats = False
    return module


def by_batch(module: nn.Module) -> nn.Module:
    """Set the module to evaluation, except that BatchNorm layers go by each batch's own statistics."""
    _evaluate_by_batch(module)
    return static(module)


def of_one_batch(module: nn.Module) -> nn.Module:
    """Set the module to evaluation, except that BatchNorm's statistics become those of the last batch."""
    for norm in _evaluate_by_batch(module):
        norm.measures = True
    return module


def tracked(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return the names of the means and variances that BatchNorm layers measure."""
    norms = [n for n, m in module.named_modules() if isinstance(m, MaskedBatchNorm) and m.measures]
    buffers = dict(module.named_buffers())
    pairs = [tuple(f"{n}.{k}".lstrip(".") for k in ("running_mean", "running_var")) for n in norms]
    return tuple((mean, var) for mean, var in pairs if mean in buffers)


def _evaluate_by_batch(module: nn.Module) -> list[MaskedBatchNorm]:
    """Set the module to evaluation, but for BatchNorm layers that it does not keep frozen; return these."""
    norms = [norm for norm in _norms(module.train()) if norm.training]
    module.eval()
    for norm in norms:
        norm.training = True  # and not what it has inside, such as dropout
    return norms


def _norms(module: nn.Module) -> Iterator[MaskedBatchNorm]:
    return (m for m in module.modules() if isinstance(m, MaskedBatchNorm))
