"""The tasks of partial personalization: data, model and training, after Pillutla et al. (2022), appendix B.

| task | the paper's | here |
| --- | --- | --- |
| femnist | EMNIST, 1114 writers, ResNet-18 | 272 writers with at least 100 images, the same |
| shakespeare | StackOverflow, next word, 1000 users, transformer | next character, 266 roles, the same |
| free_spoken_digits | LibriSpeech, 902 narrators, transformer + CTC | ten digits, 6 speakers, ResNet-20 |
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor, nn

from partita import check, data, models, server
from partita.data import FederatedData
from partita.types import Rate, ServerOptimizer

SIZES = ("small", "paper")
ADAPTERS = {"femnist": "residual", "shakespeare": "bottleneck", "free_spoken_digits": "residual"}


@dataclass(frozen=True)
class Task:
    """One dataset with its model and the settings of the three stages of the paper's pipeline (Table 9).

    Stages: (a) a global model, (b) shared and personal parts, (c) fine-tuning of the personal parts.
    `lr` and `server_lr` have a value for each stage that uses one; `adapters` is the kind of adapter.
    """

    data: FederatedData
    model: nn.Module
    adapters: str
    rounds: tuple[int, int]
    epochs: int
    cohort: int
    batch: int
    lr: tuple[Rate, Rate, float]
    server: tuple[ServerOptimizer, ServerOptimizer]
    max_grad_norm: float | None = None

    def adapted(self, seed: int) -> nn.Module:
        """The model with adapters, the same ones for every client."""
        return models.add_adapters(self.model, self.adapters, seed=seed)


def with_dropout(model: nn.Module, p: float) -> nn.Module:
    """A copy that drops with probability p: in its dropout layers or, without any, before its last layer."""
    model = copy.deepcopy(model)
    layers = [m for m in model.modules() if isinstance(m, nn.Dropout)]
    for layer in layers:
        layer.p = p
    if not layers:
        last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
        last.add_module("dropout", nn.Dropout(p))
        last.register_forward_pre_hook(_drop_input)
    return model


def _drop_input(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
    return (layer.get_submodule("dropout")(inputs[0]),)


def task(
    name: str,
    size: str = "small",
    seed: int = 0,
    *,
    clients: int | None = None,
    rounds: int | None = None,
    personal_rounds: int | None = None,
    epochs: int | None = None,
) -> Task:
    """A task by its name; the other arguments replace its own number of clients, rounds and epochs."""
    check.choice("data", name, TASKS)
    check.choice("size", size, SIZES)
    found = TASKS[name](size == "paper", seed, clients)
    a, b = found.rounds
    wanted = {"rounds": rounds, "personal_rounds": personal_rounds, "epochs": epochs}
    for field, value in wanted.items():
        if value is not None:
            check.integer(field, value, low=1)
    return replace(
        found,
        rounds=(rounds or a, personal_rounds or b),
        epochs=epochs or found.epochs,
        cohort=min(found.cohort, found.data.clients),
    )


def network(name: str, paper: bool, seed: int) -> nn.Module:
    """The model of a task."""
    if name == "femnist":
        return models.resnet18(62, width=1.0 if paper else 0.125, seed=seed)
    if name == "free_spoken_digits":
        return models.resnet20(10, norm="group", width=1.0 if paper else 0.5, channels=1, seed=seed)
    width, hidden, depth = (256, 1024, 4) if paper else (64, 256, 2)
    return models.transformer(76, length=80, width=width, hidden=hidden, depth=depth, seed=seed)


def _femnist(paper: bool, seed: int, clients: int | None) -> Task:
    """Characters by writer. Paper: 2000 + 500 rounds of 10 writers, lr 0.5 halved every 500, then 0.01."""
    writers = clients or (None if paper else 60)
    lr = server.halving(0.5, every=500) if paper else server.constant(0.2)
    return Task(
        data=data.real("femnist", min_samples=100, clients=writers, seed=seed),
        model=network("femnist", paper, seed),
        adapters=ADAPTERS["femnist"],
        rounds=(2000, 500) if paper else (60, 20),
        epochs=5,
        cohort=10,
        batch=32,
        lr=(lr, server.constant(0.01 if paper else 0.05), 0.01),
        server=(server.sgd(), server.sgd()),
    )


def _shakespeare(paper: bool, seed: int, clients: int | None) -> Task:
    """Characters by role. Paper: 1000 + 500 rounds of 50, FedAdam, clipped gradients, warm-up and decay."""
    return Task(
        data=data.real(
            "shakespeare", min_characters=5000, clients=clients or (None if paper else 60), seed=seed
        ),
        model=network("shakespeare", paper, seed),
        adapters=ADAPTERS["shakespeare"],
        rounds=(1000, 500) if paper else (60, 20),
        epochs=5,
        cohort=50 if paper else 20,
        batch=64 if paper else 16,
        lr=(server.linear(1.0, warmup=0.1), server.linear(0.1, warmup=0.1), 0.1),
        server=(server.adam(5e-4 if paper else 5e-3), server.adam(5e-5 if paper else 5e-4)),
        max_grad_norm=0.1,
    )


def _free_spoken_digits(paper: bool, seed: int, clients: int | None) -> Task:
    """Spoken digits by speaker: 6 clients, all of them in every round."""
    return Task(
        data=data.real("free_spoken_digits", clients=clients, seed=seed),
        model=network("free_spoken_digits", paper, seed),
        adapters=ADAPTERS["free_spoken_digits"],
        rounds=(200, 100) if paper else (15, 8),
        epochs=5,
        cohort=6,
        batch=32,
        lr=(server.constant(0.1), server.constant(0.01), 0.01),
        server=(server.sgd(), server.sgd()),
    )


TASKS: dict[str, Callable[[bool, int, int | None], Task]] = {
    "femnist": _femnist,
    "shakespeare": _shakespeare,
    "free_spoken_digits": _free_spoken_digits,
}
