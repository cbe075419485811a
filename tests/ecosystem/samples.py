"""Samples for foreign models, and what is known of such a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import nn

import partita as pt

CLIENTS, PER_CLIENT, CLASSES = 4, 7, 3
VOCABULARY, LENGTH = 29, 12


class Foreign(NamedTuple):
    """A model of another package on samples that fit it.

    build     returns the model with random weights
    samples   returns the samples of a few clients
    settings  what a user must say beside model and data
    double    whether it is compared in double precision: norms over a few small samples let roundings
              grow until single precision cannot tell
    """

    package: str
    build: Callable[[], nn.Module]
    samples: Callable[[], pt.FederatedData]
    settings: dict[str, Any] = {}  # noqa: RUF012
    double: bool = False


def _federated(x: Any, y: np.ndarray) -> pt.FederatedData:
    """Return samples of clients of different sizes, so that some batches are short."""
    client = np.repeat(np.arange(CLIENTS), PER_CLIENT)
    test = np.tile(np.arange(PER_CLIENT) >= PER_CLIENT - 2, CLIENTS)
    keep = np.ones(len(client), dtype=bool)
    keep[:2] = False
    if isinstance(x, dict):
        x = {name: values[keep] for name, values in x.items()}
    else:
        x = tuple([values[keep] for values in x]) if isinstance(x, tuple) else x[keep]
    return pt.data.from_arrays(x, y[keep], client[keep], test=test[keep], validation=0)


def images(size: int, name: str = "", dense: bool = False) -> Callable[[], pt.FederatedData]:
    """Return images of random numbers in three classes, or with a class for each pixel."""

    def make() -> pt.FederatedData:
        rng = np.random.default_rng(0)
        n = CLIENTS * PER_CLIENT
        x = rng.normal(size=(n, 3, size, size)).astype(np.float32)
        y = rng.integers(0, CLASSES, (n, size, size) if dense else n)
        return _federated({name: x} if name else x, y)

    return make


def vectors(*shape: int, inputs: int = 1) -> Callable[[], pt.FederatedData]:
    """Return random numbers in three classes, for models with one input or several."""

    def make() -> pt.FederatedData:
        rng = np.random.default_rng(0)
        n = CLIENTS * PER_CLIENT
        x = tuple([rng.normal(size=(n, *shape)).astype(np.float32) for _ in range(inputs)])
        return _federated(x if inputs > 1 else x[0], rng.integers(0, CLASSES, n))

    return make


END = 2  # the token at the end of a text


def text(kind: str = "classes") -> Callable[[], pt.FederatedData]:
    """Return tokens with an attention mask: in three classes, to be continued, or each in a class."""

    def make() -> pt.FederatedData:
        rng = np.random.default_rng(0)
        n = CLIENTS * PER_CLIENT
        ids = rng.integers(5, VOCABULARY, (n, LENGTH))
        length = rng.integers(LENGTH // 2, LENGTH + 1, n)
        ids[np.arange(n), length - 1] = END
        real = np.arange(LENGTH) < length[:, None]
        ids = np.where(real, ids, 0)
        x = {"input_ids": ids, "attention_mask": real.astype(np.int64)}
        if kind == "classes":
            return _federated(x, rng.integers(0, CLASSES, n))
        y = ids if kind == "causal" else rng.integers(0, CLASSES, ids.shape)
        return _federated(x, np.where(real, y, -100))

    return make


def lists(kind: str = "classes") -> Callable[[], pt.FederatedData]:
    """Return the same texts as lists of different lengths, whose masks are made."""

    def make() -> pt.FederatedData:
        rng = np.random.default_rng(0)
        ids = [rng.integers(5, VOCABULARY, n) for n in rng.integers(3, LENGTH + 1, CLIENTS * PER_CLIENT)]
        y: Any = rng.integers(0, CLASSES, len(ids))
        if kind != "classes":
            y = ids if kind == "causal" else [rng.integers(0, CLASSES, len(x)) for x in ids]
        client = np.repeat(np.arange(CLIENTS), PER_CLIENT)
        test = np.tile(np.arange(PER_CLIENT) >= PER_CLIENT - 2, CLIENTS)
        return pt.data.from_arrays({"input_ids": ids}, y, client, test=test, validation=0)

    return make


def sound() -> pt.FederatedData:
    """Return waves of random numbers in three classes."""
    rng = np.random.default_rng(0)
    n = CLIENTS * PER_CLIENT
    x = rng.normal(size=(n, 200)).astype(np.float32)
    return _federated({"input_values": x}, rng.integers(0, CLASSES, n))
