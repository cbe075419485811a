"""Noise: x + std · ε with ε ~ N(0, 1), for each number. Bishop (1995): it acts as a penalty on ‖∇_x f‖²."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from partita.augment.base import one_tensor
from partita.core import draws
from partita.core.options import Option, checked


@checked()
@dataclass(frozen=True)
class Noise:
    """Add normal noise to each number of a sample.

    Use it for measurements, with the error that their sensors have.
    """

    std: Annotated[float, Option("deviation of the noise", low=0, example=0.1)]

    def __call__(self, x: Any, key: Tensor) -> Tensor:
        sample = one_tensor("noise", x, axes=0)
        return sample + self.std * draws.normal(draws.places(key, sample.shape)).to(sample.dtype)


noise = Noise
