"""Label flip: Fung et al. (2020), Karimireddy et al. (2022).

    y ← C − 1 − y for classes 0 to C − 1;   y ← 1 − y for numbers that are 0 or 1;   y ← −y for others

The client then trains as it should, on wrong labels: its upload is as plausible as any.
"""

from __future__ import annotations

import torch
from torch import Tensor

from partita.attack.base import attack
from partita.core.parts import Attack


@attack
def label_flip() -> Attack:
    """Each Byzantine client trains honestly on labels turned round; its test labels stay.

    Use it to model mislabelled data, and as an attack that no screening can see.
    """

    def poison(x: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        if y.is_floating_point():
            return x, 1 - y if bool(((y == 0) | (y == 1)).all()) else -y
        return x, torch.where(y >= 0, classes - 1 - y, y)  # negative labels mark positions that do not count

    return Attack("label_flip", None, poison, {})
