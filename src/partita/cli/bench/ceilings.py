"""What the machine can do at most, as measured: a large product of matrices, and a copy of large memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from partita.cli.bench.textbook import wait
from partita.cli.bench.workloads import Workload
from partita.core.device import arithmetic
from partita.core.metrics import LOSSES


class Ceilings(NamedTuple):
    """Operations and bytes in a second."""

    flops: float
    bytes: float


def ceilings(device: str, precision: str) -> Ceilings:
    """Of this device, with products in this precision."""
    side, size = (1024, 1 << 24) if device == "cpu" else (8192, 1 << 28)
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(side, side, device=device, dtype=kind) for _ in range(2))
    x, y = (torch.zeros(size, device=device) for _ in range(2))
    with arithmetic(precision):
        product = _seconds(lambda: torch.mm(a, b), device)
    copy = _seconds(lambda: y.copy_(x), device)
    return Ceilings(2 * side**3 / product, 2 * x.nbytes / copy)


def _seconds(call: Callable[[], object], device: str, times: int = 5) -> float:
    call()
    found = []
    for _ in range(times):
        wait(device)
        begin = time.perf_counter()
        call()
        wait(device)
        found.append(time.perf_counter() - begin)
    return min(found)


def flops_of_a_step(work: Workload) -> int:
    """Multiplications and additions of one client's step, forward and backward."""
    data = work.data()
    model = work.model()
    x, y = data.gather(torch.arange(work.batch))
    with FlopCounterMode(display=False) as counter:
        LOSSES["cross_entropy"].mean(model(x), y).backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())
