"""Unusable uploads are set aside and named before anything is aggregated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from partita import tree


def usable(stacks: Any, clients: int) -> list[bool]:
    """For each client, whether everything it sends and keeps is finite."""
    floats = [x for x in tree.leaves(stacks) if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]
    if not floats:
        return [True] * clients
    # A sum is one cheap pass; it is finite unless an entry is not, or unless it overflows: look closer then.
    totals = torch.stack([x.reshape(clients, -1).sum(1).to(torch.float64) for x in floats])
    good: list[bool] = torch.isfinite(totals).all(0).tolist()
    if all(good):
        return good
    exact = torch.stack([torch.isfinite(x.reshape(clients, -1)).all(1) for x in floats])
    return list(exact.all(0).tolist())
