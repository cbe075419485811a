"""Which clients of a run have inputs or labels unlike those of the others: columns and sentences, cheaply."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from partita.core.draws import generator
from partita.data import FederatedData, columns
from partita.data.columns import Ragged
from partita.engine.significance import unlike_inputs, unlike_labels

MOST_CLIENTS = 10_000
"""With more clients nobody is looked at: it would take more memory than all else that is known of them."""
PER_CLIENT = 200
"""Training samples that are looked at of a client, at most."""
NUMBERS = 1 << 26
"""Numbers of all these samples together, at most."""
DIRECTIONS = 64
"""Larger inputs are projected to so many random directions."""


class UnusualClients(NamedTuple):
    """Columns of clients.csv (robust z-scores over the clients), and what to say of who stands out."""

    columns: dict[str, np.ndarray]
    sentences: dict[str, list[str]]


_known: WeakKeyDictionary[FederatedData, UnusualClients] = WeakKeyDictionary()
"""What was found of data that are there: many runs may be on the same."""


def unusual_clients(data: FederatedData, label_counts: np.ndarray | None) -> UnusualClients:
    """Compare each client's training inputs and labels with those of the others.

    label_counts   of each client and class; None where targets are no labels
    """
    if data not in _known:
        _known[data] = _compared(data, label_counts)
    return _known[data]


def _compared(data: FederatedData, label_counts: np.ndarray | None) -> UnusualClients:
    found = {}
    inputs = _sampled(data)
    if inputs is not None:
        found["input_z"] = unlike_inputs(*inputs)
    if label_counts is not None:
        found["label_z"] = unlike_labels(label_counts)
    sentences: dict[str, list[str]] = {}
    for kind in found.values():
        for client in np.flatnonzero(kind.stands_out).tolist():
            sentences.setdefault(data.names[client], []).append(kind.sentence(client) or "")
    return UnusualClients({name: kind.z for name, kind in found.items()}, sentences)


def _sampled(data: FederatedData) -> tuple[np.ndarray, np.ndarray] | None:
    """Return some training inputs of each client with their ranges.

    None for tokens, for several inputs, and for too many clients.
    """
    x = data.x
    if isinstance(x, tuple | dict | Ragged) or len(x.shape) < 2:
        return None
    if not (x.dtype.is_floating_point or x.dtype == torch.uint8):
        return None
    starts, sizes = data.train.T
    features = int(np.prod(x.shape[1:]))
    most = min(PER_CLIENT, NUMBERS // max(1, features * len(sizes)))
    if most < 1:
        return None
    counts = np.minimum(sizes, most)
    ends = np.cumsum(counts)
    owner = np.repeat(np.arange(len(counts)), counts)
    step = np.arange(len(owner)) - np.repeat(ends - counts, counts)  # evenly over the client's samples
    place = starts[owner] + step * sizes[owner] // np.maximum(counts[owner], 1)
    rows = columns.read(x, torch.from_numpy(place).to(columns.home(x))).reshape(len(place), -1)
    return _projected(rows.cpu().numpy().astype(np.float32)), np.stack([ends - counts, counts], axis=1)


def _projected(x: np.ndarray) -> np.ndarray:
    """Return few features as they are; of many, sums of all of them with random signs, each of one scale."""
    if x.shape[1] <= DIRECTIONS or not len(x):
        return x
    scale = x.std(0)
    x = (x - x.mean(0)) / np.where(scale > 0, scale, 1.0)
    signs = generator(0, "unusual").integers(0, 2, (x.shape[1], DIRECTIONS)) * 2 - 1
    directions: np.ndarray = x @ signs.astype(np.float32)
    return directions
