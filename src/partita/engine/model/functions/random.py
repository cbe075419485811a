"""Functions of torch that draw, from the key of a batch instead of a generator of the process.

What is given a generator, memory for its results (`out=`) or `requires_grad=` is left to torch, as are the
few functions that are not here: a trial pass shows that they draw from a generator, and clients train alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from partita.core import draws

if TYPE_CHECKING:
    from partita.engine.model.functions import Functions

_PRECISE = {torch.bfloat16: 8, torch.float16: 11}  # bits of a uniform number, so that it stays below 1
_TORCHS_OWN = ("generator", "out", "requires_grad")


class Place(NamedTuple):
    """Where numbers are wanted: the key that they come from, and the kind of tensor that they become."""

    key: Tensor
    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device

    @property
    def keys(self) -> Tensor:
        """A key for each number."""
        return draws.places(self.key.to(self.device), self.shape)

    @property
    def exact(self) -> Tensor:
        """Uniform numbers in (0, 1), in single precision whatever the kind."""
        return draws.uniform(self.keys)


Draw = Callable[[Place], Tensor]


def _uniform(place: Place) -> Tensor:
    """Return uniform numbers from 0 to 1, less than 1 in every type."""
    numbers = place.exact
    steps = 1 << _PRECISE[place.dtype] if place.dtype in _PRECISE else 0
    return (torch.floor(numbers * steps) / steps if steps else numbers).to(place.dtype)


def _normal(place: Place) -> Tensor:
    return draws.normal(place.keys).to(place.dtype)


def _integers(low: int, high: int) -> Draw:
    def draw(place: Place) -> Tensor:
        positive = draws.bits(place.keys) & ((1 << 62) - 1)
        return (positive % (high - low) + low).to(place.dtype)

    return draw


def _order(place: Place) -> Tensor:
    return torch.argsort(draws.bits(place.keys)).to(place.dtype)


def _is_torchs(kwargs: dict[str, Any]) -> bool:
    """Return whether the user has asked for something that only torch's own function has."""
    return any(kwargs.get(name) is not None and kwargs[name] is not False for name in _TORCHS_OWN)


# ---- new tensors


