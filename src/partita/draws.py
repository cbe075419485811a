"""Every random draw is a function of (seed, purpose, round, client, ...), never of the order of execution.

`bits` is a counter-based generator: 64 random bits for each integer key, by SplitMix64's finalizer. It is
plain integer arithmetic on tensors, so that a whole cohort's draws are a few vector operations, the same on
CPU and GPU, alone or stacked. `generator` is for draws on the host (who is sampled, how data are split).
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

_GOLDEN = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed integer
_MIX1 = -0x40A7B892E31B1A47
_MIX2 = -0x6B2FB644ECCEEE15
_MASK = (1 << 64) - 1


def _shift(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)  # logical: torch shifts signed integers arithmetically


def bits(key: Tensor) -> Tensor:
    """64 random bits for each key (int64 in, int64 out)."""
    z = key + _GOLDEN
    z = (z ^ _shift(z, 30)) * _MIX1
    z = (z ^ _shift(z, 27)) * _MIX2
    return z ^ _shift(z, 31)


def fold(key: Tensor, part: int | Tensor) -> Tensor:
    """The key of a part: fold(fold(key, round), client) and so on; tensors broadcast."""
    return bits(key * 0x9E3779B1 + part)


def key(seed: int, purpose: str, *parts: int | Tensor, device: torch.device | str = "cpu") -> Tensor:
    """The key of (seed, purpose, parts...), an int64 tensor of the parts' broadcast shape."""
    whole = next((i for i, part in enumerate(parts) if not isinstance(part, int)), len(parts))
    known = _key(seed, purpose, *parts[:whole])  # numbers are folded on the host: the same bits, one tensor
    k = torch.tensor(known - (known >> 63 << 64), dtype=torch.int64, device=device)
    for part in parts[whole:]:
        k = fold(k, part)
    return k


def uniform(key: Tensor) -> Tensor:
    """A uniform number in (0, 1) for each key, float32."""
    # 23 bits and a half: the largest, 1 − 2⁻²⁴, is still a float32 below 1
    return (_shift(bits(key), 41).to(torch.float32) + 0.5) * 2.0**-23


def normal(key: Tensor) -> Tensor:
    """A standard normal number for each key, float32 (Box-Muller)."""
    radius = torch.sqrt(-2.0 * torch.log(uniform(fold(key, 1))))
    return radius * torch.cos(2.0 * math.pi * uniform(fold(key, 2)))


def number(seed: int, purpose: str, *parts: int) -> float:
    """A uniform number in (0, 1) for (seed, purpose, parts...), on the host: from the bits of that `key`."""
    # 52 bits and a half: the largest, 1 − 2⁻⁵³, is still a double below 1
    return ((_mixed(_key(seed, purpose, *parts)) >> 12) + 0.5) * 2.0**-52


def _key(seed: int, purpose: str, *parts: Any) -> int:
    """`key` of whole numbers, unsigned."""
    k = zlib.crc32(purpose.encode())
    for part in (seed, *parts):
        k = _mixed((k * 0x9E3779B1 + part) & _MASK)
    return k


def _mixed(key: int) -> int:
    """`bits` of one key, unsigned."""
    z = (key + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * _MIX1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX2) & _MASK
    return z ^ (z >> 31)


def generator(seed: int, purpose: str, *parts: int) -> np.random.Generator:
    """A NumPy generator for draws on the host."""
    entropy = [zlib.crc32(purpose.encode()), seed, len(parts), *parts]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))
