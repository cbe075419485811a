"""SpecAugment: Park et al. (2019), section 2: bands of time and of frequency are left out of a spectrogram.

w ~ U{0, ..., W},   start ~ U{0, ..., n − w},   x[start : start + w] ← value

with n the length of the axis: of a sequence, without its padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from partita.augment.base import one_tensor
from partita.core import draws
from partita.core.options import Option, checked


@checked()
@dataclass(frozen=True)
class TimeMask:
    """Replace bands of up to `width` steps along the axis of time.

    Use it for speech and other signals, so that a model does not lean on a single moment.
    """

    width: Annotated[int, Option("steps that a band has at most", low=1, example=8)]
    count: Annotated[int, Option("how many bands there are (default: 1)", low=1)] = 1
    axis: Annotated[int, Option("the axis of time in a sample (default: the last)")] = -1
    value: Annotated[float, Option("what is put in their place (default: 0)")] = 0.0

    def __call__(self, x: Any, key: Tensor) -> Tensor:
        return self.within(x, key, None)

    def within(self, x: Any, key: Tensor, real: Tensor | None) -> Tensor:
        """Return a sample with bands among the entries of its first axis that are real (None: all are)."""
        sample = one_tensor("time_mask", x)
        real = real if self.axis % sample.dim() == 0 else None
        return _masked(sample, key, self.width, self.count, self.axis, self.value, real)


@checked()
@dataclass(frozen=True)
class FrequencyMask:
    """Replace bands of up to `width` channels along the axis of frequency.

    Use it for spectrograms [..., frequency, time], so that a model does not lean on a single band.
    """

    width: Annotated[int, Option("channels that a band has at most", low=1, example=4)]
    count: Annotated[int, Option("how many bands there are (default: 1)", low=1)] = 1
    axis: Annotated[int, Option("the axis of frequency in a sample (default: the last but one)")] = -2
    value: Annotated[float, Option("what is put in their place (default: 0)")] = 0.0

    def __call__(self, x: Any, key: Tensor) -> Tensor:
        sample = one_tensor("frequency_mask", x, axes=-self.axis if self.axis < 0 else self.axis + 1)
        return _masked(sample, key, self.width, self.count, self.axis, self.value)


def _masked(
    x: Tensor, key: Tensor, width: int, count: int, axis: int, value: float, real: Tensor | None = None
) -> Tensor:
    """Return x with so many bands along an axis replaced, among the entries that are real."""
    real = torch.ones(x.shape[axis], dtype=torch.bool, device=key.device) if real is None else real
    n, place = real.sum(), real.cumsum(0) - 1
    hidden = torch.zeros_like(real)
    for number in range(count):
        band = draws.fold(key, number)
        w = (draws.uniform(draws.fold(band, 0)) * (n.clamp(max=width) + 1)).to(torch.int64)
        start = (draws.uniform(draws.fold(band, 1)) * (n - w + 1)).to(torch.int64)
        hidden = hidden | (real & (place >= start) & (place < start + w))
    shape = [1] * x.dim()
    shape[axis] = x.shape[axis]
    return torch.where(hidden.reshape(shape), torch.full_like(x, value), x)


time_mask, frequency_mask = TimeMask, FrequencyMask
