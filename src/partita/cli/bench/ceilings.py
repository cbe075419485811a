"""What training could reach at most: operations per second of a large matrix product, as measured here."""

from __future__ import annotations

import time

import torch
from torch.utils.flop_counter import FlopCounterMode

from partita.cli.bench.textbook import wait
from partita.cli.bench.workloads import Workload
from partita.core.criterion import LOSSES
from partita.core.device import arithmetic


def peak_flops(device: str, precision: str, repeats: int = 5) -> float:
    """Return the operations per second of the fastest of some products of two large matrices."""
    side = 1024 if device == "cpu" else 8192
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    with arithmetic(precision):
        for _ in range(repeats + 1):
            wait(device)
            begin = time.perf_counter()
            torch.mm(a, b)
            wait(device)
            seconds.append(time.perf_counter() - begin)
    return 2 * side**3 / min(seconds[1:])


def flops_of_a_step(work: Workload) -> int:
    """Count the multiplications and additions of one client's step, forward and backward."""
    x, y = work.data().gather(torch.arange(work.batch))
    with FlopCounterMode(display=False) as counter:
        LOSSES["cross_entropy"].mean(work.model()(x), y).backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())
