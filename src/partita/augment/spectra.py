"""SpecAugment: Park et al. (2019), section 2: bands of time and of frequency are left out of a spectrogram.

w ~ U{0, ..., W},   start ~ U{0, ..., n − w},   x[start : start + w] ← value      n: length of the axis
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
        return _masked(one_tensor("time_mask", x), key, self.width, self.count, self.axis, self.value)


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


def _masked(x: Tensor, key: Tensor, width: int, count: int, axis: int, value: float) -> Tensor:
    """Return x with so many bands along an axis replaced."""
    n = x.shape[axis]
    place = torch.arange(n, device=key.device)
    hidden = torch.zeros_like(place, dtype=torch.bool)
    for number in range(count):
        band = draws.fold(key, number)
        w = (draws.uniform(draws.fold(band, 0)) * (min(width, n) + 1)).to(torch.int64)
        start = (draws.uniform(draws.fold(band, 1)) * (n - w + 1)).to(torch.int64)
        hidden = hidden | ((place >= start) & (place < start + w))
    shape = [1] * x.dim()
    shape[axis] = n
    return torch.where(hidden.reshape(shape), torch.full_like(x, value), x)


time_mask, frequency_mask = TimeMask, FrequencyMask
