"""Every random draw is a function of (seed, purpose, round, client, ...), never of the order of execution.

`bits` is a counter-based generator: 64 random bits for each integer key, by SplitMix64's finalizer. It is
plain integer arithmetic on tensors, so that a whole cohort's draws are a few vector operations, the same on
CPU and GPU, alone or stacked. `generator` is for draws on the host (who is sampled, how data are split). A
seed may be a `Secret`: then keys and generators are those of a keyed hash.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from partita.core.secret import Secret

_GOLDEN = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed integer
_MIX1 = -0x40A7B892E31B1A47
_MIX2 = -0x6B2FB644ECCEEE15
_MASK = (1 << 64) - 1


Keys = TypeVar("Keys", Tensor, np.ndarray)
"""Whole numbers of 64 bits with a sign: on a device, or (fewer than some thousand, faster) on the host."""


def _shift(x: Keys, by: int) -> Keys:
    shifted: Keys = (x >> by) & ((1 << (64 - by)) - 1)  # logical: signed integers are shifted arithmetically
    return shifted


def bits(key: Keys) -> Keys:
    """Return 64 random bits for each key (int64 in, int64 out)."""
    z = key + _GOLDEN
    z = (z ^ _shift(z, 30)) * _MIX1
    z = (z ^ _shift(z, 27)) * _MIX2
    mixed: Keys = z ^ _shift(z, 31)
    return mixed


def fold(key: Keys, part: int | Keys) -> Keys:
    """Return the key of a part: fold(fold(key, round), client) and so on; tensors and arrays broadcast."""
    return bits(key * 0x9E3779B1 + part)


def branch(key: Tensor, purpose: str, number: int = 0) -> Tensor:
    """Return the key of one of several calls, each with draws of its own, from a key for all of them.

    It is no `fold` by a small number, for a rule uses those itself: for its clients and for entries.
    """
    return fold(fold(key, zlib.crc32(purpose.encode())), number)


def places(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a key for each place of a tensor by its coordinates: the same ones however long the axes are.

    A batch that is padded for a stack, along whichever axis, has the numbers that it would have alone.
    """
    for size in shape:
        key = fold(key[..., None], torch.arange(size, device=key.device))
    return key


def key(seed: int, purpose: str, *parts: int | Tensor, device: torch.device | str = "cpu") -> Tensor:
    """Return the key of (seed, purpose, parts...), an int64 tensor of the parts' broadcast shape."""
    start, rest = _of_numbers(seed, purpose, parts)  # folded on the host: the same bits, one tensor
    k = torch.full((), start, dtype=torch.int64, device=device)
    for part in rest:
        k = fold(k, part)
    return k


def keys(seed: int | np.ndarray, purpose: str, *parts: int | np.ndarray) -> np.ndarray:
    """Return what `key` does, worked out on the host: an array of one dimension at least.

    There may be a seed for each of the keys.
    """
    start, rest = (
        _of_numbers(seed, purpose, parts) if isinstance(seed, int) else _of_arrays(seed, purpose, parts)
    )
    k = np.array([start])
    for part in rest:
        k = fold(k, part)
    return k


def _of_numbers(seed: int, purpose: str, parts: Sequence[Any]) -> tuple[int, Sequence[Any]]:
    """Return the key of the first parts, as far as they are numbers, with its sign; and the other parts."""
    count = next((i for i, part in enumerate(parts) if not isinstance(part, int)), len(parts))
    unsigned = _key(seed, purpose, *parts[:count])
    return unsigned - (unsigned >> 63 << 64), parts[count:]


def _of_arrays(seed: np.ndarray, purpose: str, parts: Sequence[Any]) -> tuple[int, Sequence[Any]]:
    """Return where the keys of several seeds begin, and what is folded in: the seeds, and all parts."""
    return zlib.crc32(purpose.encode()), (seed, *parts)


def uniform(key: Tensor) -> Tensor:
    """Return a uniform number in (0, 1) for each key, float32."""
    # 23 bits and a half: the largest, 1 − 2⁻²⁴, is still a float32 below 1
    return (_shift(bits(key), 41).to(torch.float32) + 0.5) * 2.0**-23


def uniforms(key: Tensor, count: int) -> Tensor:
    """Return so many uniform numbers in (0, 1) of one key, float32: two of the 64 bits of each draw."""
    words = fold(key, torch.arange(-(-count // 2), device=key.device))
    pairs = torch.stack([_shift(words, 41), (words >> 9) & ((1 << 23) - 1)], -1)
    return (pairs.reshape(-1)[:count].to(torch.float32) + 0.5) * 2.0**-23


def normal(key: Tensor) -> Tensor:
    """Return a standard normal number for each key, float32 (Box-Muller)."""
    radius = torch.sqrt(-2.0 * torch.log(uniform(fold(key, 1))))
    return radius * torch.cos(2.0 * math.pi * uniform(fold(key, 2)))


def normal64(key: Tensor) -> Tensor:
    """Return a standard normal number for each key, float64, out to 8.5: what privacy needs of the tails."""
    radius = torch.sqrt(-2.0 * torch.log(_uniform64(fold(key, 1))))
    return radius * torch.cos(2.0 * math.pi * _uniform64(fold(key, 2)))


def _uniform64(key: Tensor) -> Tensor:
    """Return a uniform number in (0, 1) for each key, float64."""
    # 52 bits and a half: the largest, 1 − 2⁻⁵³, is still a double below 1
    return (_shift(bits(key), 12).to(torch.float64) + 0.5) * 2.0**-52


def number(seed: int, purpose: str, *parts: int) -> float:
    """Return a uniform number in (0, 1) for (seed, purpose, parts...): from the bits of that `key`."""
    # 52 bits and a half: the largest, 1 − 2⁻⁵³, is still a double below 1
    return ((_mixed(_key(seed, purpose, *parts)) >> 12) + 0.5) * 2.0**-52


def numbers(seed: int, purpose: str, *parts: int | np.ndarray) -> np.ndarray:
    """Return `number` for each of many parts at once: an array of one dimension at least."""
    uniform: np.ndarray = (_shift(bits(keys(seed, purpose, *parts)), 12) + 0.5) * 2.0**-52
    return uniform


def _key(seed: int, purpose: str, *parts: Any) -> int:
    """Return `key` of whole numbers, unsigned."""
    if isinstance(seed, Secret):
        return int.from_bytes(seed.stream(purpose, parts, 8))
    k = zlib.crc32(purpose.encode())
    for part in (seed, *parts):
        k = _mixed((k * 0x9E3779B1 + part) & _MASK)
    return k


def _mixed(key: int) -> int:
    """Return `bits` of one key, unsigned."""
    z = (key + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * _MIX1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX2) & _MASK
    return z ^ (z >> 31)


def generator(seed: int, purpose: str, *parts: int) -> np.random.Generator:
    """Return a NumPy generator for draws on the host."""
    if isinstance(seed, Secret):  # each generator has a key of its own, which tells of no other one
        return np.random.Generator(np.random.Philox(key=int.from_bytes(seed.stream(purpose, parts, 16))))
    entropy = [zlib.crc32(purpose.encode()), seed, len(parts), *parts]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))
