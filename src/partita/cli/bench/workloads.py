"""What is measured: five models with the work of a round, and methods of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from partita import aggregate, algorithms, capacity, models, schedule
from partita.algorithms import psi
from partita.core.parts import Algorithm
from partita.data import FederatedData

LR = 0.05
POOL = 4096  # samples


class Workload(NamedTuple):
    """A model, the shape of its samples (of token ids, if `tokens`), and the work of a round.

    `large` are changes of the work for a GPU.
    """

    about: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    cohort: int
    steps: int
    batch: int
    rounds: int
    clients: int = 100
    tokens: bool = False
    large: dict[str, Any] = {}  # noqa: RUF012

    def on(self, device: str) -> Workload:
        """Return the work for a device."""
        return self if device == "cpu" else self._replace(**self.large)

    def data(self) -> FederatedData:
        """Return data of which every client reads a window of a fixed random pool, steps × batch samples."""
        generator = torch.Generator().manual_seed(0)
        n = self.steps * self.batch
        if self.tokens:
            x = torch.randint(0, self.classes, (POOL + n, *self.shape), generator=generator)
            y = x.roll(-1, 1)
        else:
            x = torch.randn(POOL + n, *self.shape, generator=generator)
            y = torch.randint(0, self.classes, (POOL + n,), generator=generator)
        start = np.arange(self.clients) * 7919 % POOL
        return FederatedData.make(x, y, np.stack([start, np.full_like(start, n)], axis=1))


CNN: dict[str, Any] = {
    "cohort": 8,
    "steps": 10,
    "batch": 32,
    "rounds": 2,
    "large": {"cohort": 32, "rounds": 5},
}
WORKLOADS = {
    "logistic": Workload(
        "logistic regression, 784 → 10",
        lambda: models.logistic(784, 10),
        (784,),
        10,
        cohort=50,
        steps=20,
        batch=20,
        rounds=10,
        clients=1000,
    ),
    "mnist_cnn": Workload(
        "CNN of 0.6 M parameters, 28 × 28", lambda: models.mnist_cnn(10, dropout=0.0), (28, 28), 10, **CNN
    ),
    "leaf_cnn": Workload(
        "CNN of LEAF, 6.6 M parameters, 28 × 28", lambda: models.leaf_cnn(62), (28, 28), 62, **CNN
    ),
    "resnet20": Workload(
        "ResNet-20 with GroupNorm, 32 × 32",
        lambda: models.resnet20(10, norm="group"),
        (3, 32, 32),
        10,
        cohort=4,
        steps=5,
        batch=32,
        rounds=2,
        large={"cohort": 32, "steps": 10, "rounds": 3},
    ),
    "transformer": Workload(
        "transformer of 4 layers, width 256, 10,004 words, 20 tokens",
        lambda: models.transformer(10004),
        (20,),
        10004,
        cohort=2,
        steps=2,
        batch=16,
        rounds=6,
        tokens=True,
        large={"cohort": 16, "steps": 10, "batch": 64, "rounds": 3},
    ),
}


class Method(NamedTuple):
    """A method and what it runs under.

    settings  further arguments of `federate`, by the number of clients
    updates   server updates in which every client reports once
    """

    algorithm: Callable[[], Algorithm]
    settings: Callable[[int], dict[str, Any]] = lambda clients: {}  # noqa: ARG005
    updates: int = 1


def _asynchronous(clients: int) -> dict[str, Any]:
    delays = schedule.delays(download=1.0, upload=5.0)
    half = max(1, clients // 2)
    return {"schedule": schedule.asynchronous(concurrency=clients, buffer=half, delays=delays)}


def _weak_devices(clients: int) -> dict[str, Any]:  # noqa: ARG001
    return {"capacity": capacity.depth({"strong": 0, "weak": 2})}


METHODS = {
    "fedavg": Method(lambda: algorithms.fedavg(lr=LR)),
    "fedalt": Method(lambda: algorithms.fedalt(personal="output", lr=LR)),
    "fedplus": Method(lambda: algorithms.fedplus(psi.avg(0.1), lr=LR, sigma=1.0)),
    "pfedme": Method(lambda: algorithms.pfedme(lr=LR, lam=5.0, inner_lr=LR, inner_steps=2)),
    "scaffold": Method(lambda: algorithms.scaffold(lr=LR)),
    "persafl_me": Method(
        lambda: algorithms.persafl_me(lr=LR, lam=5.0, inner_lr=LR, inner_steps=2), _asynchronous, updates=2
    ),
    "embracing": Method(lambda: algorithms.fedavg(lr=LR), _weak_devices),
    "trimmed_mean": Method(lambda: algorithms.fedavg(lr=LR, aggregate=aggregate.trimmed_mean(1))),
}
