"""Sign flip: the opposite of what the client should send; Karimireddy et al. (2022) and many before.

    Δ_i ← −s Δ_i

With s = 1 its length is that of an honest upload, only its direction is opposite.
"""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from partita.attack.base import attack, each_sends
from partita.core.options import Option
from partita.core.parts import Attack
from partita.core.types import Upload


@attack
def sign_flip(
    scale: Annotated[float, Option("s, how many times its length", low=0, open_low=True)] = 1.0,
) -> Attack:
    """Each Byzantine client sends the opposite of its honest upload, `scale` times as long.

    Use it as the first attack to try: it needs no knowledge of the others.
    """

    def forge(uploads: Upload, byzantine: tuple[int, ...], key: Tensor) -> dict[int, Upload]:  # noqa: ARG001
        return each_sends(uploads, byzantine, lambda i, name, x: -scale * x)  # noqa: ARG005

    return Attack("sign_flip", forge, None, {"scale": scale})
