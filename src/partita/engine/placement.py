"""Where a run keeps its samples: in the memory of the device that computes, or on the host."""

from __future__ import annotations

import torch

from partita.data import FederatedData
from partita.data.columns import listed
from partita.data.mapped import Mapped
from partita.engine.execute.task import budget

PLACES = ("auto", "device", "host")
SHARE = 0.5  # of the memory for stacked clients that samples may take beside it, before they stay on the host


def placed(data: FederatedData, place: str, device: torch.device | str, memory: int | None) -> FederatedData:
    """Return the data for a run: on the device, or where they are with rows that are sent ahead of steps.

    By default samples that take more than half of the memory for stacking clients stay: on the host where a
    GPU computes, in their files where the CPU does.
    """
    device = torch.device(device)
    if place == "auto":
        small = data.nbytes <= SHARE * budget(memory, device)
        in_files = any(isinstance(column, Mapped) for column in listed(data.x))
        place = "device" if small or (device.type == "cpu" and not in_files) else "host"
    return data.to(device) if place == "device" else data.to_host().stay(device)
