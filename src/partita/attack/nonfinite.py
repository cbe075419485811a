"""NaN or infinity: what a diverged or broken client sends.

    Δ_i ← NaN or ±∞ in every entry

The server sets such uploads aside and names them, whatever the aggregator.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from partita.attack.base import attack, each_sends
from partita.core.options import Option
from partita.core.parts import Attack
from partita.core.types import Upload

VALUES = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}


@attack
def nonfinite(
    value: Annotated[str, Option("what every entry is", choices=tuple(VALUES))] = "nan",
) -> Attack:
    """Each Byzantine client sends no numbers at all.

    Use it to see that a run goes on as if those clients were not there.
    """

    def forge(uploads: Upload, byzantine: tuple[int, ...], key: Tensor) -> dict[int, Upload]:  # noqa: ARG001
        return each_sends(uploads, byzantine, lambda i, name, x: torch.full_like(x, VALUES[value]))  # noqa: ARG005

    return Attack("nonfinite", forge, None, {"value": value})
