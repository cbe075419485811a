"""The device that computes: how exactly it does, and how numbers go there and back without waiting."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

PRECISIONS = ("tf32", "fp32", "bf16")
"""Products of matrices and convolutions with 10 bits behind the point, with all 23, or in half the memory."""
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def arithmetic(precision: str, deterministic: bool = False) -> Iterator[None]:
    """Compute products in this precision, and if so asked only by operations that repeat their bits.

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


def put(x: np.ndarray, device: torch.device | str) -> Tensor:
    """Return numbers from the host on a device, after what it was given before.

    A plain copy to a GPU waits until the GPU has nothing left to do: it must come from pinned memory.
    """
    target, host = torch.device(device), torch.from_numpy(x)
    return host.pin_memory().to(target, non_blocking=True) if target.type == "cuda" else host.to(target)


def beside(tensors: Iterable[Tensor], x: np.ndarray) -> dict[torch.device, Tensor]:
    """Return numbers from the host on each device that some of these tensors are on."""
    return {device: put(x, device) for device in {tensor.device for tensor in tensors}}


class HostCopy:
    """Tensors on their way to the host. What a device is given later does not hold them up."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._here = [x.to("cpu", non_blocking=True) for x in tensors]
        devices = {x.device for x in tensors if x.is_cuda}
        self._sent = [torch.cuda.current_stream(device).record_event() for device in devices]

    def read(self) -> list[Tensor]:
        """Return the tensors once they have arrived."""
        for event in self._sent:
            event.synchronize()
        return self._here


class Arrival:
    """Tensors on their way to a device, sent beside what it computes, by another thread for example.

    What is copied from pinned memory within `with` does not wait for earlier work of the device, and what the
    device is given after `wait` finds it there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _side_stream(device) if device.type == "cuda" else None
        self._tensors: Sequence[Tensor] = ()
        self._event: torch.cuda.Event | None = None
        self._within: torch.cuda.StreamContext | None = None

    def __enter__(self) -> Arrival:
        if self._stream is not None:
            self._within = torch.cuda.stream(self._stream)
            self._within.__enter__()  # type: ignore[no-untyped-call]
        return self

    def expect(self, tensors: Sequence[Tensor]) -> None:
        """Remember what was sent."""
        self._tensors = tensors

    def __exit__(self, *error: object) -> None:
        if self._within is not None and self._stream is not None:
            self._event = self._stream.record_event()
            self._within.__exit__(*error)

    def wait(self) -> None:
        """Let what the device computes next wait for it; the host goes on."""
        if self._event is not None:
            here = torch.cuda.current_stream(self._device)
            here.wait_event(self._event)
            for tensor in self._tensors:
                tensor.record_stream(here)  # its memory is another stream's


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
