"""What a GPU does, recorded as a CUDA graph: then the host asks for all of it at once."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def record(
    work: Callable[[], T], device: torch.device, before: Callable[[], Any] | None = None, warm_ups: int = 0
) -> Callable[[], T]:
    """Record work, and return what does it again; on a CPU that is the work itself.

    before    what is done before each of the `warm_ups`, in which libraries choose their kernels and take
              their memory, and before the recording
    """
    if device.type != "cuda":
        return work
    prepare = before or (lambda: None)
    if warm_ups:
        here = torch.cuda.current_stream(device)
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for _ in range(warm_ups):
                prepare()
                work()
        here.wait_stream(side)
        torch.cuda.empty_cache()  # what the warm-up took: a recording has memory of its own
    graph = torch.cuda.CUDAGraph()
    prepare()
    # what other threads do, such as reading the samples that come next, does not disturb it
    with torch.cuda.graph(graph, pool=_pool(device)[0], capture_error_mode="thread_local"):
        result = work()

    def again() -> T:
        graph.replay()
        return result

    return again


@functools.cache
def _pool(device: torch.device) -> tuple[Any, torch.cuda.CUDAGraph]:
    """Return the memory that recordings share: only one runs at a time, and nothing that lasts lies in it.

    It exists as long as there is a recording in it: an empty one that stays.
    """
    handle, empty = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
    with warnings.catch_warnings(), torch.cuda.graph(empty, pool=handle):
        warnings.simplefilter("ignore")
        torch.zeros(1, device=device)
    return handle, empty


# ---- tensors in their places


def copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy values to where there is room for them, all by one operation where types are the same."""
    alike = [(to, x) for to, x in pairs if to.dtype == x.dtype]  # older versions of torch mistake the others
    if alike:
        torch._foreach_copy_([to for to, _ in alike], [x for _, x in alike])
    for to, x in pairs:
        if to.dtype != x.dtype:
            to.copy_(x)


def own(results: Sequence[Tensor]) -> list[Tensor]:
    """Return copies in memory of their own: that of a recording is soon written to again."""
    copies = [room_for(x) for x in results]
    copy([(unexpanded(to), unexpanded(x)) for to, x in zip(copies, results)])
    return copies


def room_for(x: Tensor) -> Tensor:
    """Return memory of the same layout: operations have the same bits there."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def unexpanded(x: Tensor) -> Tensor:
    """Return what lies in memory of a tensor that is expanded: each entry once."""
    if 0 not in x.stride():
        return x
    return x[tuple([slice(0, 1 if step == 0 else None) for step in x.stride()])]
