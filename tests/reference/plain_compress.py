"""Compression as the papers have it, in NumPy: what arrives of a vector or of a matrix."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def count(share: float, d: int) -> int:
    return min(d, max(1, math.floor(share * d + 0.5)))


def topk(x: Array, share: float) -> Array:
    """The k entries of largest magnitude, the first of equal ones; all others are 0."""
    places = np.argsort(-np.abs(x), kind="stable")[: count(share, len(x))]
    sent = np.zeros_like(x)
    sent[places] = x[places]
    return sent


def at(x: Array, places: NDArray[np.int64], times: float = 1.0) -> Array:
    """Only the entries at these places, times a number."""
    sent = np.zeros_like(x)
    sent[places] = x[places] * times
    return sent


def quantize(x: Array, bits: int, bucket: int, u: Array | None) -> Array:
    """Levels between −s and s: up with the chance of the distance from the lower one, or to the nearest.

    u   uniform numbers, one of each entry (None: the nearest)
    """
    levels = max(1, 2**bits - 2)
    sent = np.empty_like(x)
    for start in range(0, len(x), bucket):
        part = slice(start, start + bucket)
        s = np.abs(x[part]).max()
        if s == 0:
            grid = np.full(len(x[part]), levels / 2)
        else:
            grid = levels * (x[part] / s + 1) / 2
        low = np.floor(grid)
        up = (grid - low >= 0.5) if u is None else (u[part] < grid - low)
        sent[part] = s * (2 * (low + up) / levels - 1)
    return sent


def low_rank(m: Array, start: Array, iterations: int) -> Array:
    """The projection of M on the span of (M Mᵀ)^(i − 1) M Q."""
    span = m @ start
    for _ in range(iterations - 1):
        span = m @ (m.T @ np.linalg.qr(span)[0])
    columns, sizes, _ = np.linalg.svd(span, full_matrices=False)
    columns = columns[:, sizes > 1e-10 * max(sizes[0], 1e-300)]
    projected: Array = columns @ (columns.T @ m)
    return projected


def bfloat16(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """To the nearest number with the upper 16 bits of a float32, to an even one of two as near."""
    whole = x.astype("<f4").view("<u4").astype(np.uint64)
    rounded = (whole + 0x7FFF + ((whole >> 16) & 1)) >> 16 << 16
    return rounded.astype("<u4").view("<f4")
