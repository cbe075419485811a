"""A good run of three clients that takes milliseconds, of which tests change one thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import partita as pt


def arrays(**changed: Any) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 4, generator=g), torch.randint(0, 2, (24,), generator=g)
    client = np.repeat(["ann", "bob", "cy"], 8)
    return {"x": x, "y": y, "client": client, "validation": 0, **changed}


def data(**changed: Any) -> pt.data.FederatedData:
    return pt.data.from_arrays(**arrays(**changed))


def numbers(*shape: int) -> Tensor:
    return torch.randn(24, *shape, generator=torch.Generator().manual_seed(1))


def with_value(x: Tensor, value: float) -> Tensor:
    """Return a copy in which one value of bob's is another one."""
    x = x.clone()
    x[10] = value
    return x


def method() -> pt.Algorithm:
    return pt.fedalt("output", lr=0.1)


def model() -> nn.Module:
    return pt.models.mlp(4, 3, 2)


def federate(out: Path | None, **changed: Any) -> pt.Run:
    given: dict[str, Any] = {"model": model(), "data": data(), "algorithm": method(), "rounds": 3, "batch": 4}
    given |= {"baselines": False, "executor": "loop", "checkpoint_every": 1, "out": out, **changed}
    return pt.federate(given.pop("model"), given.pop("data"), given.pop("algorithm"), **given)
