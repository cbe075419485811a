"""How exactly a GPU computes: a property of the run, put back to what it was at its end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PRECISIONS = ("tf32", "fp32", "bf16")
"""Products of matrices and convolutions with 10 bits behind the point, with all 23, or in half the memory."""
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def arithmetic(precision: str, deterministic: bool = False) -> Iterator[None]:
    """Products in this precision, and only operations that give the same bits every time if so asked for.

    On a CPU products are always exact, and repeatable.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    strict = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if deterministic:
        os.environ.setdefault(_WORKSPACE, ":4096:8")  # cuBLAS reads it when it starts
        torch.use_deterministic_algorithms(True)
    matmul.allow_tf32 = cudnn.allow_tf32 = precision != "fp32"
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
        if deterministic:
            torch.use_deterministic_algorithms(strict, warn_only=warns)
