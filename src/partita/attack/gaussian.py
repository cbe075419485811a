"""Gaussian noise: Blanchard et al. (2017).

Δ_i ~ N(0, σ²), entry by entry
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from partita.attack.base import PREFIXES, attack, each_sends
from partita.core import draws
from partita.core.options import Option
from partita.core.parts import Attack
from partita.core.types import Upload


@attack
def gaussian(
    sigma: Annotated[float, Option("σ, the deviation of the noise", low=0, open_low=True)] = 1.0,
) -> Attack:
    """Each Byzantine client sends noise of its own.

    Use it to model broken devices rather than clever ones.
    """

    def forge(uploads: Upload, byzantine: tuple[int, ...], key: Tensor) -> dict[int, Upload]:
        payload = [prefix + k for prefix, part in zip(PREFIXES, uploads.payload) for k in part]
        names = {k: j for j, k in enumerate(payload)}
        who = uploads.client  # by its number: its place in the cohort makes no difference

        def noise(i: int, name: str, x: Tensor) -> Tensor:
            noise_key = draws.fold(draws.fold(key, i if who is None else who[i]), names[name])
            count = torch.arange(x.numel(), device=x.device)
            return sigma * draws.normal(draws.fold(noise_key, count)).to(x.dtype).reshape(x.shape)

        return each_sends(uploads, byzantine, noise)

    return Attack("gaussian", forge, None, {"sigma": sigma})
