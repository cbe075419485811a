"""Modules whose forward pass is a function of its inputs alone, so that many clients can be stacked.

Dropout draws from the batch's key instead of a global generator: the same mask for a client whether it runs
alone, in a stack, or in a captured graph. BatchNorm ignores the padding of short batches. Both receive what
they need as buffers, which `functional_call` sets for each client.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partita import draws
from partita.types import Tensors

KEY, MASK = "batch_key", "batch_mask"
_LEADING: dict[type[nn.Module], int | None] = {
    nn.Dropout: None,
    nn.Dropout1d: 2,
    nn.Dropout2d: 2,
    nn.Dropout3d: 2,
}


class KeyedDropout(nn.Module):
    """Dropout whose mask is a function of a key; whole channels when `leading` axes are kept apart."""

    batch_key: Tensor

    def __init__(self, p: float, leading: int | None) -> None:
        super().__init__()
        self.p, self.leading = p, leading
        self._seen: Tensor | None = None
        self._calls = 0
        self.register_buffer(KEY, torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        if self.p == 1.0:
            return x * 0.0
        shape = x.shape if self.leading is None else x.shape[: self.leading]
        count = torch.arange(shape.numel(), device=x.device)
        key = draws.fold(self.batch_key, self._call())
        kept = (draws.uniform(draws.fold(key, count)) >= self.p).view(shape)
        kept = kept.view(*shape, *[1] * (x.dim() - len(shape)))
        return x * kept.to(x.dtype) / (1.0 - self.p)

    def _call(self) -> int:
        """How often this module was called in this forward pass: each pass brings a new key tensor."""
        self._calls = self._calls + 1 if self._seen is self.batch_key else 0
        self._seen = self.batch_key
        return self._calls


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
        """The change of y along a change of x, w and b."""
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
    """μ and σ², with one look at x."""
    each_var, each = torch.var_mean(x, -1, correction=0)
    part = share[:, None]
    mean = (part * each).sum(0)
    return mean, (part * (each_var + (each - mean).square())).sum(0)


class MaskedBatchNorm(nn.Module):
    """BatchNorm over the real samples of a batch; takes the place of `norm` and keeps its names.

    Without a mask it is PyTorch's, except that a batch of a single value normalizes to zero, and is no error.
    """

    batch_mask: Tensor
    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__()
        self.eps, self.momentum = norm.eps, norm.momentum
        self.tracks = True
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(norm, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))
        self.register_buffer(MASK, torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return self._torch(x, training=False, rate=0.0)
        if self.training and self.tracks and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.batch_mask.dim() == 0 and self.momentum is not None and x.numel() > x.shape[1]:
            return self._torch(x, training=True, rate=self.momentum)
        return self._masked(x)

    def _torch(self, x: Tensor, training: bool, rate: float) -> Tensor:
        mean, var = (self.running_mean, self.running_var) if self.tracks or not training else (None, None)
        return F.batch_norm(x, mean, var, self.weight, self.bias, training, rate, self.eps)

    def _masked(self, x: Tensor) -> Tensor:
        """In single precision at least."""
        values = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        mask = self.batch_mask.to(values.dtype).expand(x.shape[0])
        places = values.flatten(2) if x.dim() > 2 else values[..., None]
        weight = values.new_ones(x.shape[1]) if self.weight is None else self.weight
        bias = values.new_zeros(x.shape[1]) if self.bias is None else self.bias
        y, mean, var = Normalized.apply(places, mask / mask.sum(), weight, bias, self.eps)  # type: ignore[no-untyped-call]
        if self.training and self.tracks:
            count = mask.sum() * places.shape[-1]
            self._track(mean.detach(), (var * count / (count - 1).clamp(min=1)).detach())
        found: Tensor = y.reshape(x.shape).to(x.dtype)
        return found

    def _track(self, mean: Tensor, var: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        rate = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked
        self.running_mean.copy_(self.running_mean + rate * (mean - self.running_mean))
        self.running_var.copy_(self.running_var + rate * (var - self.running_var))


def stackable(module: nn.Module) -> nn.Module:
    """A copy of the module with keyed dropout and masked BatchNorm."""
    return _swap(copy.deepcopy(module), {})


def static(module: nn.Module) -> nn.Module:
    """The same module, whose BatchNorm layers leave their statistics alone: batches speak for themselves."""
    for norm in module.modules():
        if isinstance(norm, MaskedBatchNorm):
            norm.tracks = False
    return module


def by_batch(module: nn.Module) -> nn.Module:
    """The same module in evaluation mode, whose BatchNorm layers go by each batch's own statistics."""
    module.eval()
    for norm in module.modules():
        if isinstance(norm, MaskedBatchNorm):
            norm.train()
    return static(module)


def of_one_batch(module: nn.Module) -> nn.Module:
    """The same in evaluation mode, whose BatchNorm statistics become those of the last batch."""
    module.eval()
    for norm in module.modules():
        if isinstance(norm, MaskedBatchNorm):
            norm.train()
            norm.momentum = 1.0
    return module


def tracked(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """The names of the means and variances that BatchNorm layers keep."""
    norms = [n for n, m in module.named_modules() if isinstance(m, MaskedBatchNorm)]
    there = dict(module.named_buffers())
    pairs = [tuple(f"{n}.{k}".lstrip(".") for k in ("running_mean", "running_var")) for n in norms]
    return tuple((mean, var) for mean, var in pairs if mean in there)


def context(module: nn.Module, key: Tensor, mask: Tensor | None) -> Tensors:
    """The buffers that tell each dropout its key and each BatchNorm its mask."""
    given: Tensors = {}
    for i, name in enumerate(_owners(module, KEY)):
        given[name] = draws.fold(key, i)
    if owners := _owners(module, MASK):
        given |= dict.fromkeys(owners, torch.ones((), device=key.device) if mask is None else mask)
    return given


def _owners(module: nn.Module, buffer: str) -> list[str]:
    cache = module.__dict__.setdefault("_partita_context", {})
    if buffer not in cache:
        cache[buffer] = [n for n, _ in module.named_buffers() if n.split(".")[-1] == buffer]
    return list(cache[buffer])


def _swap(module: nn.Module, done: dict[nn.Module, nn.Module]) -> nn.Module:
    """Replaces below; a module that is used at several places stays one module."""
    if module not in done:
        new = _replacement(module)
        done[module] = module if new is None else new.train(module.training)
        if new is None:
            for name, child in module._modules.items():
                if child is not None:
                    module._modules[name] = _swap(child, done)
    return done[module]


def _replacement(module: nn.Module) -> nn.Module | None:
    if type(module) in _LEADING and isinstance(module, nn.modules.dropout._DropoutNd):
        return KeyedDropout(module.p, _LEADING[type(module)])
    if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        assert isinstance(module, nn.modules.batchnorm._BatchNorm)
        return MaskedBatchNorm(module)
    return None
