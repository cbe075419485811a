"""Sizes of recipes: small for two CPU cores, medium for minutes on a GPU, paper as in the paper."""

from __future__ import annotations

from typing import TypeVar

from partita.core import check

T = TypeVar("T")
SIZES = ("small", "medium", "paper")


def by_size(size: str, *values: T) -> T:
    """Return the value for a size: of two values small and paper, of three small, medium and paper."""
    names = ("small", "paper") if len(values) == 2 else SIZES
    return values[names.index(check.choice("size", size, names))]
