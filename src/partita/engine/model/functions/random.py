"""Functions of torch that draw, from the key of a batch instead of a generator of the process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from partita.core import draws

if TYPE_CHECKING:
    from partita.engine.model.functions import Functions

_PRECISE = {torch.bfloat16: 8, torch.float16: 11}  # bits of a uniform number, so that it stays below 1
Draw = Callable[[Tensor, torch.Size, torch.dtype, torch.device], Tensor]
"""(key, shape, type, device) -> numbers."""


def _each(key: Tensor, shape: torch.Size, device: torch.device) -> Tensor:
    """Return a key for each number."""
    return draws.fold(key, torch.arange(shape.numel(), device=device)).view(shape)


def _uniform(key: Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uniform numbers from 0 to 1, less than 1 in every type."""
    numbers = draws.uniform(_each(key, shape, device))
    steps = 1 << _PRECISE[dtype] if dtype in _PRECISE else 0
    return (torch.floor(numbers * steps) / steps if steps else numbers).to(dtype)


def _normal(key: Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return draws.normal(_each(key, shape, device)).to(dtype)


def _integers(low: int, high: int) -> Draw:
    def draw(key: Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        positive = draws.bits(_each(key, shape, device)) & ((1 << 62) - 1)
        return (positive % (high - low) + low).to(dtype)

    return draw


def _order(key: Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.argsort(draws.bits(_each(key, shape, device))).to(dtype)


# ---- new tensors


def _new(draw: Draw) -> Callable[..., Any]:
    """torch.rand and the like: shape and type are those that torch would give."""

    def form(mode: Functions, func: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("generator") is not None or kwargs.get("out") is not None:
            return NotImplemented
        like = func(*args, **{**kwargs, "device": "meta", "pin_memory": False})
        device = torch.device(kwargs.get("device") or torch.get_default_device())
        return draw(mode.draw(), like.shape, like.dtype, device)

    return form


def _random_integers(mode: Functions, func: Any, *args: Any, **kwargs: Any) -> Any:
    ends = [a for a in args if isinstance(a, int)]
    low = kwargs.get("low", ends[0] if len(ends) > 1 else 0)
    return _new(_integers(low, kwargs.get("high", ends[-1] if ends else 0)))(mode, func, *args, **kwargs)


def _like(draw: Draw) -> Callable[..., Any]:
    """torch.rand_like and the like."""

    def form(
        mode: Functions, func: Any, x: Tensor, *, dtype: Any = None, device: Any = None, **more: Any
    ) -> Any:
        return draw(mode.draw(), x.shape, dtype or x.dtype, torch.device(device or x.device))

    return form


def _random_integers_like(mode: Functions, func: Any, x: Tensor, *ends: int, **kwargs: Any) -> Any:
    low, high = (0, ends[0]) if len(ends) == 1 else ends
    return _like(_integers(low, high))(mode, func, x, **kwargs)


def _empty(mode: Functions, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Memory that draws will be written to: of each client its own."""
    if not mode.stacked:
        return NotImplemented
    used, memory = mode.used, func(*args, **kwargs)
    if memory.is_meta:
        return memory
    memory = torch.zeros_like(memory) + (mode.key * 0).to(device=memory.device, dtype=memory.dtype)
    mode.used = used
    return memory


# ---- draws that are written over a tensor


def _over(draw: Callable[..., Tensor]) -> Callable[..., Any]:
    """Tensor.uniform_ and the like."""

    def form(mode: Functions, func: Any, x: Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> Any:  # noqa: ARG001
        if generator is not None:
            return NotImplemented
        kind = x.dtype if x.is_floating_point() else torch.float32
        return x.copy_(draw((mode.draw(), x.shape, kind, x.device), *args, **kwargs))

    return form


def _between(place: Any, low: float = 0.0, high: float = 1.0, **ends: float) -> Tensor:
    low, high = ends.get("from", low), ends.get("to", high)
    return _uniform(*place) * (high - low) + low


def _around(place: Any, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return _normal(*place) * std + mean


def _coins(place: Any, p: float | Tensor = 0.5) -> Tensor:
    key, shape, dtype, device = place
    return (_uniform(key, shape, torch.float32, device) < p).to(dtype)


def _waiting(place: Any, lambd: float = 1.0) -> Tensor:
    key, shape, dtype, device = place
    return (-torch.log(_uniform(key, shape, torch.float32, device)) / lambd).to(dtype)


# ---- draws by probabilities


def _bernoulli(mode: Functions, func: Any, x: Tensor, p: float | None = None, **kwargs: Any) -> Any:  # noqa: ARG001
    if kwargs.get("generator") is not None or kwargs.get("out") is not None:
        return NotImplemented
    coins = _uniform(mode.draw(), x.shape, torch.float32, x.device) < (x if p is None else p)
    return coins.to(x.dtype)


def _gaussian(mode: Functions, func: Any, mean: Any, std: Any = 1.0, *size: Any, **kwargs: Any) -> Any:  # noqa: ARG001
    place = next((x for x in (mean, std) if isinstance(x, Tensor)), None)
    if place is None or kwargs:
        return NotImplemented
    shape = (torch.as_tensor(mean) + torch.as_tensor(std)).shape
    return _normal(mode.draw(), shape, place.dtype, place.device) * std + mean


def _multinomial(
    mode: Functions,
    func: Any,
    p: Tensor,
    num_samples: int,
    replacement: bool = False,
    **kwargs: Any,
) -> Any:
    """Return places by their probabilities: the first arrivals of Poisson processes with these rates."""
    if kwargs.get("generator") is not None or kwargs.get("out") is not None:
        return NotImplemented
    shape = (*p.shape[:-1], num_samples if replacement else 1, p.shape[-1])
    times = -torch.log(_uniform(mode.draw(), torch.Size(shape), torch.float32, p.device)) / p.unsqueeze(-2)
    return times.argmin(-1) if replacement else torch.argsort(times.squeeze(-2), -1)[..., :num_samples]


# ---- dropout


def _dropout(leading: int | None) -> Callable[..., Any]:
    """F.dropout and those of whole channels, for which the first axes are kept apart."""

    def form(
        mode: Functions,
        func: Any,  # noqa: ARG001
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        train: bool | None = None,
    ) -> Any:
        if not (training if train is None else train) or p == 0.0:
            return NotImplemented
        if p == 1.0:
            return input.mul_(0.0) if inplace else input * 0.0
        shape = input.shape if leading is None else input.shape[:leading]
        kept = _uniform(mode.draw(), shape, torch.float32, input.device) >= p
        scale = kept.view(*shape, *[1] * (input.dim() - len(shape))).to(input.dtype) / (1.0 - p)
        return input.mul_(scale) if inplace else input * scale

    return form


def _alpha_dropout(leading: int | None) -> Callable[..., Any]:
    """F.alpha_dropout: Klambauer et al. (2017), which keeps mean and variance of SELU's outputs."""
    saturated = -1.7580993408473766  # −λ α

    def form(
        mode: Functions,
        func: Any,  # noqa: ARG001
        input: Tensor,
        p: float = 0.5,
        training: bool = False,
        inplace: bool = False,
    ) -> Any:
        if not training or p == 0.0:
            return NotImplemented
        shape = input.shape if leading is None else input.shape[:leading]
        kept = (_uniform(mode.draw(), shape, torch.float32, input.device) >= p).view(
            *shape, *[1] * (input.dim() - len(shape))
        )
        a = 1.0 / math.sqrt((1.0 - p) * (1.0 + p * saturated**2))
        result = torch.where(kept, input, saturated) * a - a * saturated * p
        return input.copy_(result) if inplace else result

    return form


FORMS: dict[Any, Callable[..., Any]] = {
    torch.rand: _new(_uniform),
    torch.randn: _new(_normal),
    torch.randint: _random_integers,
    torch.randperm: _new(_order),
    torch.rand_like: _like(_uniform),
    torch.randn_like: _like(_normal),
    torch.randint_like: _random_integers_like,
    torch.empty: _empty,
    torch.empty_like: _empty,
    Tensor.new_empty: _empty,
    Tensor.uniform_: _over(_between),
    Tensor.normal_: _over(_around),
    Tensor.bernoulli_: _over(_coins),
    Tensor.exponential_: _over(_waiting),
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    torch.normal: _gaussian,
    torch.multinomial: _multinomial,
    Tensor.multinomial: _multinomial,
    F.dropout: _dropout(None),
    torch.dropout: _dropout(None),
    F.dropout1d: _dropout(2),
    F.dropout2d: _dropout(2),
    F.dropout3d: _dropout(2),
    F.alpha_dropout: _alpha_dropout(None),
    F.feature_alpha_dropout: _alpha_dropout(2),
}
