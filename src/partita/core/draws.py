"""Every random draw is a function of (seed, purpose, round, client, ...), never of the order of execution.

`bits` is a counter-based generator: 64 random bits for each integer key, by SplitMix64's finalizer. It is
plain integer arithmetic on tensors, so that a whole cohort's draws are a few vector operations, the same on
CPU and GPU, alone or stacked. `generator` is for draws on the host (who is sampled, how data are split).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

_GOLDEN = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed integer
_MIX1 = -0x40A7B892E31B1A47
_MIX2 = -0x6B2FB644ECCEEE15
_MASK = (1 << 64) - 1


Keys = TypeVar("Keys", Tensor, np.ndarray)
"""Whole numbers of 64 bits with a sign: on a device, or (fewer than some thousand, faster) on the host."""


def _shift(x: Keys, by: int) -> Keys:
    found: Keys = (x >> by) & ((1 << (64 - by)) - 1)  # logical: signed integers are shifted arithmetically
    return found


def bits(key: Keys) -> Keys:
    """64 random bits for each key (int64 in, int64 out)."""
    z = key + _GOLDEN
    z = (z ^ _shift(z, 30)) * _MIX1
    z = (z ^ _shift(z, 27)) * _MIX2
    found: Keys = z ^ _shift(z, 31)
    return found


def fold(key: Keys, part: int | Keys) -> Keys:
    """The key of a part: fold(fold(key, round), client) and so on; tensors and arrays broadcast."""
    return bits(key * 0x9E3779B1 + part)


def branch(key: Tensor, purpose: str, number: int = 0) -> Tensor:
    """The key of one of several calls, each with draws of its own, where there is a key for all of them.

    It is no `fold` by a small number, for a rule uses those itself: for its clients and for entries.
    """
    return fold(fold(key, zlib.crc32(purpose.encode())), number)


def key(seed: int, purpose: str, *parts: int | Tensor, device: torch.device | str = "cpu") -> Tensor:
    """The key of (seed, purpose, parts...), an int64 tensor of the parts' broadcast shape."""
    known, rest = _known(seed, purpose, parts)  # numbers are folded on the host: the same bits, one tensor
    k = torch.full((), known, dtype=torch.int64, device=device)
    for part in rest:
        k = fold(k, part)
    return k


def keys(seed: int, purpose: str, *parts: int | np.ndarray) -> np.ndarray:
    """What `key` gives, worked out on the host: an array of one dimension at least."""
    known, rest = _known(seed, purpose, parts)
    k = np.array([known])
    for part in rest:
        k = fold(k, part)
    return k


def _known(seed: int, purpose: str, parts: Sequence[Any]) -> tuple[int, Sequence[Any]]:
    """The key of the first parts, as far as they are numbers, with its sign; the other parts."""
    whole = next((i for i, part in enumerate(parts) if not isinstance(part, int)), len(parts))
    found = _key(seed, purpose, *parts[:whole])
    return found - (found >> 63 << 64), parts[whole:]


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
