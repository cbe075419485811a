"""Scikit-learn's handwritten digits: real images that come with an installed package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from partita.data.build import Partition, split
from partita.data.federated import FederatedData
from partita.data.partitioners import iid
from partita.data.validation import SHARE


def digits(
    clients: int = 20,
    partition: Partition | None = None,
    *,
    test: float = 0.25,
    validation: float = SHARE,
    shift: Callable[[FederatedData, int], FederatedData] | None = None,
    seed: int = 0,
) -> FederatedData:
    """Deal 1,797 digits of 8 × 8 pixels in [0, 1] to clients (`partition=None`: iid).

    >>> digits(clients=20, partition=label_skew(classes=3), seed=0)
    """
    from sklearn.datasets import load_digits

    images, y = load_digits(return_X_y=True)
    x = (images.reshape(-1, 8, 8) / 16).astype(np.float32)
    given: dict[str, Any] = {
        "test": test,
        "validation": validation,
        "seed": seed,
        "source": {"name": "digits"},
    }
    data = split(x, y, clients, partition or iid(), **given)
    return data if shift is None else data.shift(shift, seed)
