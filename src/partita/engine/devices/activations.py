"""The multi-step forward pass of a weak device: what frozen blocks make of a client's samples.

A piece of the blocks is fetched, all samples pass through it, what comes out is recorded, and the piece is
dropped before the next one is fetched (Lee et al. 2024, Algorithm 1).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from partita.core.types import Tensors

SAMPLES = 64  # samples that pass through a piece at a time
Fetch = Callable[[Sequence[str]], Tensors]
"""The server's tensors of these names: out of memory in a simulation, over the network on a device."""


def passed(
    pieces: Sequence[nn.Module],
    fetch: Fetch,
    batches: Iterator[Tensor],
    rows: int,
    *,
    disk: bool = False,
    size: int = SAMPLES,
) -> Tensor:
    """Return the record of the last piece, a row for each sample.

    pieces   blocks without tensors of their own: only their structure is used
    batches  the samples, `rows` of them in all
    disk     whether records are kept in files; only a batch at a time is in memory then
    size     samples of a batch, from the second piece on
    """
    record: Tensor | None = None
    for piece in pieces:
        inputs = batches if record is None else _batches(record, size)
        record = recorded(_through(piece, fetch, inputs), rows, disk)
    assert record is not None, "no pieces"
    return record


def _batches(record: Tensor, size: int) -> Iterator[Tensor]:
    """Return the rows in batches; of no rows an empty batch, for the shape of what comes out."""
    return (record[i : i + size] for i in range(0, max(len(record), 1), size))


def _through(piece: nn.Module, fetch: Fetch, batches: Iterator[Tensor]) -> Iterator[Tensor]:
    """Pass batches through a piece, whose tensors live as long as this iterator."""
    tensors = fetch([k for k, _ in (*piece.named_parameters(), *piece.named_buffers())])
    for x in batches:
        with torch.no_grad():  # as a decorator it would keep what was yielded last
            x = functional_call(piece, tensors, (x,))
        yield x
        del x


def recorded(parts: Iterator[Tensor], rows: int, disk: bool) -> Tensor:
    """Return parts one after another, in memory or in a file; only one more part is in memory at a time."""
    first = next(parts)
    record = _room(first, rows, disk)
    record[: len(first)] = first
    at = len(first)
    del first
    for x in parts:
        record[at : at + len(x)] = x
        at += len(x)
        del x  # before the next batch passes
    return record


def _room(like: Tensor, rows: int, disk: bool) -> Tensor:
    """Return memory for so many rows. A file is unlinked before it is used: it ends with its tensor."""
    shape = (rows, *like.shape[1:])
    if not disk or not math.prod(shape):
        return like.new_empty(shape)
    with tempfile.NamedTemporaryFile(prefix="partita-", suffix=".record") as file:
        file.truncate(math.prod(shape) * like.element_size())
        return torch.from_file(file.name, shared=True, size=math.prod(shape), dtype=like.dtype).view(shape)
