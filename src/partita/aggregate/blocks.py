"""Deltas in blocks of columns, worked on by threads.

A row is a client, a column a coordinate of the model. A block fits in a core's cache and its copies are
small next to the stack. Each thread works on its own block: that is faster than threads that share every
operation and wait for each other after it, most of all where other programs run on the same cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from partita.core.types import Tensors

T = TypeVar("T")
R = TypeVar("R")
WIDTH = 2048  # columns: 1.6 MB of a hundred clients in float64


class Place(NamedTuple):
    """Some columns of a tensor."""

    name: str
    columns: slice


def places(deltas: Tensors, names: Iterable[str], width: int = WIDTH) -> list[Place]:
    """Cut the named tensors into blocks. A GPU has no use for small ones."""
    blocks = []
    for name in names:
        numel = deltas[name][0].numel()
        step = width if deltas[name].device.type == "cpu" else 64 * width
        blocks += [Place(name, slice(i, min(i + step, numel))) for i in range(0, numel, step)]
    return blocks


def each(task: Callable[[T], R], parts: list[T], like: Tensor) -> list[R]:
    """Run the task on every part, on as many threads as torch may use; return results in their order."""
    threads = torch.get_num_threads()
    if threads == 1 or not parts or like.device.type != "cpu":
        return [task(part) for part in parts]
    try:
        # One thread of torch in each of ours, even if there is one part only: so the order of sums, and hence
        # the result, is the same for any number of threads. The setting also is the default of threads yet to
        # come, hence it is undone; this thread's own never changes.
        with ThreadPoolExecutor(
            min(threads, len(parts)), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            return list(pool.map(task, parts))
    finally:
        torch.set_num_threads(threads)
