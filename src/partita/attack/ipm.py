"""Inner product manipulation: Xie et al., *Fall of Empires* (2020).

    Δ_i ← −ε · mean of the honest Δ_j

A small ε stays inside the crowd and stops progress, a large one turns it round.
"""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from partita.attack.base import attack, by_tensor, everyone_sends, honest
from partita.core.options import Option
from partita.core.parts import Attack
from partita.core.types import Upload


@attack
def ipm(
    epsilon: Annotated[float, Option("ε, the length beside the honest mean's", low=0, open_low=True)] = 0.5,
) -> Attack:
    """All Byzantine clients send the honest mean the other way round, `epsilon` times as long.

    Use it against aggregators that look at distances: with a small ε it is close to everyone.
    """

    def forge(uploads: Upload, byzantine: tuple[int, ...], key: Tensor) -> dict[int, Upload]:  # noqa: ARG001
        sent = by_tensor(honest(uploads, byzantine), lambda x: -epsilon * x.mean(0))
        return everyone_sends(uploads, byzantine, sent)

    return Attack("ipm", forge, None, {"epsilon": epsilon})
