"""Crops and mirror images: Krizhevsky, Sutskever, Hinton (2012); He, Zhang, Ren, Sun (2016), section 4.2.

crop   x padded by p on each side, then a window of the size of x, at a place drawn from {0, ..., 2p}²
flip   x, or with probability p its mirror image
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from partita.augment.base import one_tensor
from partita.core import draws
from partita.core.options import Option, checked


@checked()
@dataclass(frozen=True)
class Crop:
    """Shift an image [..., height, width] by up to `padding` pixels in both directions.

    Use it for photographs and characters, which mean the same a little to the side.
    """

    padding: Annotated[int, Option("pixels by which an image moves at most", low=1, example=4)]
    fill: Annotated[float, Option("value of what comes in from outside (default: 0)")] = 0.0

    def __call__(self, x: Any, key: Tensor) -> Tensor:
        image, p = one_tensor("crop", x, axes=2), self.padding
        wide = F.pad(image, (p, p, p, p), value=self.fill)
        rows, columns = (
            (draws.uniform(draws.fold(key, axis)) * (2 * p + 1)).to(torch.int64)
            + torch.arange(image.shape[axis - 2], device=key.device)
            for axis in (0, 1)
        )
        return wide[..., rows[:, None], columns]


@checked()
@dataclass(frozen=True)
class Flip:
    """Mirror a sample along an axis, with probability p.

    Use it where a mirror image could as well be seen: photographs, but no characters.
    """

    p: Annotated[float, Option("probability of the mirror image (default: 0.5)", low=0, high=1)] = 0.5
    axis: Annotated[int, Option("the axis of a sample that is turned round (default: the last)")] = -1

    def __call__(self, x: Any, key: Tensor) -> Tensor:
        return self.within(x, key, None)

    def within(self, x: Any, key: Tensor, real: Tensor | None) -> Tensor:
        """Return a sample, or its mirror image; padding of its first axis (where not `real`) stays behind."""
        image = one_tensor("flip", x, real=False)
        padded = None if self.axis % image.dim() else real
        flipped = image.flip(self.axis) if padded is None else image[_mirrored(padded)]
        return torch.where(draws.uniform(key) < self.p, flipped, image)


def _mirrored(real: Tensor) -> Tensor:
    """Return the place that each entry comes from if those that are real, one after another, turn round."""
    place, first = torch.arange(len(real), device=real.device), real.to(torch.int64).argmax()
    return torch.where(real, 2 * first + real.sum() - 1 - place, place)


crop, flip = Crop, Flip