def _new(draw: Draw) -> Callable[..., Any]:
    """torch.rand and the like: shape and type are those that torch would give."""

    def form(mode: Functions, func: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_torchs(kwargs):
            return NotImplemented
        like = func(*args, **{**kwargs, "device": "meta", "pin_memory": False})
        return draw(Place(mode.draw(), like.shape, like.dtype, _device(kwargs.get("device"))))

    return form


def _device(device: Any) -> torch.device:
    return torch.get_default_device() if device is None else torch.device(device)


def _like(draw: Draw) -> Callable[..., Any]:
    """torch.rand_like and the like."""

    def form(mode: Functions, func: Any, input: Tensor, *_: Any, **kwargs: Any) -> Any:  # noqa: ARG001
        if _is_torchs(kwargs):
            return NotImplemented
        dtype, device = kwargs.get("dtype"), kwargs.get("device")
        place = Place(mode.draw(), input.shape, dtype or input.dtype, input.device)
        return draw(place if device is None else place._replace(device=torch.device(device)))

    return form


def _random_integers(mode: Functions, func: Any, *args: Any, **kwargs: Any) -> Any:
    return _new(_integers(*_ends(args, kwargs)))(mode, func, *args, **kwargs)


def _random_integers_like(mode: Functions, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _like(_integers(*_ends(args, kwargs)))(mode, func, input, **kwargs)


def _ends(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return the first whole number that may be drawn, and the one after the last."""
    given = [int(a) for a in takewhile(lambda a: not isinstance(a, Sequence), args)]
    high = int(kwargs["high"]) if "high" in kwargs else given.pop()
    return int(kwargs["low"]) if "low" in kwargs else given.pop() if given else 0, high


def _gaussian(
    mode: Functions,
    func: Any,  # noqa: ARG001
    mean: Any = 0.0,
    std: Any = 1.0,
    size: Any = None,
    **kwargs: Any,
) -> Any:
    """torch.normal, which has no gradient with respect to mean and spread."""
    if _is_torchs(kwargs):
        return NotImplemented
    tensors = [x.detach() for x in (mean, std) if isinstance(x, Tensor)]
    if not tensors:
        return _new(lambda place: _around(place, mean, std))(mode, torch.empty, size, **kwargs)
    mean, std = (x.detach() if isinstance(x, Tensor) else x for x in (mean, std))
    shape = (tensors[0] + tensors[-1]).shape
    return _around(Place(mode.draw(), shape, tensors[0].dtype, tensors[0].device), mean, std)


def _memory(mode: Functions, func: Any, *args: Any, **kwargs: Any) -> Any:
    """torch.empty and the like: memory that draws will be written to, of each client its own."""
    if not mode.stacked or _is_torchs(kwargs):
        return NotImplemented
    memory = func(*args, **kwargs)
    if memory.is_meta:
        return memory
    return torch.zeros_like(memory) + (mode.key * 0).to(device=memory.device, dtype=memory.dtype)


# ---- draws that are written over a tensor


def _over(draw: Callable[..., Tensor]) -> Callable[..., Any]:
    """Tensor.uniform_ and the like."""

    def form(mode: Functions, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
        if _is_torchs(kwargs):
            return NotImplemented
        kwargs.pop("generator", None)
        kind = x.dtype if x.is_floating_point() else torch.float32
        return x.copy_(draw(Place(mode.draw(), x.shape, kind, x.device), *args, **kwargs))

    return form


def _between(place: Place, low: float = 0.0, high: float = 1.0, **ends: float) -> Tensor:
    low, high = ends.get("from", low), ends.get("to", high)
    return _uniform(place) * (high - low) + low


def _around(place: Place, mean: Any = 0.0, std: Any = 1.0) -> Tensor:
    numbers: Tensor = _normal(place) * std + mean
    return numbers


def _coins(place: Place, p: float | Tensor = 0.5) -> Tensor:
    return (place.exact < p).to(place.dtype)


def _waiting(place: Place, lambd: float = 1.0) -> Tensor:
    return (-torch.log(place.exact) / lambd).to(place.dtype)


# ---- draws by probabilities


def _bernoulli(mode: Functions, func: Any, input: Tensor, p: float | None = None, **kwargs: Any) -> Any:  # noqa: ARG001
    if _is_torchs(kwargs):
        return NotImplemented
    return _coins(Place(mode.draw(), input.shape, input.dtype, input.device), input if p is None else p)


def _multinomial(
    mode: Functions,
    func: Any,  # noqa: ARG001
    input: Tensor,
    num_samples: int,
    replacement: bool = False,
    **kwargs: Any,
) -> Any:
    """Return places by their probabilities: the first arrivals of Poisson processes with these rates."""
    if _is_torchs(kwargs):
        return NotImplemented
    shape = (*input.shape[:-1], num_samples if replacement else 1, input.shape[-1])
    place = Place(mode.draw(), shape, torch.float32, input.device)
    times = _waiting(place) / input.detach().unsqueeze(-2)
    return times.argmin(-1) if replacement else torch.argsort(times.squeeze(-2), -1)[..., :num_samples]


# ---- dropout


def _kept(mode: Functions, input: Tensor, p: float, axes: int | None) -> Tensor:
    """Return what stays: numbers or, where so many axes belong to a channel, whole channels.

    One axis before those is left to the samples, or none where there is a single one, as torch counts.
    """
    shape = input.shape if axes is None else input.shape[: _leading(input.dim(), axes)]
    kept = Place(mode.draw(), shape, torch.float32, input.device).exact >= p
    return kept.view(*shape, *[1] * (input.dim() - len(shape)))


def _leading(dims: int, axes: int) -> int:
    return 1 if axes != 2 and dims == axes + 1 else 2  # torch takes [a, b, c] for samples in dropout2d


def _dropout(axes: int | None) -> Callable[..., Any]:
    """F.dropout, and those of whole channels with so many axes."""

    def form(
        mode: Functions,
        func: Any,  # noqa: ARG001
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        train: bool | None = None,
    ) -> Any:
        if not (training if train is None else train) or not 0.0 < p <= 1.0:
            return NotImplemented
        scale = _kept(mode, input, p, axes).to(input.dtype) / (1.0 - p) if p < 1.0 else 0.0
        return input.mul_(scale) if inplace else input * scale

    return form


def _alpha_dropout(axes: int | None) -> Callable[..., Any]:
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
        if not training or not 0.0 < p <= 1.0:
            return NotImplemented
        if p == 1.0:
            return input.mul_(0.0) if inplace else input * 0.0
        a = 1.0 / math.sqrt((1.0 - p) * (1.0 + p * saturated**2))
        result = torch.where(_kept(mode, input, p, axes), input, saturated) * a - a * saturated * p
        return input.copy_(result) if inplace else result

    return form


def _leaky(
    mode: Functions,
    func: Any,  # noqa: ARG001
    input: Tensor,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Any:
    """F.rrelu: negative numbers are multiplied by a slope that is drawn."""
    if not training:
        return NotImplemented
    slope = _between(Place(mode.draw(), input.shape, input.dtype, input.device), lower, upper)
    result = input * torch.where(input < 0, slope, 1.0)
    return input.copy_(result) if inplace else result


FORMS: dict[Any, Callable[..., Any]] = {
    torch.rand: _new(_uniform),
    torch.randn: _new(_normal),
    torch.randint: _random_integers,
    torch.randperm: _new(_order),
    torch.rand_like: _like(_uniform),
    torch.randn_like: _like(_normal),
    torch.randint_like: _random_integers_like,
    torch.normal: _gaussian,
    torch.empty: _memory,
    torch.empty_like: _memory,
    Tensor.new_empty: _memory,
    Tensor.uniform_: _over(_between),
    Tensor.normal_: _over(_around),
    Tensor.bernoulli_: _over(_coins),
    Tensor.exponential_: _over(_waiting),
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    torch.multinomial: _multinomial,
    Tensor.multinomial: _multinomial,
    F.dropout: _dropout(None),
    torch.dropout: _dropout(None),
    F.dropout1d: _dropout(1),
    F.dropout2d: _dropout(2),
    F.dropout3d: _dropout(3),
    F.alpha_dropout: _alpha_dropout(None),
    F.feature_alpha_dropout: _alpha_dropout(2),
    F.rrelu: _leaky,
}
