"""Which places of a row file may be written: those that no checkpoint on disk needs.

Snapshots are numbered 1, 2, ... as they are taken. A place that its client leaves after e of them may be
needed by the snapshots up to e; it is free when the oldest checkpoint on disk has a larger number.
"""

from __future__ import annotations

import numpy as np

from partita.engine.store.layout import IntArray

NONE: IntArray = np.zeros(0, dtype=np.int64)


class Slots:
    """The places of a row file: from 0 up to `extent` they are in use, left or free; further ones are new."""

    def __init__(self, extent: int = 0) -> None:
        self.extent = extent
        self._free: list[IntArray] = []
        self._left: list[tuple[int, IntArray]] = []

    def take(self, count: int) -> IntArray:
        """Return so many places to write, in order: free ones first, side by side where they can be."""
        free = np.sort(np.concatenate([NONE, *self._free]))
        taken, rest = free[:count], free[count:]
        self._free = [rest] if len(rest) else []
        end = self.extent + count - len(taken)
        new = np.arange(self.extent, end)
        self.extent = end
        return np.concatenate([taken, new])

    def give(self, slots: IntArray) -> None:
        """Free places that no snapshot has ever needed."""
        self._free.append(slots)

    def leave(self, slots: IntArray, taken: int) -> None:
        """Leave places that snapshots up to this number may need."""
        self._left.append((taken, slots))

    def release(self, oldest: int) -> None:
        """Free the places that are needed only by snapshots before this one, the oldest on disk."""
        self._free += [slots for taken, slots in self._left if taken < oldest]
        self._left = [(taken, slots) for taken, slots in self._left if taken >= oldest]
