"""A seed that cannot be found from what is drawn with it: numbers of a keyed hash, SHAKE-256.

    bytes    SHAKE-256(secret ‖ length of the purpose ‖ purpose ‖ parts)
    normal   √(−2 log u₁) cos 2πu₂ and √(−2 log u₁) sin 2πu₂, of 52 bits and a half each

Counter-based bits (`partita.core.draws`) are fast on any device and the same in every order, but whoever sees
some of them may find the others. What is drawn with a secret is drawn on the host.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from partita.core import check

BITS = 256


class Secret(int):
    """A number of 256 bits, which may stand wherever a seed does."""

    def stream(self, purpose: str, parts: Sequence[int], count: int) -> bytes:
        """Return so many bytes of (purpose, parts)."""
        name = purpose.encode()
        pieces = [self.to_bytes(BITS // 8), len(name).to_bytes(8), name]
        pieces += [int(part).to_bytes(16, signed=True) for part in parts]
        return hashlib.shake_256(b"".join(pieces)).digest(count)

    def normal64(self, purpose: str, parts: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return standard normal numbers of (purpose, parts), float64, out to 8.5."""
        pairs = -(-math.prod(shape) // 2)
        words = np.frombuffer(self.stream(purpose, parts, 16 * pairs), dtype="<u8").reshape(2, pairs)
        # 52 bits and a half: the largest, 1 − 2⁻⁵³, is still a double below 1
        u, v = torch.from_numpy(((words >> 12) + 0.5) * 2.0**-52)
        radius, angle = torch.sqrt(-2.0 * torch.log(u)), 2.0 * math.pi * v
        both = torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)])
        return both[: math.prod(shape)].reshape(tuple(shape))


def seed_of(number: int) -> int:
    """Return a seed, or the secret that a number of more bits than a seed's is."""
    if not 0 <= number < 1 << BITS:
        raise check.fail("secret", number, f"a whole number of at most {BITS} bits")
    return Secret(number) if number.bit_length() > 63 else number
