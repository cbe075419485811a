"""Between the host and a device that works while the host goes on: neither waits for the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor


def put(x: np.ndarray, device: torch.device | str) -> Tensor:
    """Numbers from the host on a device, after what it was given before.

    A plain copy to a GPU waits until the GPU has nothing left to do: it must come from pinned memory.
    """
    there = torch.device(device)
    found = torch.from_numpy(x)
    return found.pin_memory().to(there, non_blocking=True) if there.type == "cuda" else found.to(there)


def beside(tensors: Iterable[Tensor], x: np.ndarray) -> dict[torch.device, Tensor]:
    """Numbers from the host on each device that some of these tensors are on."""
    return {device: put(x, device) for device in {tensor.device for tensor in tensors}}


class Coming:
    """Tensors on their way to the host. What a device is given later does not hold them up."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._here = [x.to("cpu", non_blocking=True) for x in tensors]
        there = {x.device for x in tensors if x.is_cuda}
        self._sent = [torch.cuda.current_stream(device).record_event() for device in there]

    def read(self) -> list[Tensor]:
        """Once they are there."""
        for event in self._sent:
            event.synchronize()
        return self._here
